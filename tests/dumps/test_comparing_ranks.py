"""Two dumps of several ranks: rank after rank finds what all at once would, in memory of one."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.cli import main
from qgate.cli.dumps import comparison_lines
from qgate.comparing import dump_differences as differences
from qgate.comparing.dump_causes import fault_of_pair
from qgate.comparing.dump_comparison import compare_dumps
from qgate.comparing.dump_differences import DumpComparison, PairErrors
from qgate.comparing.pairing import PARAMETERS, pair_records
from qgate.dumps import Dump, DumpWriter, Record, StoredValues, reading
from qgate.dumps.record import RecordSelection
from qgate.records.plain_data import plain
from tests.dumps.making import record, write
from tests.shares import proof, share

KINDS = ("equal", "equal", "differs", "unfit", "summary")
Held = tuple[Record, Tensor | None]


@pytest.fixture(params=[0, 60, None], ids=["on disk", "some on disk", "in memory"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(differences, "_ROWS_IN_MEMORY", request.param)


def in_memory(held: Sequence[Held], name: str) -> Any:
    """What `compare_dumps` asks of a dump."""
    values = {id(record): tensor for record, tensor in held}

    def records(**fields: object) -> Iterator[Record]:
        return filter(RecordSelection(fields).matches, (record for record, _ in held))

    return SimpleNamespace(
        folder=Path(name),
        records=records,
        tensor=lambda record, *, check: values[id(record)],  # noqa: ARG005
        notes=lambda: [f"a note on {name}"],
    )


def run(seed: int, modules: bool) -> tuple[list[Held], list[Held]]:
    """Calls of two modules on some ranks; some records are of one side only, in gaps of both."""
    rng = random.Random(seed)
    sides: tuple[list[Held], list[Held]] = [], []
    for rank in sorted(rng.sample(range(12), rng.randint(1, 4))):
        likely = rng.choice([(0.0, 0.1, 0.5, 0.1, 0.1), (1.0, 0.1, 0.1, 0.0, 0.1)])
        only = rng.randrange(2) if rng.random() < 0.2 else None
        orders = [rng.randrange(3), rng.randrange(3)]
        for call in range(rng.randint(1, 3)):
            for module in rng.sample(["in", "out"], 2):
                for name in ("weight", "input", "input2", "output"):
                    fields = {
                        "phase": "post" if name == "output" else "pre",
                        "name": name,
                        "rank": rank,
                        "call": call,
                        "iteration": call // 2,
                        "layer": int(module == "out"),
                        "module": module if modules else "",
                        "extra": {"of": {"seed": {"is": seed}}, "also": [1, [2]]},
                        "stats": {"min": -math.inf, "mean": 0.5},
                    }
                    kind = rng.choices(KINDS, likely)[0]
                    values = torch.tensor([1.0, 2.0, 3.0])
                    deviation = rng.choice([0.5, 0.5, 0.25, math.nan]) * (kind == "differs")
                    tensors = [values + deviation, values[:2] if kind == "unfit" else values]
                    for side, tensor in enumerate(tensors):
                        orders[side] += 1 + rng.randrange(2) * (rng.random() < 0.1)
                        if only == 1 - side or (only is None and rng.random() < 0.05):
                            continue
                        stored = StoredValues(f"{side}", f"{rank}.{orders[side]}", "")
                        new_record = record(
                            orders[side],
                            **fields,
                            shape=tuple(tensor.shape),
                            dtype="float32",
                            tensor=None if kind == "summary" else stored,
                        )
                        sides[side].append((new_record, tensor))
    return sides


def origin_at(place: int, pairs: Sequence[Record], kinds: Sequence[str], modules: bool) -> str:
    """As it is defined, over all ranks at once."""
    current = pairs[place]
    differs = [kind in ("differs", "unfit") for kind in kinds]
    if not differs[place]:
        return ""
    if current.phase == "pre":
        if current.name in PARAMETERS:
            return "local"
        return "carried" if any(differs[:place]) else "enters"

    def call_of(other: Record) -> tuple[object, ...]:
        run = other.rank, other.iteration, other.sample, other.micro_batch, other.operation
        if modules:
            return (*run, other.module, other.call)
        return (*run, other.layer_type, other.layer, other.component)

    of_it = [i for i, other in enumerate(pairs) if call_of(other) == call_of(current)]
    if not modules:  # back to the end of the call before
        of_it = [i for i in of_it if i < place]
        while of_it and pairs[of_it[-1]].phase == "post":
            of_it.pop()
        ends = [number for number, i in enumerate(of_it) if pairs[i].phase == "post"]
        of_it = of_it[ends[-1] + 1 :] if ends else of_it
    inputs = [i for i in of_it if pairs[i].phase == "pre"]
    if not any(pairs[i].name not in PARAMETERS for i in inputs):
        return "unknown"
    if any(differs[i] for i in inputs):
        return "carried"
    return "unknown" if any(kinds[i] == "summary" for i in inputs) else "local"


def badness(each: PairErrors) -> tuple[float, float, float]:
    if math.isnan(each.relative_mse):
        return 1.0, 0.0, 0.0
    return 0.0, each.relative_mse, each.max_abs


def compared(seed: int, modules: bool) -> tuple[DumpComparison, Any]:
    """And what belongs together where all records are laid side by side at once."""
    sides = run(seed, modules)
    comparison = compare_dumps(*(in_memory(side, n) for side, n in zip(sides, "ab", strict=True)))
    return comparison, pair_records(
        *([record for record, _ in record_side] for record_side in sides)
    )


@share(12)
@pytest.mark.parametrize("modules", [True, False], ids=["modules", "by order"])
@pytest.mark.usefixtures("held")
def test_rank_after_rank_finds_what_all_at_once_does(modules: bool) -> None:
    origins_by_kind = set()
    for seed in range(40):
        comparison, whole = compared(seed, modules)
        assert [
            (ranked_pair.rank, ranked_pair.order, ranked_pair.reference_order)
            for ranked_pair in comparison.pairs
        ] == [(a.rank, a.order, r.order) for a, r in whole.pairs]
        places = [(pair.order, pair.rank) for pair in comparison.pairs]
        assert all(before <= after for before, after in pairwise(places))
        assert list(comparison.only_actual) == whole.only_actual
        assert list(comparison.only_reference) == whole.only_reference
        assert list(comparison.notes) == [*whole.notes, "a: a note on a", "b: a note on b"]
        kinds = [kind_pair.kind for kind_pair in comparison.pairs]
        records = [a for a, _ in whole.pairs]
        expected = [origin_at(index, records, kinds, modules) for index in range(len(kinds))]
        assert [origin_pair.origin for origin_pair in comparison.pairs] == expected, seed
        origins_by_kind.update(zip(kinds, expected, strict=True))
    assert {origin for _, origin in origins_by_kind} == {
        "",
        "local",
        "carried",
        "enters",
        "unknown",
    }
    assert {kind for kind, _ in origins_by_kind} == set(KINDS)


@share(3)
@pytest.mark.usefixtures("held")
def test_what_is_chosen_of_the_pairs_is_what_a_list_would_give() -> None:
    for seed in range(20):
        comparison, _ = compared(seed, modules=True)
        pairs = list(comparison.pairs)
        different = [pair for pair in pairs if pair.kind in ("differs", "unfit")]
        different_texts = [repr(different_pair) for different_pair in different]
        assert [repr(listed_pair) for listed_pair in comparison.different] == different_texts
        worst = sorted(different, key=badness, reverse=True)
        assert [repr(sorted_pair) for sorted_pair in comparison.worst_first()] == [
            repr(worst_pair) for worst_pair in worst
        ]
        assert repr(comparison.worst_first()[:2][-1:][0]) == repr(worst[:2][-1]) if worst else True
        local = [local_pair for local_pair in different if local_pair.origin == "local"]
        assert repr(comparison.first) == repr((local or different or [None])[0])
        text = "\n".join(comparison_lines(comparison, ("a", "b"), 20))
        others_before = bool(local) and different[0].origin != "local"
        assert ("(before it in the order of execution: " in text) == others_before
        assert comparison.nonfinite == sum(counted_pair.nonfinite for counted_pair in pairs)
        for limit in (None, 0.02):
            beyond = [
                candidate
                for candidate in worst
                if candidate.kind == "unfit"
                or (limit is not None and not candidate.relative_mse <= limit)
            ]
            reasons = comparison.reasons(limit)
            assert any(text.endswith(f", and {len(beyond) - 1} more") for text in reasons) == (
                len(beyond) > 1 and len(comparison.of_kind("summary")) < len(pairs)
            )


# As commands have it ---------------------------------------------------------------------------


def written(folder: Path, held: Sequence[Held]) -> Path:
    ranks = {record.rank for record, _ in held}
    for rank in ranks:
        with DumpWriter(folder, rank=rank, world_size=max(ranks) + 1) as writer:
            for entry, tensor in held:
                if entry.rank == rank:
                    writer.add(entry, None if entry.tensor is None else tensor)
    return folder


def _fault(dumps: Sequence[Dump], comparison: DumpComparison) -> str:
    first, (actual, reference) = comparison.first, dumps
    is_another = first is not None and first.kind == "differs"
    return fault_of_pair(actual, reference, first) if first and is_another else ""


@share(3)
@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("seed", [0, 5], ids=str)
def test_the_text_of_a_long_report_is_that_of_the_whole(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [written(tmp_path / n, s) for n, s in zip("ab", run(seed, True), strict=True)]
    for selection in ({}, {"name": "weight"}, {"rank": 0}):
        dumps = [Dump.open(folder) for folder in folders]
        if selection.get("rank") not in (None, *dumps[0].ranks):
            continue
        comparison = compare_dumps(*dumps, **selection)
        where = ",".join(f"{name}={value}" for name, value in selection.items())
        flags = ["--where", where] if where else []
        main(["dumps", "compare", *map(str, folders), "--json", *flags])
        whole = {
            "passed": not comparison.reasons(None),
            "reasons": comparison.reasons(None),
            "first": comparison.first
            and {**comparison.first.to_dict(), "fault": _fault(dumps, comparison)},
            "pairs": [pair.to_dict() for pair in comparison.pairs],
            "only_actual": [actual_record.to_dict() for actual_record in comparison.only_actual],
            "only_reference": [
                reference_record.to_dict() for reference_record in comparison.only_reference
            ],
            "notes": list(comparison.notes),
        }
        assert capsys.readouterr().out == json.dumps(plain(whole), indent=1) + "\n"


# What stays in memory --------------------------------------------------------------------------


@proof
def test_ten_times_as_many_ranks_take_bytes_per_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "_ROWS_IN_MEMORY", 0)

    def records() -> Iterator[Record]:
        where = StoredValues("f", "k", "the same")
        for rank in range(ranks):
            for order in range(100):
                yield record(order, rank=rank, module=f"m{order}", tensor=where, shape=(rank,))

    def highest() -> int:
        dump: Any = SimpleNamespace(folder=Path("a"), records=records, notes=list)
        tracemalloc.start()
        try:
            assert len(compare_dumps(dump, dump).of_kind("equal")) == 100 * ranks
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    ranks = 4
    few = highest()
    ranks = 40
    assert highest() < few + 3600 * 80


def test_shards_of_ranks_that_were_read_long_ago_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 2 * reading._RANKS_OPEN
    for rank in range(ranks):
        write(tmp_path, [torch.full((3,), rank)], rank=rank, world_size=ranks)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Reader(reading.ShardReader):
        def __init__(self, *where: Any) -> None:
            super().__init__(*where)
            alive.add(self)

    monkeypatch.setattr(reading, "ShardReader", Reader)
    dump = Dump.open(tmp_path)
    entries = [*dump.records(), *dump.records(rank=0)]
    assert [int(dump.tensor(entry)[1]) for entry in entries] == [*range(ranks), 0]
    assert len(alive) == reading._RANKS_OPEN
