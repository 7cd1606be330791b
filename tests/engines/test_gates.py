"""Gates of two engines: accepted pairs pass, faults are named first, and other tokens are refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qgate.engines.opening import open_pair
from qgate.engines.units import mean_noise, single_noise, tokens_text
from qgate.errors import QgateError
from tests.engines import runs
from tests.engines.gated import (
    FAULTS,
    SUITE,
    accept,
    collect,
    failures,
    gates_of,
    logits_pair,
    network,
    not_a_number,
    older_weights,
    one_token,
    other_module,
    outcomes,
)
from tests.shares import proof


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the accepted figures of a trainer and a rollout engine."""
    folder: Path = tmp_path_factory.mktemp("pair")
    assert accept(logits_pair(folder), folder / "baselines") == []
    return folder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with dumps `a` and `b` of one network, and what was accepted for them."""
    folder: Path = tmp_path_factory.mktemp("dumps")
    engines = collect(folder / "a", network()), collect(folder / "b", network())
    assert accept(engines, folder / "baselines") == []
    return folder


# Tokens -------------------------------------------------------------------------------------------


def test_an_accepted_pair_passes(pair: Path) -> None:
    (outcome,) = outcomes(gates_of(logits_pair(pair), pair / "baselines"))
    assert outcome.text == ""
    site_metrics = {(check.site, check.metric) for check in outcome.verdict.checks}
    assert site_metrics >= {
        ("all tokens", "kl"), ("most likely tokens", "flips_share"), ("all tokens", "compared_tokens"),
        ("worst sample", "kl"), ("worst token", "largest_logprob"),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(2, 8))
def test_noise_of_another_run_passes(pair: Path, tmp_path: Path, seed: int) -> None:
    """Kernels that are not deterministic give other noise of the same size."""
    assert failures(gates_of(logits_pair(tmp_path, seed=seed), pair / "baselines")) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_tokens_is_red_and_named(pair: Path, tmp_path: Path, name: str) -> None:
    change, words = FAULTS[name]
    (text,) = failures(gates_of(logits_pair(tmp_path, change), pair / "baselines"))
    assert re.search(words, text.partition("\n")[0]), text


def test_a_sample_among_equal_ones_is_no_noise() -> None:
    accepted = dict.fromkeys(range(8), 1.0)
    assert mean_noise(accepted, [1.0] * 7 + [9.0]) == 0
    assert single_noise(accepted, [1.0] * 7 + [9.0]) == 0
    assert mean_noise(accepted, [1.0, 2.0, 3.0]) == 0
    assert mean_noise({}, [1.0] * 8) == 0
    noisy = [1.0 + 0.1 * (-1) ** at for at in range(8)]
    assert mean_noise(accepted, noisy) == pytest.approx(2 * 1.4826 * 0.1 / 8**0.5)


def test_engines_that_are_equal_all_at_once_are_not_what_was_accepted(
    pair: Path, tmp_path: Path
) -> None:
    _, rollout = logits_pair(tmp_path)
    (text,) = failures(gates_of((rollout, rollout), pair / "baselines"))
    assert "nothing differs any more" in text.partition("\n")[0]


def test_worse_figures_may_be_accepted_and_then_pass(tmp_path: Path) -> None:
    engines, accepted = logits_pair(tmp_path, one_token), tmp_path / "baselines"
    assert accept(logits_pair(tmp_path / "first"), accepted) == []
    assert "if intended: pytest" in failures(gates_of(engines, accepted))[0]
    assert accept(engines, accepted) == []
    assert failures(gates_of(engines, accepted)) == []


def test_what_is_not_finite_is_never_accepted(tmp_path: Path) -> None:
    engines = logits_pair(tmp_path, not_a_number)
    (text,) = accept(engines, tmp_path / "baselines")
    assert "1 NaN or infinite in actual" in text


def test_limits_of_settings_hold_without_an_accepted_figure(pair: Path) -> None:
    engines = logits_pair(pair)
    bounds = ["kl<1e-3", "largest_logprob<1", "flips_share<0.2", "equal_share>0"]
    assert failures(gates_of(engines, pair / "baselines", {"absolute": bounds})) == []
    (text,) = failures(gates_of(engines, pair / "baselines", {"absolute": ["kl<1e-9"]}))
    assert re.match(r"all tokens \(engines tokens\) |kl .* > 1\.0e-09 at all tokens", text)
    assert "absolute limit" in text.partition("\n")[0]


def test_a_limit_of_what_is_not_measured_fails(tmp_path: Path) -> None:
    scored = runs.scored()
    a = runs.write_lines(tmp_path / "a.jsonl", runs.moved(scored))
    b = runs.write_lines(tmp_path / "b.jsonl", scored)
    engines = str(a), str(b)
    assert accept(engines, tmp_path / "baselines") == []
    assert failures(gates_of(engines, tmp_path / "baselines")) == []
    texts = failures(gates_of(engines, tmp_path / "baselines", {"absolute": ["flips_share<0.5"]}))
    assert "flips_share was not computed" in texts[0]


# Other tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids, rows: (ids[:5], rows[:5]), "8 samples of 320 tokens then, 5 samples of 200"),
        (lambda ids, rows: ((ids + 1) % 50, rows), "8 samples of 320 tokens, with other ids"),
    ],
)
def test_other_tokens_than_accepted_are_one_error(
    pair: Path, tmp_path: Path, change: object, words: str
) -> None:
    paths = logits_pair(tmp_path)
    for path in paths:
        with np.load(path) as arrays:
            ids, rows = change(arrays["tokens"], arrays["logits"])  # type: ignore[operator]
        np.savez(path, tokens=ids, logits=rows)
    gates = gates_of(paths, pair / "baselines")
    with pytest.raises(QgateError, match=words):
        gates.check_accepted()
    accepted = tmp_path / "baselines"
    assert accept(logits_pair(tmp_path / "first"), accepted) == []
    assert accept(paths, accepted) == []
    assert failures(gates_of(paths, accepted)) == []


def test_the_order_of_samples_does_not_matter(pair: Path, tmp_path: Path) -> None:
    paths = logits_pair(tmp_path)
    for path in paths:
        with np.load(path) as arrays:
            moved = {name: values[::-1].copy() for name, values in arrays.items()}
        np.savez(path, **moved)
    assert tokens_text(open_pair(*paths).samples) == tokens_text(
        open_pair(*logits_pair(pair)).samples
    )
    assert failures(gates_of(paths, pair / "baselines")) == []


# Weights and sites --------------------------------------------------------------------------------


@proof
def test_equal_dumps_pass_all_three_gates(dumps: Path) -> None:
    gates = gates_of((str(dumps / "a"), str(dumps / "b")), dumps / "baselines")
    assert gates.subject.parts == ["tokens", "weights", "sites"]
    assert [outcome.text for outcome in outcomes(gates)] == ["", "", ""]
    assert gates.notes() == []


@proof
def test_weights_of_an_older_step_are_red_in_all_gates_and_never_accepted(
    dumps: Path, tmp_path: Path
) -> None:
    wrong = network()
    older_weights(wrong)
    engines = collect(tmp_path / "a", wrong), str(dumps / "b")
    tokens, weights, sites = failures(gates_of(engines, dumps / "baselines"))
    name = "model.layers.2.mlp.up_proj"
    assert tokens.startswith("kl ")
    assert weights.startswith(
        f"{name}.weight, rank 0 (engines weights): the weight is not that of the other engine: "
        "relative error 1"
    )
    assert "mend what it names" in weights
    assert f"{name} forward weight" in sites.partition("\n")[0]
    (refusal,) = accept(engines, tmp_path / "baselines")
    assert refusal.startswith(f"{name}.weight, rank 0 (engines weights)")
    rule = {"sites": "up_proj", "absolute": ["findings<1"], "reason": "a step behind on purpose"}
    allowed = gates_of(engines, tmp_path / "baselines", {"rules": [rule]})
    assert failures(allowed) == []


def test_a_module_that_differs_is_the_first_line(dumps: Path, tmp_path: Path) -> None:
    wrong = network()
    other_module(wrong)
    engines = collect(tmp_path / "a", wrong), str(dumps / "b")
    texts = failures(gates_of(engines, dumps / "baselines"))
    first = texts[-1].partition("\n")[0]
    assert "model.layers.1.self_attn.o_proj forward output" in first
    assert "it is the first that differs while the inputs agree" in first
    accepted = tmp_path / "baselines"
    assert accept(engines, accepted) == []
    assert failures(gates_of(engines, accepted)) == []


def test_rounded_weights_are_accepted_as_text(pair: Path, tmp_path: Path) -> None:
    state = {"model.layers.0.up.weight": torch.randn(8, 8), "model.norm.weight": torch.ones(8) / 3}
    served = {name: weight.bfloat16() for name, weight in state.items()}
    save_file(state, tmp_path / "master.safetensors")
    save_file(served, tmp_path / "served.safetensors")
    weights = str(tmp_path / "master.safetensors"), str(tmp_path / "served.safetensors")
    engines, accepted = logits_pair(pair), tmp_path / "baselines"
    assert accept(engines, accepted, weights) == []
    assert failures(gates_of(engines, accepted, weights=weights)) == []
    (text,) = failures(gates_of(engines, accepted, weights=(weights[0], weights[0])))
    assert text.startswith("rounded (float32 and bfloat16) accepted, equal found, at ")
    assert "--accept-plan" in text
    save_file({**served, "extra.weight": torch.ones(2)}, weights[1])
    (text,) = failures(gates_of(engines, accepted, weights=weights))
    assert text.startswith(
        "extra.weight (engines weights): the weight is in the reference engine alone"
    )


def test_accepted_parts_that_nothing_tells_now_are_an_error(dumps: Path, tmp_path: Path) -> None:
    scored = runs.scored()
    path = str(runs.write_npz(tmp_path / "a.npz", scored))
    assert accept((path, path), tmp_path / "baselines") == []
    gates = gates_of((path, path), tmp_path / "baselines")
    assert len(gates.notes()) == 2
    with pytest.raises(QgateError, match="no weights of engines-mine are there"):
        gates.weights(SUITE)
    with pytest.raises(QgateError, match="the engines are no dumps"):
        gates.sites(SUITE)
    with pytest.raises(QgateError, match="unknown part of engines 'wieghts'"):
        gates.part(SUITE, "wieghts")
    from_dump = gates_of((str(dumps / "a"), str(dumps / "b")), dumps / "baselines")
    ids = torch.randint(256, (4, 48), generator=torch.Generator().manual_seed(0))
    del from_dump
    logits = torch.randn(4, 48, 256, generator=torch.Generator().manual_seed(1))
    alone = str(runs.write_npz(tmp_path / "alone.npz", runs.Scored(ids, logits)))
    with pytest.raises(QgateError, match="has sites, and nothing tells them now: give dumps of"):
        gates_of((alone, alone), dumps / "baselines").check_accepted()


def test_a_token_that_one_engine_rules_out_is_not_finite(tmp_path: Path) -> None:
    def rule_out(logits: torch.Tensor) -> torch.Tensor:
        own = runs.scored(samples=8).ids[3, 11]
        logits[3, 10, (own + 1) % logits.shape[-1]] = -torch.inf
        return logits

    (text,) = accept(logits_pair(tmp_path, rule_out), tmp_path / "baselines")
    assert "1 NaN or infinite in actual" in text
