"""Steps of float32 against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from qgate.arithmetics.float32 import added_in_order, fma, to_tf32
from qgate.arithmetics.fma_chain import KNOWN
from tests.arithmetics import definition
from tests.arithmetics.recordings import scaled


def drawn(count: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=draw) * 2.0 ** torch.randint(-12, 12, (count,), generator=draw)
    return x.where(torch.rand(count, generator=draw) > 0.05, 0.0)


def test_fma_rounds_once() -> None:
    x, y, z = (drawn(3000, seed) for seed in range(3))
    z[::3] = -(x * y)[::3]  # what a second rounding would lose
    one = torch.ones(())
    # Beside a tie of float32 by less than float64 tells beside 1, and on ties.
    near = (1 + 2.0**-15, 2.0**-24 * (1 - 2.0**-15), 1 + 2.0**-23)
    hard = [
        near,
        (2.0**-24, 1.0, 1.0),
        (2.0**-24, 1.0, 1 + 2.0**-23),
        (-near[0], near[1], -near[2]),
    ]
    x, y, z = (
        torch.cat([t, torch.tensor([row[column] for row in hard])])
        for column, t in enumerate((x, y, z))
    )
    exact = [
        float(definition.float32(Fraction(a) * Fraction(b) + Fraction(c)))
        for a, b, c in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    ]
    assert torch.equal(fma(x, y, z), torch.tensor(exact))
    assert not torch.equal(x * y + z, torch.tensor(exact))
    # Rounded to float64 first it is wrong as well.
    assert not torch.equal((x.double() * y.double() + z.double()).float(), torch.tensor(exact))
    assert fma(one * torch.inf, one, one).item() == torch.inf
    assert fma(one * torch.inf, one, -one * torch.inf).isnan()


def test_tf32_is_rounded_to_nearest_even() -> None:
    x = torch.cat(
        [drawn(500, 4), torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11, 2 - 2.0**-23])]
    )
    exact = [
        float(definition.quantized(Fraction(v), definition.exponent(Fraction(v)) - 10, definition.to_nearest)) if v else 0.0
        for v in x.tolist()
    ]  # fmt: skip
    assert torch.equal(to_tf32(x), torch.tensor(exact))
    assert to_tf32(torch.tensor([torch.inf, -torch.inf, torch.nan])).nan_to_num(
        5, 6, 7
    ).tolist() == [6, 7, 5]


def test_a_chain_of_float32_is_a_loop() -> None:
    a, b = drawn(2 * 37, 5).view(2, 37), drawn(3 * 37, 6).view(3, 37)
    for splits in (1, 5):
        sums = KNOWN[0].sums(a, b, (torch.float32, torch.float32), splits)
        length = -(-37 // splits)
        for m, n in ((0, 0), (1, 2)):
            total = None
            for start in range(0, 37, length):
                part = Fraction(0)
                for x, y in zip(
                    a[m, start : start + length].tolist(),
                    b[n, start : start + length].tolist(),
                    strict=True,
                ):
                    part = definition.float32(Fraction(x) * Fraction(y) + part)
                total = part if total is None else definition.float32(total + part)
            assert sums[m, n].item() == float(total or 0)


def test_parts_are_added_from_the_first() -> None:
    parts = [torch.tensor([x]) for x in (2.0**24, 1.0, 1.0, -(2.0**24))]
    assert added_in_order(parts).item() == 0
    assert added_in_order(parts[::-1]).item() == 2
    assert added_in_order([torch.tensor([-0.0])]).signbit().item() is False
    with pytest.raises(ValueError, match="nothing to add"):
        added_in_order([])


def test_results_are_rounded_to_float32_before_bf16() -> None:
    """The exact result is above a tie of bf16; float32 makes it the tie, which goes to even."""
    sums, scale = 1 + 2.0**-8 - 2.0**-23, 1 + 2.0**-23
    assert definition.quantized(
        Fraction(sums) * Fraction(scale), -7, definition.to_nearest
    ) == 1 + Fraction(1, 128)
    assert scaled(torch.tensor([[sums]]), scale, 1.0, torch.bfloat16).item() == 1.0


def test_the_product_of_scales_is_rounded_first() -> None:
    rows, columns = drawn(40, 7).abs().view(40, 1), drawn(30, 8).abs().view(1, 30)
    sums = drawn(1200, 9).view(40, 30)
    exact = [
        [float(definition.float32(Fraction(x) * definition.float32(Fraction(a) * Fraction(b)))) for x, b in zip(line, columns[0].tolist(), strict=True)]
        for line, a in zip(sums.tolist(), rows[:, 0].tolist(), strict=True)
    ]  # fmt: skip
    assert torch.equal(scaled(sums, rows, columns, torch.float32), torch.tensor(exact))
    assert not torch.equal(sums * rows * columns, torch.tensor(exact))
