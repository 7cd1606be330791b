from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate.causes.terms import find_range_fault
from qgate.expected.derived import find_axes
from qgate.expected.products import Product, false_alarm_bound, find_product
from qgate.testing import CheckFailure, check_kernel
from tests.shares import proof, share

TERMS = 4096
GENERATOR = torch.Generator().manual_seed(11)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Draw the same in each test, whichever run before it."""
    GENERATOR.manual_seed(11)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def _product(x: Tensor, w: Tensor) -> Product:
    product = find_product([x, w], find_axes(linear, [x, w]), linear(x.double(), w.double()))
    assert product is not None
    return product


@share(3)
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [("nvfp4", torch.float32), ("mxfp8", torch.bfloat16), ("int8", torch.bfloat16)],
)
def test_one_lost_term_of_4096_is_named(fmt: str, dtype: torch.dtype) -> None:
    x, w = _draw(16, TERMS), _draw(24, TERMS)
    lost = int(torch.randint(TERMS, (), generator=GENERATOR))

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        truncated = qgate.quantize(x, fmt).clone()
        truncated[..., lost : lost + 1] = 0
        return linear(truncated, qgate.quantize(w, fmt)).to(dtype)

    with pytest.raises(CheckFailure, match=rf"term {lost} of the sum over 4,096 .* is lost"):
        check_kernel(kernel, x, w, like=linear, inputs={0: fmt, 1: fmt}, relations=["one"])


@proof
def test_noise_is_no_lost_term_at_10000_sites() -> None:
    """Residuals are what rounding leaves: of results to bfloat16, and of codes that flipped.

    Rounding to bfloat16 follows the magnitudes, so it exceeds a bound up to three times as often as
    even noise: one alarm is expected of noise at the lower rate, a hundred at the higher one.
    """
    alarms = lower = 0
    for site in range(10_000):
        x, w = _draw(8, 32), _draw(12, 32)
        if site == 0:
            product = _product(x, w)
        y = linear(x.double(), w.double())
        residual = y.bfloat16().double() - y if site % 2 else _draw(8, 12).double()
        t, _ = product.terms(residual, [x, w])
        alarms += bool((t.abs() > false_alarm_bound(32)).any())
        lower += bool((t.abs() > false_alarm_bound(32, 100)).any())
    assert alarms <= 5
    assert 50 < lower < 300


def test_the_terms_of_a_residual_are_its_terms_again() -> None:
    x, w = _draw(10, 48), _draw(14, 48)
    product = _product(x, w)
    residual = 0.5 * product.term(7, [x, w]) - product.term(30, [x, w])
    shares, remainder = product.find_terms(residual, [x, w])
    assert shares == pytest.approx({7: 0.5, 30: -1.0}, abs=0.02)
    assert remainder < 1e-4
    assert product.term(7, [x, w]) == pytest.approx(x[:, 7:8] @ w[:, 7:8].T, rel=1e-6)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.matmul, ((5, 8), (8, 6))),
        (torch.bmm, ((3, 5, 8), (3, 8, 6))),
        (linear, ((2, 5, 8), (6, 8), (6,))),
    ],
)
def test_products_are_recognized(function, shapes) -> None:  # type: ignore[no-untyped-def]
    arguments = [_draw(*shape).double() for shape in shapes]
    product = find_product(arguments, find_axes(function, arguments), function(*arguments))
    assert product is not None
    assert product.axis.length == 8


def test_other_functions_are_no_products() -> None:
    x = _draw(5, 8).double()
    assert find_product([x], find_axes(torch.softmax, [x]), x) is None
    y = _draw(5, 8).double()
    assert find_product([x, y], find_axes(torch.add, [x, y]), x + y) is None


# Terms in a row ----------------------------------------------------------------------------------


def _grouped(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("emk,enk->emn", x, w)


@pytest.mark.parametrize(
    "shapes", [((5, 24), (8, 24)), ((3, 5, 24), (3, 8, 24))], ids=["one", "grouped"]
)
@pytest.mark.parametrize("share", [-1.0, 1.0])
def test_the_nearest_range_of_terms_is_that_of_all_tried(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], share: float
) -> None:
    x, w = (_draw(*shape) for shape in shapes)
    like = _grouped if x.dim() == 3 else linear
    product = find_product([x, w], find_axes(like, [x, w]), like(x.double(), w.double()))
    assert product is not None
    residual = _draw(*like(x, w).shape).double()
    tried = {
        (start, end): float(
            (residual - share * like(x[..., start:end].double(), w[..., start:end].double()))
            .square()
            .sum()
        )
        for start in range(24)
        for end in range(start + 1, 25)
    }
    terms, remainder = product.find_range(residual, [x, w], share)
    best = min(tried, key=lambda bounds: tried[bounds])
    assert (terms.start, terms.stop) == best
    assert remainder == pytest.approx(tried[best])


@pytest.mark.parametrize(("first", "last"), [(96, 127), (0, 31), (32, 95)])
def test_a_quarter_of_the_terms_is_named_from_few_values(first: int, last: int) -> None:
    """A result of 96 values does not tell 128 weights, but it tells a range that is lost."""
    x, w = _draw(8, 128), _draw(12, 128)

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        truncated = qgate.quantize(x, "mxfp8").clone()
        truncated[..., first : last + 1] = 0
        return linear(truncated, qgate.quantize(w, "mxfp8"))

    words = rf"{last - first + 1} terms, {first} to {last}, of the sum over 128 .* are lost"
    with pytest.raises(CheckFailure, match=words):
        check_kernel(kernel, x, w, like=linear, inputs={0: "mxfp8", 1: "mxfp8"}, relations=["one"])


def test_no_range_explains_another_fault() -> None:
    for seed in range(200):
        x, w = _draw(6, 32), _draw(8, 32)
        residual = _draw(6, 8).double() * 10 ** (seed % 5 - 2)
        energy = float(residual.square().sum())
        assert find_range_fault(_product(x, w), residual, [x, w], 0.02 * energy) is None
