"""Methods are told alike from whole weights, by rows, by processes, after a kill, and by gates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.checkpoints import grids, rows, running
from qgate.checkpoints.comparison import CheckpointPair, compare
from qgate.checkpoints.methods import compared_rows, explanations
from qgate.checkpoints.record import CheckpointRecord
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.checkpoints.weights import Judgement
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.gated import accept, failures, gates_of
from tests.checkpoints.methods import (
    FAULTS,
    Export,
    by_activation,
    export_awq,
    export_gptq,
    export_rotated,
)

EXPORTS: dict[str, Callable[[int], Export]] = {
    "GPTQ by activation": by_activation,
    "GPTQ of 3 bits": lambda seed: export_gptq(seed, 3),
    "AWQ": export_awq,
    "rotated": export_rotated,
}
named = pytest.mark.parametrize("name", EXPORTS)
Pair = tuple[str, str]


def _pair(export: Export, folder: Path) -> Pair:
    parent = write(folder / "parent", parent_tensors(0), {})
    return str(export.write(folder / "child")), str(parent)


def _methods(record: CheckpointRecord) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {weight.name: (weight.method, weight.undone_by) for weight in record.weights}


@named
def test_few_rows_at_a_time_tell_the_same_method(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _pair(EXPORTS[name](0), tmp_path)
    whole = compare(*pair)
    for module in (grids, compared_rows, explanations, rows):
        for size in ("CHUNK", "LEADING", "SAMPLE"):
            if hasattr(module, size):
                monkeypatch.setattr(module, size, 1 << (12 if size == "CHUNK" else 14))
    parts = compare(*pair)
    assert parts.findings == whole.findings == []
    assert _methods(parts) == _methods(whole)


@named
def test_processes_tell_the_same_method(name: str, tmp_path: Path) -> None:
    pair = _pair(EXPORTS[name](0), tmp_path)
    assert repr(compare(*pair, workers=2).to_dict()) == repr(compare(*pair).to_dict())


@named
def test_a_killed_run_goes_on_with_methods(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "BATCH", 20_000)
    pair = _pair(EXPORTS[name](0), tmp_path)
    whole = compare(*pair)

    def stop(done: int, _of: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(*pair, stop, unfinished=tmp_path / "out")
    names: list[str] = []
    original = CheckpointPair.judge

    def judge(self: CheckpointPair, weight: StoredWeight) -> Judgement:
        names.append(weight.name)
        return original(self, weight)

    monkeypatch.setattr(CheckpointPair, "judge", judge)
    record = compare(*pair, unfinished=tmp_path / "out")
    assert repr(record.to_dict()) == repr(whole.to_dict())
    assert 0 < len(names) < len(whole.weights)


@named
def test_gates_accept_what_a_method_changes_and_find_a_fault_on_top(
    name: str, tmp_path: Path
) -> None:
    child, parent = map(Path, _pair(EXPORTS[name](0), tmp_path))
    assert accept(child, parent, tmp_path / "baselines") == []
    assert failures(gates_of(child, parent, tmp_path / "baselines")) == []
    fault = next(fault for fault in FAULTS if "zero points" in fault.words)
    broken = fault.export(0)
    fault.plant(broken)
    broken.write(tmp_path / "broken")
    texts = failures(gates_of(tmp_path / "broken", parent, tmp_path / "baselines"))
    assert any(fault.subject in text for text in texts)


def test_the_worst_block_of_ordered_columns_is_one_group(tmp_path: Path) -> None:
    record = compare(*_pair(by_activation(0), tmp_path), blocks=1)
    (block,) = record.blocks
    parent = parent_tensors(0)[block.name].float()
    assert len(block.values) == 32
    assert block.parent[0] == parent[block.row, block.column]
    assert sorted(block.parent) != sorted(
        parent[block.row, block.column // 32 * 32 :][:32].tolist()
    )
