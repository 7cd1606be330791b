"""Methods are told alike from whole weights, by rows, by processes, after a kill, and by gates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.checkpoints import grids, rows, running
from qgate.checkpoints.comparison import compare
from qgate.checkpoints.methods import compared_rows, explanations
from qgate.checkpoints.record import CheckpointRecord
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
from tests.checkpoints.work import names_judged
from tests.shares import share, slow_file

pytestmark = slow_file

EXPORTS: dict[str, Callable[[int], Export]] = {
    "GPTQ by activation": by_activation,
    "GPTQ of 3 bits": lambda seed: export_gptq(seed, 3),
    "AWQ": export_awq,
    "rotated": export_rotated,
}
Pair = tuple[str, str]


@pytest.fixture(scope="module", params=EXPORTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    parent = write(folder / "parent", parent_tensors(0), {})
    return str(EXPORTS[request.param](0).write(folder / "child")), str(parent)


@pytest.fixture(scope="module")
def whole(pair: Pair) -> CheckpointRecord:
    """Return the record of one process from whole weights."""
    return compare(*pair)


def _methods(record: CheckpointRecord) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {weight.name: (weight.method, weight.undone_by) for weight in record.weights}


@share(4)
def test_few_rows_at_a_time_tell_the_same_method(
    pair: Pair, whole: CheckpointRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (grids, compared_rows, explanations, rows):
        for size in ("CHUNK", "LEADING", "SAMPLE"):
            if hasattr(module, size):
                monkeypatch.setattr(module, size, 1 << (12 if size == "CHUNK" else 14))
    parts = compare(*pair)
    assert parts.findings == whole.findings == []
    assert _methods(parts) == _methods(whole)


@share(4)
def test_processes_tell_the_same_method(pair: Pair, whole: CheckpointRecord) -> None:
    assert repr(compare(*pair, workers=2).to_dict()) == repr(whole.to_dict())


def test_a_killed_run_goes_on_with_methods(
    pair: Pair, whole: CheckpointRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "BATCH", 20_000)

    def stop(done: int, _of: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(*pair, stop, unfinished=tmp_path / "out")
    names = names_judged(monkeypatch)
    record = compare(*pair, unfinished=tmp_path / "out")
    assert repr(record.to_dict()) == repr(whole.to_dict())
    assert 0 < len(names) < len(whole.weights)


@share(4)
def test_gates_accept_what_a_method_changes_and_find_a_fault_on_top(
    pair: Pair, tmp_path: Path
) -> None:
    child, parent = map(Path, pair)
    assert accept(child, parent, tmp_path / "baselines") == []
    assert failures(gates_of(child, parent, tmp_path / "baselines")) == []
    fault = next(fault for fault in FAULTS if "zero points" in fault.words)
    broken = fault.scheme(0)
    fault.plant(broken)
    broken.write(tmp_path / "broken")
    texts = failures(gates_of(tmp_path / "broken", parent, tmp_path / "baselines"))
    assert any(fault.subject in text for text in texts)


@pytest.mark.parametrize("pair", ["GPTQ by activation"], indirect=True)
def test_the_worst_block_of_ordered_columns_is_one_group(pair: Pair) -> None:
    record = compare(*pair, blocks=1)
    (block,) = record.blocks
    parent = parent_tensors(0)[block.name].float()
    assert len(block.values) == 32
    assert block.parent[0] == parent[block.row, block.column]
    assert sorted(block.parent) != sorted(
        parent[block.row, block.column // 32 * 32 :][:32].tolist()
    )
