"""The inputs of `errors`, accepted and refused: chunks, layouts, empty tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.stats._portion import ELEMENTS
from qgate.stats.error_stats import errors
from tests.stats.pairs import LARGE, pair, same

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "sizes",
    [[LARGE], [1] * 50 + [LARGE - 50], [ELEMENTS + 1, ELEMENTS, 1233], [0, LARGE, 0]],
    ids=str,
)
def test_chunks_give_what_the_tensor_gives(sizes: list[int]) -> None:
    actual, reference = (x.clone() for x in pair())
    actual[77] = NAN
    whole = errors(actual, reference)
    same(whole, errors(actual.split(sizes), (x for x in reference.split(1000))))
    same(whole, errors(iter([actual.view(-1, 2)]), list(reference.split(sizes))))


def test_chunks_of_any_dtype() -> None:
    actual, reference = pair(100)
    mixed = [actual[:50].bfloat16(), actual[50:].double()]
    whole = torch.cat([x.float() for x in mixed])
    same(errors(mixed, [reference]), errors([whole[:50], whole[50:]], [reference]))


def test_a_stream_is_read_one_chunk_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def chunks() -> Iterator[Tensor]:
        nonlocal most
        for i in range(20):
            most = max(most, sum(alive_ref() is not None for alive_ref in alive))
            chunk = torch.full((ELEMENTS // 3,), float(i))
            alive.append(weakref.ref(chunk))
            yield chunk
            del chunk

    assert errors(chunks(), (chunk + 1 for chunk in chunks())).metric("mse") == 1.0
    assert len(alive) == 40
    assert most <= 4


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    actual, reference = (x[: 60 * 40 * 30].clone() for x in pair(80_000))
    a3, r3 = actual.view(60, 40, 30), reference.view(60, 40, 30)
    return {
        "transposed": (a3[0].T, r3[0].T),
        "permuted": (a3.permute(2, 0, 1), r3.permute(2, 0, 1)),
        "one side": (a3.permute(1, 2, 0), r3.permute(1, 2, 0).contiguous()),
        "every third": (actual[::3], reference[::3]),
        "long rows": (a3.view(2, -1)[:, ::2].expand(3, 2, -1), r3.view(2, -1)[:, ::2].expand(3, 2, -1)),
        "wide": (a3.reshape(2, -1).T, r3.reshape(2, -1).T),
        "flipped": (a3.flip(1), r3.flip(1)[..., :]),
        "expanded": (a3[:, :1].expand(-1, 50, -1), r3[:, :1].expand(-1, 50, -1)),
        "sliced": (a3[3:, 2:17, ::2], r3[3:, 2:17, ::2]),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(layouts()))
def test_any_layout(name: str) -> None:
    actual, reference = layouts()[name]
    copied = errors(actual.contiguous(), reference.contiguous())
    same(errors(actual, reference), copied)
    for element in copied.worst:
        assert actual[element.index].item() == element.actual
        assert reference[element.index].item() == element.reference


def test_scalars_and_empty_tensors() -> None:
    stats = errors(torch.tensor(3.0), torch.tensor(1.0))
    assert stats.elements == 1
    assert stats.metric("mse") == 4.0
    assert [element.index for element in stats.worst] == [()]
    for shape in ((0,), (3, 0), (0, 5, 2)):
        empty = errors(torch.empty(shape), torch.empty(shape), channel_axis=0)
        assert empty.elements == 0
        assert all(math.isnan(value) for value in empty.metrics().values())
        assert math.isnan(empty.percentile(50))
        assert empty.worst == ()
        assert math.isnan((empty + empty).metric("mse"))
    same(errors([], []), errors(torch.empty(0), torch.empty(0)))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_arguments_are_never_written_to(tmp_path: Path) -> None:
    """The second pair is mapped read-only: writing to it would end the process."""
    actual, reference = (x.clone() for x in pair())
    actual[5], reference[7] = NAN, INF
    before = [x.clone().view(torch.int32) for x in (actual, reference)]
    errors(actual, reference, channel_axis=0)
    assert all(torch.equal(x.view(torch.int32), y) for x, y in zip((actual, reference), before, strict=True))  # fmt: skip
    mapped = []
    for name, x in (("a", actual), ("r", reference)):
        x.double().numpy().tofile(tmp_path / name)
        mapped.append(torch.from_numpy(np.memmap(tmp_path / name, np.float64, mode="r")))
    same(errors(*mapped), errors(actual.double(), reference.double()))


def test_gradients_are_left_alone() -> None:
    actual, reference = pair(100)
    parameter = torch.nn.Parameter(actual.clone())
    same(errors(parameter, reference), errors(actual, reference))
    assert parameter.grad is None


def test_the_number_of_threads_does_not_matter() -> None:
    actual, reference = (x.view(-1, 2) for x in pair(2 * LARGE))
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(errors(actual, reference, channel_axis=1, token_axis=0))
    finally:
        torch.set_num_threads(before)
    same(runs[0], runs[1])
    same(runs[0], runs[2])


@pytest.mark.parametrize("bad", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_on_either_side(bad: torch.dtype) -> None:
    good = torch.zeros(4)
    for args in ((good.to(bad), good), (good, good.to(bad)), ([good.to(bad)], [good])):
        with pytest.raises(TypeError, match=str(bad)):
            errors(*args)


@pytest.mark.parametrize(
    "bad", [1.0, None, "abc", [1.0, 2.0], np.zeros(4), np.zeros(0), {"a": torch.zeros(4)}]
)
def test_other_things_are_refused(bad: Any) -> None:
    for args in ((bad, [torch.zeros(4)]), ([torch.zeros(4)], bad), (bad, bad)):
        with pytest.raises(TypeError, match="cannot compare a"):
            errors(*args)
    with pytest.raises(TypeError, match="two tensors"):
        errors(torch.zeros(4), [torch.zeros(4)])
    with pytest.raises(TypeError, match=r"to_dense"):
        errors(torch.zeros(4).to_sparse(), torch.zeros(4))


def test_nothing_is_broadcast() -> None:
    for one, other in (((3, 1), (3, 4)), ((4,), (1, 4)), ((), (1,)), ((2, 3), (3, 2))):
        with pytest.raises(QgateError) as caught:
            errors(torch.zeros(one), torch.zeros(other))
        assert str(one) in str(caught.value)
        assert str(other) in str(caught.value)


@pytest.mark.parametrize("extra", [1, ELEMENTS, 3 * ELEMENTS])
@pytest.mark.parametrize("size", [5, ELEMENTS])
def test_chunks_of_different_length_are_refused(extra: int, size: int) -> None:
    short, long = [torch.zeros(size)], [torch.zeros(size), torch.zeros(extra)]
    with pytest.raises(QgateError, match=f"actual has {size} .*reference {size + extra}:"):
        errors(short, long)
    with pytest.raises(QgateError, match=f"actual has {size + extra} .*reference {size}:"):
        errors(long, short)


def test_options_that_make_no_sense() -> None:
    x = torch.zeros(2, 3)
    for axis in (2, -3):
        with pytest.raises(QgateError, match=rf"{axis} .*\(2, 3\)"):
            errors(x, x, channel_axis=axis)
    with pytest.raises(QgateError, match="need tensors"):
        errors([x], [x], token_axis=0)
    with pytest.raises(QgateError, match="worst=-1"):
        errors(x, x, worst=-1)
    with pytest.raises(QgateError, match="101"):
        errors(x, x).percentile(101)
    with pytest.raises(QgateError, match="Did you mean sqnr_db"):
        errors(x, x).metric("sqnr")
