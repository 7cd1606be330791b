from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate.causes.readings import wrong_readings
from qgate.testing import CheckFailure, check_kernel
from tests.shares import proof

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(12, 32, generator=GENERATOR)
TABLE = torch.randn(8, 32, generator=GENERATOR)
ROWS = torch.tensor([3, 0, 7, 7, 1, 2, 5, 4, 6, 0, 2, 3])


def _picked(x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    return x + table[rows]


def _scaled(x: Tensor, factor: float, *, power: int = 1) -> Tensor:
    return x * factor**power + 1.0


def _first_line(kernel: Callable[..., Any], like: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(CheckFailure) as failure:
        check_kernel(kernel, *arguments, like=like, relations=["one"])
    return failure.value.cause


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: (rows + 1) % 8, "argument 1 is read one entry too far along dimension 0"),
        (lambda rows: rows * 0, "argument 2 is not used: read as 0 everywhere"),
        (lambda rows: rows * 0 + 5, "argument 2 is not used: read as 5 everywhere"),
        (lambda rows: rows.roll(1), "argument 2 is read one entry too early"),
        (lambda rows: rows.roll(-1), "argument 2 is read one entry too far"),
        (lambda rows: rows.flip(0), "argument 2 is read in reverse order"),
        (
            lambda rows: rows.reshape(2, -1).T.reshape(-1),
            "argument 2 is read as halves, but it is interleaved",
        ),
        (
            lambda rows: rows.reshape(-1, 2).T.reshape(-1),
            "argument 2 is read as interleaved, but it is in halves",
        ),
        (lambda rows: rows.roll(6), "argument 2 is read with its halves swapped"),
    ],
)
def test_another_reading_of_integers_is_named(
    change: Callable[[Tensor], Tensor], words: str
) -> None:
    def kernel(x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        return _picked(x, table, change(rows) if len(rows) == len(ROWS) else rows)

    line = _first_line(kernel, _picked, X, TABLE, ROWS)
    assert words in line


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        (1.0, "argument 1 is taken as 1, not 0.25"),
        (0.0625, "argument 1 is taken as its square, not 0.25"),
        (0.5, "argument 1 is taken as its square root, not 0.25"),
        (4.0, "argument 1 is taken as its reciprocal, not 0.25"),
    ],
)
def test_another_reading_of_a_number_is_named(taken: float, words: str) -> None:
    assert words in _first_line(lambda x, _: _scaled(x, taken), _scaled, X, 0.25)


def test_a_flag_that_is_read_the_other_way_is_named() -> None:
    def like(x: Tensor, is_added: bool) -> Tensor:
        return x * x if is_added else x

    line = _first_line(lambda x, is_added: like(x, not is_added), like, X, True)
    assert "argument 1 is taken as False, not True" in line


def test_swapped_arguments_are_named() -> None:
    line = _first_line(lambda x, y: y * 2 - x, lambda x, y: x * 2 - y, X, X.flip(0) + 1)
    assert "arguments 0 and 1 are swapped" in line


def test_a_narrower_argument_is_named_if_it_is_not_declared_as_quantized() -> None:
    line = _first_line(lambda x, w: linear(x.half().float(), w), linear, X, TABLE)
    assert "argument 0 is rounded to float16" in line
    declared = list(wrong_readings([X, TABLE], declared=[0, 1]))
    assert not any("rounded" in reading.words for reading in declared)


def test_an_argument_that_is_left_out_is_named() -> None:
    def like(x: Tensor, table: Tensor) -> Tensor:
        return (x + table.sum(0)) ** 2

    line = _first_line(lambda x, _: x**2, like, X, TABLE)
    assert "argument 1 is not used: read as zeros" in line


def test_readings_leave_the_arguments_as_they_are() -> None:
    arguments = [X, ROWS, torch.tensor([True, False]), 3, 0.5, True, "name", None, X[:0]]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
    listed = list(wrong_readings(arguments, declared=[]))
    assert len({reading.words for reading in listed}) == len(listed)
    for value, copy in zip(arguments, copies, strict=True):
        assert torch.equal(value, copy) if isinstance(value, Tensor) else value == copy


def test_large_arguments_are_not_tried_in_other_orders() -> None:
    large = torch.zeros(2**20 + 1)
    assert not list(wrong_readings([large], declared=[]))


def test_a_near_miss_of_another_reading_is_not_named() -> None:
    """The table is rounded and one entry of it is wrong besides."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        w = w.half().float()
        return linear(x, torch.cat([w[:1] + 1e-3, w[1:]]))

    assert "rounded to float16" not in _first_line(kernel, linear, X, TABLE)


@proof
def test_a_state_without_its_residual_is_named_at_rounding_boundaries() -> None:
    """Codes that float noise decides do not hide that the rest of a state is left out."""
    state = qgate.Quantizer("int8", granularity="channel", axis=0)

    def like(x: Tensor, residual: Tensor) -> Tensor:
        return x + residual

    for seed in range(2):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
        with pytest.raises(CheckFailure, match="argument 1 is not used: read as zeros"):
            check_kernel(
                lambda x, _: state(state(x) * 1.0),
                state(x),
                (x - state(x)) * 3,
                like=like,
                inputs={0: state},
                output=state,
                relations=["one"],
            )
