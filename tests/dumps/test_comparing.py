"""Two dumps: what differs first, how much, and what nobody can say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.comparing import dump_comparison as comparisons
from qgate.comparing.dump_comparison import DumpComparison, compare_dumps
from qgate.dumps import Dump, DumpWriter, export_dump
from qgate.engine import Failure, Workers
from qgate.errors import QgateError
from qgate.stats import errors
from tests.dumps.making import known, record, write

torch.manual_seed(0)
X = torch.randn(64, 32)
NOISE = 1e-3 * torch.randn(64, 32)
CHAIN = ("in.input", "in.weight", "in.output", "out.input", "out.weight", "out.output")


def chain(folder: Path, noisy: Sequence[str] = (), modules: bool = True, **told: Any) -> Dump:
    """Two linear modules and a norm in between; the named tensors are not those of the other."""
    values = {name: X + i + (NOISE if name in noisy else 0) for i, name in enumerate(CHAIN)}
    with DumpWriter(folder) as writer:
        for order, (name, tensor) in enumerate(values.items()):
            module, _, role = name.partition(".")
            phase = "post" if role == "output" else "pre"
            new_record = record(
                order,
                phase=phase,
                name=role,
                module=f"layers.0.{module}" if modules else "",
                **told,
            )
            writer.add(new_record, tensor.bfloat16())
    return Dump.open(folder)


def compared(tmp_path: Path, noisy: Sequence[str], modules: bool = True) -> DumpComparison:
    a = chain(tmp_path / "a", noisy, modules)
    return compare_dumps(a, chain(tmp_path / "b", (), modules))


def origins(found: DumpComparison) -> dict[str, str]:
    return {CHAIN[pair.order]: pair.origin for pair in found.different}


@pytest.mark.parametrize("modules", [True, False], ids=["modules", "by order"])
@pytest.mark.parametrize(
    ("noisy", "expected", "first"),
    [
        (["in.output"], {"in.output": "local"}, 2),
        (["in.input", "in.output"], {"in.input": "enters", "in.output": "carried"}, 0),
        (["in.weight", "in.output"], {"in.weight": "local", "in.output": "carried"}, 1),
        (
            ["in.input", "in.output", "out.input", "out.output"],
            {
                "in.input": "enters",
                "in.output": "carried",
                "out.input": "carried",
                "out.output": "carried",
            },
            0,
        ),
        (["in.input", "out.output"], {"in.input": "enters", "out.output": "local"}, 5),
        ([], {}, None),
    ],
)
def test_where_a_difference_arises(
    noisy: list[str], expected: dict[str, str], first: int | None, modules: bool, tmp_path: Path
) -> None:
    comparison = compared(tmp_path, noisy, modules)
    assert origins(comparison) == expected
    assert (comparison.first and comparison.first.order) == first
    assert len(comparison.of_kind("equal")) == 6 - len(noisy)


def test_outputs_without_inputs_are_of_unknown_origin(tmp_path: Path) -> None:
    for name, noise in (("a", NOISE), ("b", 0 * NOISE)):
        with DumpWriter(tmp_path / name) as writer:
            writer.add(record(0, name="weight", module="m"), X)
            writer.add(record(1, phase="post", name="output", module="m"), X + noise)
    comparison = compare_dumps(Dump.open(tmp_path / "a"), Dump.open(tmp_path / "b"))
    assert [pair.origin for pair in comparison.different] == ["unknown"]


def test_numbers_are_those_of_the_error_statistics(tmp_path: Path) -> None:
    comparison = compared(tmp_path, ["in.input", "out.output"])
    for pair, order in zip(comparison.different, (0, 5), strict=True):
        error_stats = errors((X + order + NOISE).bfloat16(), (X + order).bfloat16())
        assert pair.relative_mse == error_stats.metric("relative_mse")
        assert pair.correlation == error_stats.metric("correlation")
        assert pair.max_abs == error_stats.metric("max_abs")
    assert [worst_pair.order for worst_pair in comparison.worst_first()] == sorted(
        (0, 5), key=lambda order: -comparison.pairs[order].relative_mse
    )


def test_verdicts(tmp_path: Path) -> None:
    comparison = compared(tmp_path, ["in.output"])
    assert comparison.reasons(None) == []
    assert comparison.reasons(1.0) == []
    (reason,) = comparison.reasons(1e-9)
    assert reason.startswith("relative_mse ")
    assert reason.endswith("> 1e-09 at L0 layers.0.in forward output, rank 0, iteration 0")
    assert compared(tmp_path / "same", []).reasons(0.0) == []


def two(tmp_path: Path, a: Tensor | None, b: Tensor | None, **told: Any) -> DumpComparison:
    for name, tensor in (("a", a), ("b", b)):
        with DumpWriter(tmp_path / name) as writer:
            writer.add(record(0, module="m", **told), tensor)
    return compare_dumps(Dump.open(tmp_path / "a"), Dump.open(tmp_path / "b"))


@pytest.mark.parametrize(
    ("a", "b", "kind", "words"),
    [
        (X, X.t(), "unfit", "shapes [64, 32] and [32, 64]"),
        (X.clone().fill_(math.nan), X, "differs", "2048 values are not finite"),
        (X.bfloat16(), X.bfloat16().float(), "equal", ""),
        (torch.zeros(0), torch.zeros(0).half(), "equal", ""),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "equal", ""),
        (torch.arange(5), torch.arange(5) + 2**40, "differs", "relative_mse"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "differs", "relative_mse"),
        (X.to(torch.float8_e4m3fn), X.to(torch.float8_e5m2), "differs", "relative_mse"),
        (X + 1j, X + 2j, "differs", "relative_mse"),
        (torch.ones(3, 3)[:, 1], torch.ones(3), "equal", ""),
    ],
    ids=["shape", "nan", "wider", "empty", "zeros", "int", "bool", "fp8", "complex", "view"],
)
def test_pairs_of_all_kinds(a: Tensor, b: Tensor, kind: str, words: str, tmp_path: Path) -> None:
    comparison = two(tmp_path, a, b)
    assert [pair.kind for pair in comparison.pairs] == [kind]
    assert words in "; ".join(comparison.reasons(1e-9))
    assert bool(comparison.reasons(1e-9)) == bool(words)


def test_equal_infinities_are_no_agreement(tmp_path: Path) -> None:
    x = torch.tensor([1.0, math.inf])
    comparison = two(tmp_path, x, x, nonfinite={"posinf": 1})
    assert comparison.pairs[0].kind == "equal"
    assert "2 values are not finite" in comparison.reasons(1.0)[0]
    for name in ("c", "d"):
        known(tmp_path / name, x, counter=1)
    stored_comparison = compare_dumps(Dump.open(tmp_path / "c"), Dump.open(tmp_path / "d"))
    assert "2 values are not finite" in stored_comparison.reasons(None)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("values", [(), (math.inf,), (-math.inf, math.nan, -math.nan)], ids=str)
def test_what_is_not_finite_is_counted(
    dtype: torch.dtype, values: tuple[float, ...], tmp_path: Path
) -> None:
    x = torch.full((200_001,), torch.finfo(dtype).max, dtype=dtype)
    x[::2] *= -1
    x[100_000 : 100_000 + len(values)] = torch.tensor(values, dtype=dtype)
    for name in ("a", "b"):
        known(tmp_path / name, x, counter=1)
    comparison = compare_dumps(Dump.open(tmp_path / "a"), Dump.open(tmp_path / "b"))
    assert [(pair.kind, pair.nonfinite) for pair in comparison.pairs] == [
        ("equal", 2 * len(values))
    ]


def test_nothing_compared_is_a_failure(tmp_path: Path) -> None:
    assert "nothing was compared" in two(tmp_path, None, None).reasons(None)[0]
    for name in ("e", "f"):
        with DumpWriter(tmp_path / name) as writer:
            counts = {"counts": np.arange(3 if name == "e" else 4)}
            writer.add(record(0, module="m"), counts=counts)
    comparison = compare_dumps(Dump.open(tmp_path / "e"), Dump.open(tmp_path / "f"))
    assert "the counts of its values differ" in comparison.reasons(None)[0]


def test_what_has_no_counterpart_is_named(tmp_path: Path) -> None:
    a = chain(tmp_path / "a")
    b = chain(tmp_path / "b", iteration=1)
    comparison = compare_dumps(a, b)
    assert (len(comparison.pairs), len(comparison.only_actual), len(comparison.only_reference)) == (
        0,
        6,
        6,
    )
    assert "nothing was compared" in comparison.reasons(None)[0]
    with DumpWriter(tmp_path / "a", existing="append") as writer:
        writer.add(record(6, module="more"), X)
    comparison = compare_dumps(Dump.open(tmp_path / "a"), chain(tmp_path / "c"))
    assert [unpaired.module for unpaired in comparison.only_actual] == ["more"]
    assert comparison.reasons(None) == []
    assert comparison.reasons(1.0) == ["1 tensors are in one of the dumps only"]
    assert comparison.reasons(1.0, unpaired=True) == []


def test_a_shard_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    a, b = chain(tmp_path / "a", ["in.output"]), chain(tmp_path / "b")
    (tmp_path / "a" / "rank00000" / "tensors-000000.safetensors").write_bytes(b"")
    (reason,) = compare_dumps(a, b).reasons(None)
    assert "truncated or damaged" in reason


def test_selection_and_progress(tmp_path: Path) -> None:
    steps: list[int] = []
    a, b = chain(tmp_path / "a"), chain(tmp_path / "b")
    comparison = compare_dumps(a, b, steps.append, name=["input", "output"])
    assert len(comparison.pairs) == len(steps) == 4
    assert sum(steps) == 4 * 2 * X.numel() * 2
    with pytest.raises(QgateError, match="unknown field"):
        compare_dumps(a, b, nothing=1)


# megatron-tensor-saver -------------------------------------------------------------------------


def collected(folder: Path, drop: Sequence[int] = (), noisy: Sequence[int] = ()) -> Dump:
    """Four linears of one layer with one name and no layer, as in their backward files."""
    shapes = [(8, 4), (8, 8), (8, 16), (8, 4)]
    counter = 0
    for call, shape in enumerate(shapes):
        for phase, name in (("pre", "input"), ("pre", "weight"), ("post", "output")):
            counter += 1
            x = torch.full(shape, float(counter)) + (0.1 if counter in noisy else 0.0)
            x[0, 0] = call
            if counter not in drop:
                known(
                    folder, x, counter=counter, iteration=0, rank=0, sample=0, layer=None,
                    phase=phase, component="linear", name=name, operation="backward",
                )  # fmt: skip
    return Dump.open(folder)


def test_files_without_layers_are_paired_by_order(tmp_path: Path) -> None:
    comparison = compare_dumps(collected(tmp_path / "a", noisy=[9]), collected(tmp_path / "b"))
    assert len(comparison.pairs) == 12
    assert [(pair.order, pair.origin) for pair in comparison.different] == [(8, "local")]
    assert list(comparison.notes) == []


@pytest.mark.parametrize("lost", [1, 2, 5, 6, 12])
def test_a_lost_file_does_not_shift_the_others(lost: int, tmp_path: Path) -> None:
    comparison = compare_dumps(collected(tmp_path / "a", drop=[lost]), collected(tmp_path / "b"))
    assert len(comparison.of_kind("equal")) == len(comparison.pairs) == 11
    assert [unpaired.extra["counter"] for unpaired in comparison.only_reference] == [lost]
    assert list(comparison.only_actual) == []
    assert list(comparison.notes) == [
        "rank 0, iteration 0, backward: 11 tensors and 12, 11 paired by their order, names and shapes"
    ]


def test_a_dump_and_files_of_the_known_collector(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "a") as writer:
        fields = {"layer_type": "attention", "component": "FA", "module": "layers.0.attention"}
        for order, (phase, name) in enumerate([("pre", "query"), ("post", "context")]):
            writer.add(record(order, phase=phase, name=name, sample=0, **fields), X)
    for counter, (phase, name) in enumerate([("pre", "query"), ("post", "output")]):
        known(
            tmp_path / "b", X, counter=counter, iteration=0, rank=0, sample=0, phase=phase,
            component="FA", layer_type="attention", name=name,
        )  # fmt: skip
    comparison = compare_dumps(Dump.open(tmp_path / "a"), Dump.open(tmp_path / "b"))
    assert [pair.kind for pair in comparison.pairs] == ["equal", "equal"]


@pytest.mark.parametrize("unknown", ["sample", "micro_batch", "iteration"])
def test_what_one_side_does_not_know_keeps_nothing_apart(unknown: str, tmp_path: Path) -> None:
    """Seen with an export of a collected run: micro batches are not in those file names."""
    fields = {"iteration": 0, "sample": 0, "micro_batch": 0}
    a = chain(tmp_path / "a", ["out.output"], **fields)
    b = chain(tmp_path / "b", modules=False, **{**fields, unknown: None})
    comparison = compare_dumps(a, b)
    assert [pair.kind for pair in comparison.pairs].count("equal") == 5
    assert origins(comparison) == {"out.output": "local"}


def test_an_export_of_several_micro_batches_is_compared_with_its_dump(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "a") as writer:
        for order in range(4):
            fields = {"sample": order // 2, "micro_batch": order // 2, "module": "layers.0.in"}
            phase = "post" if order % 2 else "pre"
            name = "output" if order % 2 else "input"
            writer.add(record(order, phase=phase, name=name, **fields), X + order)
    export_dump(Dump.open(tmp_path / "a"), tmp_path / "flat")
    comparison = compare_dumps(Dump.open(tmp_path / "flat"), Dump.open(tmp_path / "a"))
    assert [pair.kind for pair in comparison.pairs] == ["equal"] * 4


def test_processes_find_what_threads_find(tmp_path: Path) -> None:
    first = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(40)]
    second = [x + (0.01 if i % 7 == 3 else 0) for i, x in enumerate(first)]
    second[5] = second[5][:2]
    for rank in range(4):
        of_rank = slice(10 * rank, 10 * rank + 10)
        write(tmp_path / "a", second[of_rank], rank=rank, world_size=4)
        write(tmp_path / "b", first[of_rank], rank=rank, world_size=4)
    dumps = Dump.open(tmp_path / "a"), Dump.open(tmp_path / "b")
    by_threads, by_processes = compare_dumps(*dumps), compare_dumps(*dumps, workers=Workers(jobs=2))
    assert [repr(pair) for pair in by_threads.pairs] == [
        repr(process_pair) for process_pair in by_processes.pairs
    ]
    assert [ranked_pair.rank for ranked_pair in by_threads.pairs] == [*range(4)] * 10
    assert {kind_pair.kind for kind_pair in by_processes.pairs} == {"equal", "differs", "unfit"}


def test_pairs_whose_process_ended_are_not_equal(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "a", [torch.ones(4)])
    write(tmp_path / "b", [torch.ones(4)])
    lost = lambda _function, items, _workers, **_: (Failure("it ended") for _ in items)  # noqa: E731
    monkeypatch.setattr(comparisons, "map_items", lost)
    dumps = Dump.open(tmp_path / "a"), Dump.open(tmp_path / "b")
    comparison = compare_dumps(*dumps, workers=Workers(jobs=2))
    assert comparison.reasons(None) == [
        "it was not compared: it ended at L0 m0 forward input, rank 0, iteration 0"
    ]
