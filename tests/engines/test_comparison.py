"""The command from files to words, with faults as engines have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from qgate.cli import main
from qgate.engines.comparison import compare_engines
from qgate.engines.findings import EngineLimits
from qgate.errors import QgateError
from tests.engines import runs
from tests.engines.gated import collect, network, older_weights, other_module
from tests.shares import share

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    b = runs.scored()
    runs.write_npz(tmp_path / "b.npz", b)
    runs.write_npz(tmp_path / "a.npz", runs.moved(b))
    return str(tmp_path / "a.npz"), str(tmp_path / "b.npz")


def test_the_command_says_how_far_apart_engines_are(
    files: tuple[str, str], capsys: Capture
) -> None:
    assert main(["engines", *files]) == 0
    output = capsys.readouterr().out
    assert "differ by KL" in output.splitlines()[0]
    assert "top-1 flips" in output
    assert main(["engines", *files, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["figures"]["tokens"] == 234
    assert record["beyond"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-kl", "1e-9"], "nats per token is above the limit 1e-09"),
        (["--max-logprob", "1e-3"], "above the limit 0.001"),
        (["--same-weights"], "no weights were given: name them by --weights"),
    ],
)
def test_a_limit_that_is_exceeded_is_the_first_line(
    files: tuple[str, str], capsys: Capture, options: list[str], words: str
) -> None:
    assert main(["engines", *files, *options]) == 1
    assert words in capsys.readouterr().out.splitlines()[0]


def test_limits_that_hold_exit_with_zero(files: tuple[str, str]) -> None:
    limits = ["--max-kl", "1", "--max-logprob", "1", "--max-flips", "0.5"]
    assert main(["engines", *files, *limits]) == 0


def test_flips_have_a_limit(tmp_path: Path, capsys: Capture) -> None:
    b = runs.scored()
    a = runs.write_lines(tmp_path / "a.jsonl", runs.moved(b, 0.5), "vllm")
    r = runs.write_lines(tmp_path / "b.jsonl", b, "sglang")
    assert main(["engines", str(a), str(r), "--max-flips", "0.001"]) == 1
    assert "have another most likely token" in capsys.readouterr().out.splitlines()[0]
    plain = runs.write_lines(tmp_path / "p.jsonl", b)
    assert main(["engines", str(a), str(plain), "--max-flips", "0.5"]) == 1
    assert "flips have a limit, and the most likely" in capsys.readouterr().out


def _other_token(ids: torch.Tensor) -> torch.Tensor:
    changed = ids.clone()
    changed[2, 9] += 1
    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_token, "in sample '2', token 9 is"),
        (lambda ids: ids[:5], "has 6 samples and"),
        (lambda ids: ids[:, :30], "it has 40 tokens in"),
    ],
)
def test_other_tokens_are_bad_input(
    tmp_path: Path,
    capsys: Capture,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: str,
) -> None:
    b = runs.scored()
    ids = change(b.ids)
    runs.write_npz(tmp_path / "a.npz", b)
    other = runs.Scored(ids, b.logits[: len(ids), : ids.shape[1]])
    runs.write_npz(tmp_path / "b.npz", other)
    assert main(["engines", str(tmp_path / "a.npz"), str(tmp_path / "b.npz")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_requests_in_another_order_are_paired_by_their_ids(tmp_path: Path) -> None:
    b = runs.scored()
    a = runs.write_lines(tmp_path / "a.jsonl", b)
    lines = a.read_text().splitlines()
    (tmp_path / "b.jsonl").write_text("\n".join(lines[::-1]))
    record = compare_engines(str(a), str(tmp_path / "b.jsonl"))
    assert record.figures.equal_share == 1


def _one_token(module: nn.Module) -> None:
    def hook(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        changed[1, 30] *= 1.5
        return changed

    module.get_submodule("lm_head").register_forward_hook(hook)


FAULTS: dict[str, tuple[Callable[[nn.Module], None], str, int]] = {
    "a stale layer": (older_weights, "model.layers.2.mlp.up_proj forward weight", 1),
    "another kernel": (other_module, "model.layers.1.self_attn.o_proj forward output", 0),
    "one token": (_one_token, "lm_head forward output", 0),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the dump of the network as it is."""
    return collect(tmp_path_factory.mktemp("dumps") / "right", network(), 2)


@share(3)
@pytest.mark.parametrize("name", FAULTS)
def test_dumps_tell_the_first_site_that_differs(right: str, tmp_path: Path, name: str) -> None:
    change, site, weights = FAULTS[name]
    other = network()
    change(other)
    dump = collect(tmp_path / "other", other, 2)
    record = compare_engines(dump, right, limits=EngineLimits(same_weights=True))
    assert record.first_site is not None
    assert site in record.first_site.site
    assert record.first_site.origin == "local"
    assert record.sites[0].origin == "local", "before larger errors that are carried along"
    assert record.weights is not None
    assert record.weights.differing == weights
    assert len(record.beyond) == weights
    if name == "one token":
        first = record.figures.carriers[0]
        assert (first.sample, first.position) == ("1", 31)


def test_equal_dumps_are_equal(right: str, tmp_path: Path, capsys: Capture) -> None:
    second_run = collect(tmp_path / "again", network(), 2)
    assert main(["engines", right, second_run, "--max-kl", "0", "--same-weights"]) == 0
    output = capsys.readouterr().out
    assert "give equal log-probabilities to all 94 tokens" in output
    assert "0 of 164 tensors differ: the modules agree" in output


def test_weights_that_one_engine_holds_rounded_are_told_from_others(
    tmp_path: Path, files: tuple[str, str], capsys: Capture
) -> None:
    master = {k: v.contiguous() for k, v in network().state_dict().items() if k != "lm_head.weight"}
    rounded = {f"module.{name}": x.bfloat16() for name, x in master.items()}
    save_file(master, tmp_path / "master.safetensors")
    save_file(rounded, tmp_path / "served.safetensors")
    weights = ["--weights", *(str(tmp_path / f"{n}.safetensors") for n in ("master", "served"))]
    assert main(["engines", *files, "--same-weights", *weights]) == 0
    assert "47 are equal but for rounding (float32 and bfloat16)" in capsys.readouterr().out
    rounded["module.model.norm.weight"] = rounded["module.model.norm.weight"] * 2
    save_file(rounded, tmp_path / "served.safetensors")
    assert main(["engines", *files, "--same-weights", *weights]) == 1
    assert "1 weight differs, model.norm.weight first" in capsys.readouterr().out


def test_weights_of_another_model_are_refused(tmp_path: Path, files: tuple[str, str]) -> None:
    save_file({"x.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"y.weight": torch.ones(2)}, tmp_path / "y.safetensors")
    weights = str(tmp_path / "x.safetensors"), str(tmp_path / "y.safetensors")
    with pytest.raises(QgateError, match="no weight has the same name in both"):
        compare_engines(*files, weights=weights)
