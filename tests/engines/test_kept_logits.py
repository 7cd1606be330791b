"""Logits kept in few bytes: their size, the KL that follows from them, and faults that must show in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import Tensor

from qgate.cli import main
from qgate.engines import compute, kept_logits
from qgate.engines.compute import figures_of, values_of
from qgate.engines.kept_logits import keep_logits
from qgate.engines.logit_files import read_logit_file
from qgate.engines.record import TokenFigures
from qgate.engines.scored import scored as sample_of
from qgate.errors import QgateError
from tests.engines import runs
from tests.shares import share

# Vocabulary, samples, tokens, and the most bytes as a share of those of float16 logits.
SIZES = [(32_000, 5, 24, 0.01), (70_000, 4, 12, 0.01), (256, 8, 128, 0.25), (999, 6, 80, 0.25)]


def zipf(vocabulary: int, samples: int, tokens: int, seed: int = 0) -> runs.Scored:
    """Logits whose probabilities fall like those of words, and tokens drawn from them."""
    draw = torch.Generator().manual_seed(seed)
    ranks = torch.rand(samples, tokens, vocabulary, generator=draw).argsort(-1) + 1
    logits = -1.2 * ranks.log() + 1.5 * torch.randn(samples, tokens, vocabulary, generator=draw)
    p = logits.flatten(0, 1).softmax(-1)
    ids = torch.multinomial(p, 1, generator=draw).reshape(samples, tokens).roll(1, 1)
    return runs.Scored(ids, logits)


def figures(actual: runs.Scored, reference: Path) -> TokenFigures:
    pairs = list(zip(runs.samples_of(actual), read_logit_file(str(reference)).samples, strict=True))
    return figures_of(pairs, values_of(pairs))


def exact(actual: runs.Scored, reference: runs.Scored) -> Any:
    p, q = (torch.softmax(run.logits[:, :-1].double(), -1).numpy() for run in (reference, actual))
    return stats.entropy(p, q, axis=-1)


@share(8)
@pytest.mark.parametrize(("vocabulary", "samples", "tokens", "most"), SIZES)
def test_the_kl_of_kept_logits_is_within_its_error(
    tmp_path: Path, vocabulary: int, samples: int, tokens: int, most: float
) -> None:
    reference = zipf(vocabulary, samples, tokens)
    file = tmp_path / "kept.safetensors"
    keep_logits(str(file), runs.samples_of(reference))
    assert file.stat().st_size <= most * 2 * reference.logits.numel()
    for noise in (1e-3, 0.1, 1.0):
        actual = runs.moved(reference, noise)
        expected, now = exact(actual, reference), figures(actual, file)
        assert now.kl is not None
        assert now.kl_spread is not None
        assert abs(now.kl.mean - expected.mean()) <= stats.sem(expected.mean(1)), noise
        assert now.kl_spread.q99 == pytest.approx(np.quantile(expected, 0.99), rel=0.25)
        assert now.flips is not None
        assert now.flips.mean == float((actual.best != reference.best).double().mean())
        own = (actual.logprobs - reference.logprobs)[:, 1:]
        assert now.difference.mean == pytest.approx(float(own.mean()), abs=1e-6)


def test_draws_are_right_in_the_mean(tmp_path: Path) -> None:
    """Where no token is likely, nearly all of the KL comes from draws."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(200, (1, 17), generator=draw)
    reference = runs.Scored(ids, 0.3 * torch.randn(1, 17, 200, generator=draw))
    actual = runs.moved(reference, 0.3)
    file = tmp_path / "kept.safetensors"
    kl: list[float] = []
    for seed in range(60):
        keep_logits(str(file), runs.samples_of(reference), seed)
        now = figures(actual, file).kl
        assert now is not None
        kl.append(now.mean)
    assert abs(np.mean(kl) - exact(actual, reference).mean()) < 3 * stats.sem(kl)
    assert stats.sem(kl) < 0.02 * np.mean(kl)


def _drawn_evenly(chosen: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def choose(logs: Tensor, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        ids, remainder = chosen(logs, generator)
        top = kept_logits._top(logs.shape[-1])
        shape = (len(ids), ids.shape[1] - top)
        ids[:, top:] = torch.from_numpy(generator.integers(0, logs.shape[-1], shape))
        return ids, remainder

    return choose


def _least_likely(chosen: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return lambda logs, generator: (chosen(-logs, generator)[0], chosen(logs, generator)[1])


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "draws that are not by probability": (kept_logits, "_chosen", _drawn_evenly),
    "the least likely tokens kept": (kept_logits, "_chosen", _least_likely),
    "the rest forgotten": (
        kept_logits, "_chosen", lambda chosen: lambda *a: ((ids := chosen(*a))[0], 0 * ids[1]),
    ),
    "plain differences of the kept tokens": (compute, "_k3", lambda _: lambda d: -d),
    "levels of eight bits": (
        kept_logits, "_levels",
        lambda levels: lambda logs: ((of := levels(logs))[0].int().div(256, rounding_mode="floor").mul(256).to(torch.uint16), of[1]),
    ),
    "levels of another range": (kept_logits, "_LEVELS", lambda levels: levels + 700),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_kept_logits_move_the_kl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    reference = zipf(256, 8, 128)
    # The errors depend on how likely a token is.
    actual = runs.moved(runs.Scored(reference.ids, 1.03 * reference.logits), 0.03)
    file = tmp_path / "kept.safetensors"
    module, name, plant = FAULTS[fault]
    with monkeypatch.context() as planted:
        if module is kept_logits:
            planted.setattr(module, name, plant(getattr(module, name)))
        keep_logits(str(file), runs.samples_of(reference))
    if module is compute:
        monkeypatch.setattr(module, name, plant(getattr(module, name)))
    expected, now = exact(actual, reference), figures(actual, file)
    assert now.kl is not None
    assert abs(now.kl.mean - expected.mean()) > stats.sem(expected.mean(1))


def test_the_command_keeps_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = zipf(256, 4, 40)
    b = runs.write_npz(tmp_path / "b.npz", reference)
    a = runs.write_npz(tmp_path / "a.npz", runs.moved(reference, 0.1))
    reference_path = tmp_path / "kept.safetensors"
    assert main(["engines", str(a), str(b), "--keep-reference", str(reference_path)]) == 0
    whole = capsys.readouterr().out
    assert main(["engines", str(a), str(reference_path)]) == 0
    text = capsys.readouterr().out
    same = ("perplexity", "top-1 flips", "k3 ")
    for line in whole.splitlines():
        if line.startswith(same):
            assert line in text
    assert main(["engines", str(reference_path), str(b)]) == 0
    assert "KL is the estimate k3" in capsys.readouterr().out, "the vocabulary of the first is lost"


def _with(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def write(file: Path) -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return write


BROKEN = {
    "lacks kept_rest": _with(lambda tensors: tensors.pop("kept_rest")),
    "do not fit each other": _with(lambda t: t.update(kept_levels=t["kept_levels"][:, 1:].clone())),
    "tensors that do not fit": _with(lambda t: t.update(kept_sizes=torch.tensor([3, 1]))),
}


@pytest.mark.parametrize("words", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, words: str) -> None:
    file = tmp_path / "kept.safetensors"
    keep_logits(str(file), runs.samples_of(runs.scored()))
    BROKEN[words](file)
    with pytest.raises(QgateError, match=words):
        read_logit_file(str(file))


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    masked = runs.scored()
    masked.logits[0, 3, 5] = -torch.inf
    file = str(tmp_path / "kept.safetensors")
    with pytest.raises(QgateError, match="not finite: cut padding"):
        keep_logits(file, runs.samples_of(masked))
    with pytest.raises(QgateError, match="no logits to keep"):
        keep_logits(file, [sample_of("7", np.arange(4), np.zeros(4))])
    with pytest.raises(QgateError, match=r"ends in \.safetensors"):
        keep_logits("kept.npz", runs.samples_of(runs.scored()))
    keep_logits(file, runs.samples_of(runs.scored()))
    other = runs.Scored(
        runs.scored().ids, torch.randn(runs.SAMPLES, runs.TOKENS, runs.VOCABULARY + 2)
    )
    with pytest.raises(QgateError, match="logits of 52 and 50 tokens"):
        figures(other, Path(file))
