"""Gates of a checkpoint: right exports pass, faults are named first, and no update accepts one."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate.checkpoints.gate import (
    fold_findings,
    layer_in,
    layer_order,
    site_of,
)
from qgate.checkpoints.recipe_texts import bits_per_weight, fold_numbers, plan_texts
from qgate.checkpoints.record import CheckpointFinding, WeightRecord
from qgate.cli import main
from qgate.errors import QgateError
from tests.checkpoints.exports import SCHEMES, parent_tensors, write
from tests.checkpoints.faults import FAULTS, UP, ExportFault
from tests.checkpoints.gated import (
    Tensors,
    accept,
    double_scales,
    failures,
    gates_of,
    grow_scales,
    outcomes,
    planted,
    write_pair,
)
from tests.shares import share

DRAWN = random.Random(26).sample(FAULTS, 12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `child`, `parent` and the accepted errors of the child."""
    folder: Path = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    assert accept(folder / "child", folder / "parent", folder / "baselines") == []
    return folder


def found(pair: Path, child: Path, **how: Any) -> list[str]:
    """Return the failures of a child beside the parent and accepted errors of the pair."""
    return failures(gates_of(child, pair / "parent", pair / "baselines", **how))


# What passes, and what does not -------------------------------------------------------------------


@share(4)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_right_export_is_accepted_once_and_passes(
    folders: Path, name: str, tmp_path: Path
) -> None:
    child, parent = folders / name, folders / "parent"
    assert accept(child, parent, tmp_path) == []
    judged = outcomes(gates_of(child, parent, tmp_path))
    assert [outcome.text for outcome in judged] == [""] * 5
    checks = [check.metric for outcome in judged for check in outcome.verdict.checks]
    assert checks.count("over_ideal_db") == checks.count("relative_mse") == 14
    assert checks.count("quantizer") == 13
    assert checks.count("bits_per_weight") == 1


@share(4)
@pytest.mark.parametrize("fault", DRAWN, ids=lambda fault: fault.name)
def test_a_fault_fails_with_its_subject_and_cause_first_and_is_never_accepted(
    fault: ExportFault, folders: Path, tmp_path: Path
) -> None:
    child = planted(folders / fault.scheme, tmp_path / "child", fault.plant)
    first_lines = _named(accept(child, folders / "parent", tmp_path / "baselines"))
    # A declaration is of all weights, and the first of them is named.
    subject = "model.layers.0.mlp" if fault.name.startswith("another") else fault.subject
    assert any(subject in line and re.search(fault.words, line) for line in first_lines), (
        first_lines
    )
    second_run = failures(gates_of(child, folders / "parent", tmp_path / "baselines"))
    assert _named(second_run) >= first_lines


def _named(texts: list[str]) -> set[str]:
    """Return the first lines of failures without how many more there are."""
    return {re.sub(r" \(\+.*", "", text.partition("\n")[0]) for text in texts}


def test_a_finding_comes_before_what_it_moves_and_leaves_the_baseline_alone(
    pair: Path, tmp_path: Path
) -> None:
    child = planted(pair / "child", tmp_path / "child", double_scales)
    before = (pair / "baselines" / "mine" / "accepted" / "weights.txt").read_bytes()
    (text,) = found(pair, child, updating="all")
    assert text.startswith(
        f"{UP}.weight (checkpoint weights): all scales are 2 times too high: 44.6 dB worse than "
        "ideal (+2 more failed checks)\n"
    )
    assert "mend what it names, or allow it by a rule of limits that says why" in text
    assert "if intended" not in text
    assert (pair / "baselines" / "mine" / "accepted" / "weights.txt").read_bytes() == before


def test_an_export_a_little_worse_than_accepted_is_a_regression(pair: Path, tmp_path: Path) -> None:
    child = planted(pair / "child", tmp_path / "child", grow_scales(1.05))
    (text,) = found(pair, child)
    first = text.partition("\n")[0]
    assert f"at {UP}.weight (checkpoint weights): " in first
    assert "accepted" in first
    assert "not as declared" not in text
    assert "dB over accepted, 0.086 dB allowed" in text or "% over accepted, 2 % allowed" in text
    assert "if intended: pytest" in text
    accepted = tmp_path / "baselines"
    assert accept(pair / "child", pair / "parent", accepted) == []
    assert accept(child, pair / "parent", accepted) == []
    assert failures(gates_of(child, pair / "parent", accepted)) == []


def test_an_export_better_than_accepted_is_none_that_was_accepted(
    pair: Path, tmp_path: Path
) -> None:
    worse = planted(pair / "child", tmp_path / "worse", grow_scales(1.05))
    accepted = tmp_path / "baselines"
    assert accept(worse, pair / "parent", accepted) == []
    (text,) = failures(gates_of(pair / "child", pair / "parent", accepted))
    assert "under accepted" in text


def test_a_rule_that_says_why_allows_a_finding_at_a_site(
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ignore(_tensors: Tensors, declared: dict[str, Any]) -> None:
        declared["quantization_config"]["ignore"].append("re:.*visual.*")

    child = planted(pair / "child", tmp_path / "child", ignore)
    texts = accept(child, pair / "parent", tmp_path / "baselines")
    assert [text.partition("\n")[0] for text in texts] == [
        "re:.*visual.* (checkpoint accounting): this ignore pattern matches no module"
    ]
    rule = {"sites": "visual", "absolute": ["findings<1"], "reason": "there is no visual tower"}
    allowed = gates_of(child, pair / "parent", tmp_path / "baselines", {"rules": [rule]})
    assert failures(allowed) == []
    (looser,) = allowed.policy.looser()
    assert (looser["limit"], looser["reason"]) == (
        "absolute findings",
        "there is no visual tower",
    )
    monkeypatch.chdir(tmp_path)
    command = ["checkpoint", str(child), "--parent", str(pair / "parent")]
    assert main(command) == 1
    settings = '[[limits.rules]]\nsites = "{}"\nabsolute = ["findings<1"]\nreason = "no tower"\n'
    for sites, exit_status in (("visual", 0), ("audio", 1)):
        (tmp_path / "qgate.toml").write_text(settings.format(sites))
        capsys.readouterr()
        assert main(command) == exit_status
        output = capsys.readouterr().out
        is_allowed = (
            "allowed by rule 1 of [limits] of qgate.toml: no tower: re:.*visual.*" in output
        )
        assert is_allowed == (sites == "visual")
    (tmp_path / "qgate.toml").write_text(settings.format("up_proj"))
    doubled = planted(pair / "child", tmp_path / "doubled", double_scales)
    assert main(["checkpoint", str(doubled), "--parent", str(pair / "parent")]) == 0


def test_a_changed_plan_is_one_sentence_and_needs_its_own_word(
    folders: Path, tmp_path: Path
) -> None:
    parent = folders / "parent"
    assert accept(folders / "int8", parent, tmp_path) == []
    texts = failures(gates_of(folders / "fp8", parent, tmp_path))
    recipe = next(text for text in texts if "(checkpoint recipe)" in text)
    assert recipe.startswith(
        "int8 per row accepted, fp8_e4m3 per row found, at 7 of 13 sites, first "
        "model.layers.*.mlp.down_proj.weight (checkpoint recipe)"
    )
    assert "--accept-plan" in recipe
    gates = gates_of(folders / "fp8", parent, tmp_path, updating="failed")
    assert any("int8 per row accepted" in text for text in failures(gates))
    assert accept(folders / "fp8", parent, tmp_path) == []
    assert failures(gates_of(folders / "fp8", parent, tmp_path)) == []


def test_a_weight_that_is_quantized_no_more_fails_and_may_be_accepted(
    pair: Path, tmp_path: Path
) -> None:
    def keep(tensors: Tensors, declared: dict[str, Any]) -> None:
        declared["quantization_config"]["ignore"].append(UP)
        tensors[f"{UP}.weight"] = parent_tensors()[f"{UP}.weight"]
        del tensors[f"{UP}.weight_scale"]

    child = planted(pair / "child", tmp_path / "child", keep)
    texts = found(pair, child)
    assert texts[0].startswith(f"not measured at {UP}.weight (checkpoint weights)")
    changed = (
        "int8 per row accepted, int8 per row, but BF16 at 1 found, at model.layers.*.mlp.up_proj"
    )
    assert changed in texts[1] or "int8 per row accepted, BF16, but int8 per row at 0" in texts[1]
    accepted = tmp_path / "baselines"
    assert accept(pair / "child", pair / "parent", accepted) == []
    assert accept(child, pair / "parent", accepted) == []
    assert failures(gates_of(child, pair / "parent", accepted)) == []


def test_a_layer_that_is_gone_fails_in_its_own_gate(pair: Path, tmp_path: Path) -> None:
    def drop(tensors: Tensors, _declared: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    child = planted(pair / "child", tmp_path / "child", drop)
    gates = gates_of(child, pair / "parent", pair / "baselines")
    assert gates.layers("checkpoint") == ["model.layers.0", "model.layers.1", "outside"]
    assert gates.weights("checkpoint", "model.layers.1").text.startswith("not measured at")
    assert (
        "(checkpoint accounting): it is in the parent alone" in gates.accounting("checkpoint").text
    )


# Without a parent, and with a wrong one -----------------------------------------------------------


def test_without_a_parent_scales_and_tensors_are_judged(pair: Path, tmp_path: Path) -> None:
    assert accept(pair / "child", None, tmp_path / "alone") == []
    gates = gates_of(pair / "child", None, tmp_path / "alone")
    gates.check_parent()
    assert failures(gates) == []

    def spoil(tensors: Tensors, _declared: dict[str, Any]) -> None:
        tensors[f"{UP}.weight_scale"][3] = torch.nan

    child = planted(pair / "child", tmp_path / "child", spoil)
    (text,) = failures(gates_of(child, None, tmp_path / "alone"))
    assert text.startswith(f"{UP}.weight (checkpoint weights): 1 of 128 scales are NaN or infinite")


def test_accepted_errors_beside_a_parent_need_one(pair: Path) -> None:
    gates = gates_of(pair / "child", None, pair / "baselines")
    with pytest.raises(QgateError, match="are beside a parent: give --parent PARENT"):
        gates.check_parent()
    gates_of(pair / "child", None, pair / "baselines", updating="failed").check_parent()


def test_a_parent_of_other_values_is_refused_before_a_gate_runs(pair: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", parent_tensors(seed=7), {})
    gates = gates_of(pair / "child", tmp_path / "other", tmp_path / "baselines")
    with pytest.raises(QgateError, match=r"is not the parent of .*: 0 of 5 quantized weights"):
        gates.layers("checkpoint")


# Names, groups and texts --------------------------------------------------------------------------


def test_experts_of_a_layer_are_one_site_with_the_worst_and_the_mean(
    pair: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(3)
    experts = {
        f"model.layers.0.mlp.experts.{number}.up_proj.weight": torch.randn(
            16, 32, generator=generator
        )
        for number in range(4)
    }
    tensors = {}
    for number, (name, weight) in enumerate(experts.items()):
        scale = weight.abs().amax(1, keepdim=True) / 127 * (2 if number == 2 else 1)
        tensors |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
    declared: dict[str, Any] = {}
    planted(pair / "child", tmp_path / "unused", lambda _, given: declared.update(given))
    write(tmp_path / "child", tensors, declared)
    write(tmp_path / "parent", experts, {})
    gates = gates_of(tmp_path / "child", tmp_path / "parent", tmp_path / "baselines")
    outcome = gates.weights("checkpoint", "model.layers.0")
    (row,) = outcome.verdict.measured
    assert row.site == "model.layers.0.mlp.experts.*.up_proj.weight"
    assert 5.5 < (row.values["over_ideal_db"] or 0.0) < 6.9
    assert "model.layers.0.mlp.experts.2.up_proj.weight: " in outcome.text.partition("\n")[0]
    words = "it is quantized with twice the scale of the definition: 6."
    assert words in outcome.text.partition("\n")[0]


def test_layers_and_sites_by_name() -> None:
    assert layer_in("model.layers.11.mlp.up_proj.weight") == "model.layers.11"
    assert layer_in("visual.blocks.3") == "visual.blocks.3"
    assert layer_in("model.layer2.weight") == "outside"
    assert layer_in("lm_head.weight") == "outside"
    names = ["outside", "b.10", "b.9", "a.1"]
    assert sorted(names, key=layer_order) == ["a.1", "b.9", "b.10", "outside"]
    assert site_of("a.0.experts.17.w1.weight") == "a.0.experts.*.w1.weight"
    assert site_of("a.0.up.weight") == "a.0.up.weight"
    assert fold_numbers("a.0.experts.17.w1.weight") == "a.*.experts.*.w1.weight"


def test_findings_of_one_cause_are_folded_and_others_are_not() -> None:
    findings = [CheckpointFinding(f"layers.{at}.up", "it is in the child alone") for at in range(3)]
    findings.append(CheckpointFinding("layers.0.up", "all values are zero"))
    folded = fold_findings(findings)
    assert [finding.subject for finding in folded] == ["layers.*.up", "layers.0.up"]
    assert folded[0].cause == (
        "it is in the child alone (3 of that name, the first is layers.0.up)"
    )


def test_the_plan_says_how_layers_differ() -> None:
    weights = [
        WeightRecord(f"layers.{at}.up.weight", "", "int8 per row" if at else "BF16", 10, 8)
        for at in range(3)
    ]
    assert plan_texts(weights) == {"layers.*.up.weight": "int8 per row, but BF16 at 0"}
    assert plan_texts(weights[1:]) == {"layers.*.up.weight": "int8 per row"}
    assert bits_per_weight(weights) == 10.0
    assert bits_per_weight([]) == 0.0
