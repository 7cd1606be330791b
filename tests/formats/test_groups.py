"""Groups that a function lists: what shares a scale is what the function says, in every format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gfloat
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e4m3 as E4M3
from torch import Tensor

import qgate
from qgate.formats import definition
from qgate.formats.groups import Groups, key_threads, query_threads, warps

Lists = list[list[int]]


def queries_of_programs(length: int) -> Lists:
    """List the tokens of each program of SageAttention's kernel for queries, BLKQ=128, WARPQ=32."""
    programs = -(-length // 128) * (128 // 32) * 8
    return [
        [number // 8 * 32 + i * 8 + number % 8 for i in range(32 // 8)]
        for number in range(programs)
    ]


def keys_of_programs(length: int) -> Lists:
    """List the tokens of each program of SageAttention's kernel for keys, BLKK=64, WARPK=64."""
    return [
        [
            number // 4 * 64 + i * 8 + number % 4 * 2 + side
            for side in (0, 1)
            for i in range(64 // 8)
        ]
        for number in range(-(-length // 64) * 4)
    ]


@pytest.mark.parametrize(
    ("groups", "programs"),
    [(query_threads(32), queries_of_programs), (key_threads(64), keys_of_programs)],
)
def test_threads_have_the_tokens_that_their_programs_load(groups: Groups, programs: Any) -> None:
    for length in range(1, 300):
        numbers = groups.numbers(length, 1)[:, 0]
        for number, tokens in enumerate(programs(length)):
            loaded = sorted(token for token in tokens if token < length)
            assert np.flatnonzero(numbers == number).tolist() == loaded


def groups_of(x: Tensor, groups: Groups) -> Iterator[tuple[tuple[int, ...], int, list[Any]]]:
    """Find by loops the elements of each group: the matrix, the number, indices into x."""
    row, column = (axis % x.dim() for axis in groups.axes)
    members: dict[tuple[tuple[int, ...], int], list[Any]] = {}
    for index in np.ndindex(*x.shape):
        number = int(groups.of(np.array(index[row]), np.array(index[column])))
        matrix = tuple(i for axis, i in enumerate(index) if axis not in (row, column))
        members.setdefault((matrix, number), []).append(index)
    for (matrix, number), indices in members.items():
        yield matrix, number, indices


def by_hand(x: Tensor, groups: Groups, largest: float) -> tuple[Tensor, dict[Any, float]]:
    """Quantize to int8, or by gfloat to FP8, group by group."""
    y, scales = torch.empty_like(x, dtype=torch.float64), {}
    for matrix, number, indices in groups_of(x, groups):
        part = np.array([float(x[index]) for index in indices])
        scale = float(np.float32(np.abs(part).max() / largest)) or 1.0
        ratios = part / scale
        codes = np.rint(ratios)
        if largest != 127:
            codes = np.array([gfloat.round_float(E4M3, ratio, sat=True) for ratio in ratios])
        scales[*matrix, number] = scale
        for index, code in zip(indices, codes, strict=True):
            y[index] = code * scale
    if x.dtype == torch.bfloat16:  # torch rounds float64 twice
        y = torch.from_numpy(definition.round_by_list(y.numpy(), qgate.formats.get("bf16").element))
    return y.to(x.dtype), scales


CASES = {
    "queries": (query_threads(32), (1, 2, 70, 5)),
    "keys": (key_threads(64), (2, 1, 67, 3)),
    "warps": (warps(16), (37, 4)),
    "tokens before heads": (Groups("8 tokens", lambda r, _: r // 8, (1, 3)), (2, 19, 3, 4)),
    "both": (Groups("a checkerboard", lambda r, c: (r + c) % 2), (9, 7)),
    "turned": (Groups("3 columns", lambda _, c: c // 3, (0, -1)), (5, 2, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("fmt", "largest"), [("int8", 127.0), ("fp8_e4m3", 448.0)])
def test_values_and_scales_are_those_of_loops(
    fmt: str, largest: float, name: str, dtype: torch.dtype
) -> None:
    groups, shape = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype) * 3
    x.view(-1)[5:9] = 0
    q = qgate.Quantizer(fmt, groups=groups)
    if dtype != torch.float64:  # whose scales are float64, not float32
        values, scales = by_hand(x, groups, largest)
        assert torch.equal(q(x), values)
        encoded = q.encode(x)
        assert encoded.scales is not None
        assert all(float(encoded.scales[at]) == scale for at, scale in scales.items())
        assert torch.equal(encoded.decode(), values)
        with_scales = qgate.Quantizer(fmt, groups=groups, scale=encoded.scales)
        assert torch.equal(with_scales(x), values)
    defined = definition.quantize(x.double().numpy(), q, double=dtype == torch.float64)
    assert torch.equal(q(x), torch.from_numpy(defined).to(dtype))


def test_blocks_and_tiles_are_groups_too() -> None:
    x = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    for options, of in (
        ({"block": 32}, lambda r, c: r * 3 + c // 32),
        ({"block": (8, 48)}, lambda r, c: r // 8 * 2 + c // 48),
    ):
        plain = qgate.Quantizer("uint4", granularity="block", **options)
        listed = qgate.Quantizer("uint4", groups=of)
        assert torch.equal(listed(x), plain(x))
        counts = [qgate.formats.report(x, q).to_dict() for q in (listed, plain)]
        for name, value in counts[1].items():
            assert counts[0][name] == (pytest.approx(value) if "error" in name else value)


def test_gradients_pass_where_values_do_not_saturate() -> None:
    x = torch.randn(1, 40, 8, requires_grad=True)
    q = qgate.Quantizer("int8", groups=query_threads(), scale=torch.full((1, 16), 0.01))
    q(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, x.detach().abs() > 1.275)


def test_padding_has_scales_and_an_empty_tensor_has_none() -> None:
    scales = qgate.Quantizer("int8", groups=query_threads()).encode(torch.ones(3, 4)).scales
    assert scales is not None
    assert scales.shape == (3,)
    padded = Groups("padded", lambda r, _: np.where(r < 2, r, 31))
    scales = qgate.Quantizer("int8", groups=padded).encode(torch.ones(3, 4)).scales
    assert scales is not None
    assert scales.shape == (32,)
    assert bool((scales[2:31] == 1).all())
    assert qgate.quantize(torch.ones(0, 4), "int8", groups=warps(16)).shape == (0, 4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"groups": 3}, TypeError, "groups is a function from rows and columns .*, not 3"),
        ({"groups": lambda r, _: r / 2}, qgate.QgateError, "gives float64 numbers .* row // 32"),
        ({"groups": lambda r, _: r - 1}, qgate.QgateError, "from -1 to 38; count them from 0"),
        ({"groups": lambda r, _: r * 10**6}, qgate.QgateError, "from 0 to 39,000,000"),
        ({"groups": warps(16), "axis": 0}, qgate.QgateError, "axis=0 needs granularity"),
        ({"groups": warps(16), "granularity": "block"}, qgate.QgateError, "leave granularity out"),
        ({"granularity": "groups"}, qgate.QgateError, "granularity 'groups' with groups=None"),
        ({"groups": Groups("far", lambda r, _: r, (-4, -1))}, qgate.QgateError, "lie over axes -4"),
    ],
)
def test_bad_groups_say_what_is_allowed(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        qgate.quantize(torch.ones(40, 8), "int8", **options)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "hif8"])
def test_formats_that_make_scales_otherwise_have_no_groups(fmt: str) -> None:
    with pytest.raises(
        qgate.QgateError, match=r"no option 'groups'|takes the better of two scales"
    ):
        qgate.Quantizer(fmt, groups=warps(16))


def test_the_number_of_groups_follows_the_function() -> None:
    assert qgate.Quantizer("int8", groups=warps(16)).groups is warps(16)
    assert repr(qgate.Quantizer("int8", groups=key_threads())) == (
        "Quantizer(int8, groups=<two of every eight tokens of 64>)"
    )
    assert math.prod(key_threads().scales_shape((2, 3, 65, 8))) == 2 * 3 * 5
