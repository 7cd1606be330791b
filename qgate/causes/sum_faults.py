"""Wrong sums, means and variances: divisors, terms beyond a tile, coarse additions, eps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.causes.operator_calls import Call, CallFault
from qgate.expected.intermediates import rounded
from qgate.stats.bits import short_name

EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""What is added below a root, as models have it."""
NORM_EPS = (1e-6, 1e-5)
"""What norms of queries and keys add below their root."""
LARGEST_EPS = 0.1
TILES = (8, 16, 32, 64, 128, 256)
"""Entries of a tile beyond which a loop may end, or up to which a sum may be filled."""
LONGEST_LOOP = 2048
"""Numbers that are added one after another in 16 bits."""


def sum_faults(call: Call) -> Iterator[CallFault]:
    """List the faults of sums, means and variances, and of what is added below a root."""
    name, args, result = call.name, call.args, call.result
    if name in ("mean", "sum") and call.is_float and isinstance(args[0], Tensor):
        if name == "mean":
            yield from _divisors(args[0], result)
        yield from _of_sum(name, args)
    elif name in ("var_mean", "var"):
        yield from _of_variance(call)
    elif name == "add" and len(args) > 1:
        yield from _other_eps(args)
    elif name in ("rsqrt", "sqrt"):
        yield from _of_root(call)


def product_faults(call: Call) -> Iterator[CallFault]:
    """List matrix products whose last terms are left out, as beyond a tile."""
    if call.name not in ("mm", "bmm"):
        return
    count = call.args[0].shape[-1]
    for first, last in _lost_entries(count):

        def without(a: Sequence[Any], first: int = first) -> Sequence[Any]:
            changed = a[0].clone()
            changed[..., first:] = 0
            return changed, *a[1:]

        which = f"terms {first} to {last - 1}" if last - first > 1 else f"term {first}"
        are = "are" if last - first > 1 else "is"
        yield CallFault(f"{which} of a product over {count} {are} lost", without)
    if call.name == "bmm" and count > 1:
        for operand, side, dim in ((0, "first", -1), (1, "second", -2)):
            for eps in NORM_EPS:
                yield CallFault(
                    f"the {side} side of a matrix product is divided by its RMS over {count} terms",
                    lambda a, operand=operand, dim=dim, eps=eps: _normed(a, operand, dim, eps),  # type: ignore[misc]
                )


def _normed(args: Sequence[Any], operand: int, dim: int, eps: float) -> Sequence[Any]:
    x = args[operand]
    changed = list(args)
    changed[operand] = x * torch.rsqrt(x.square().mean(dim, keepdim=True) + eps)
    return changed


def _divisors(x: Tensor, mean: Tensor) -> Iterator[CallFault]:
    count = x.numel() // max(mean.numel(), 1)
    if count <= 2:
        return
    padded = {-(-count // tile) * tile for tile in (16, 32, 64, 128, 256)}
    padded.add(2 ** math.ceil(math.log2(count)))
    for other in (count - 1, *sorted(padded - {count, count - 1})):
        yield CallFault(
            f"the sum over {count} is divided by {other}, not by {count}",
            result=lambda _, value, other=other: value * (count / other),  # type: ignore[misc]
        )
    yield CallFault(
        f"the sum over {count} is not divided by {count}", result=lambda _, v: v * count
    )


def _of_variance(call: Call) -> Iterator[CallFault]:
    """List other divisors of a variance, and one whose mean was not subtracted."""
    x = call.args[0]
    is_pair = call.name == "var_mean"
    variance = call.result[0] if is_pair else call.result
    count = x.numel() // max(variance.numel(), 1)
    is_unbiased = call.args[2] if len(call.args) > 2 else True
    correction = call.kwargs.get("correction", int(is_unbiased))
    if correction is None or count <= 2:
        return
    right = count - correction

    def other(change: Any) -> Any:
        return lambda a, own: (change(own[0], a[0]), own[1]) if is_pair else change(own, a[0])

    for divisor in {count, count - 1} - {right}:
        yield CallFault(
            f"the sum over {count} is divided by {divisor:g}, not by {right:g}",
            result=other(lambda v, _, divisor=divisor: v * (right / divisor)),
        )
    dims = call.args[1] if len(call.args) > 1 else None
    if dims:
        yield CallFault(
            "the mean is not subtracted in the variance",
            result=other(lambda v, x: v + x.mean(dims, keepdim=v.dim() == x.dim()).square()),
        )


def _of_sum(name: str, args: Sequence[Any]) -> Iterator[CallFault]:
    """List sums that end early or are added up in 16 bits, one after another."""
    x = args[0]
    dims = args[1] if len(args) > 1 and args[1] else list(range(x.dim()))
    dims = [dims] if isinstance(dims, int) else list(dims)
    if len(dims) != 1:
        return
    dim, count = dims[0] % x.dim(), x.shape[dims[0]]
    for first, last in _lost_entries(count):
        several = f"{last - first} entries, {first} to {last - 1},"
        which, are = (several, "are") if last - first > 1 else (f"entry {first}", "is")

        def without(a: Sequence[Any], first: int = first, last: int = last) -> Sequence[Any]:
            changed = a[0].clone()
            changed.narrow(dim, first, last - first).zero_()
            return changed, *a[1:]

        yield CallFault(f"{which} of a sum over {count} {are} left out", without)
    if not 2 < count <= LONGEST_LOOP:
        return
    for dtype in (torch.bfloat16, torch.float16):
        yield CallFault(
            f"the sum over {count} is added up in {short_name(dtype)}",
            result=lambda a, value, dtype=dtype: _one_by_one(  # type: ignore[misc]
                a[0], value, dim, dtype, name == "mean"
            ),
        )


def _lost_entries(count: int) -> Iterator[tuple[int, int]]:
    """List entries that a loop over tiles may leave out: a partial tile, all beyond the first."""
    firsts = {count // tile * tile for tile in TILES} | {tile for tile in TILES if tile < count}
    for first in sorted({first for first in firsts | {count - 1} if 0 < first < count}):
        yield first, count


def _one_by_one(x: Tensor, own: Tensor, dim: int, dtype: torch.dtype, is_mean: bool) -> Tensor:
    """Return sums or means of a dimension, added one term after another in a dtype."""
    terms = rounded(x, dtype).movedim(dim, 0)
    total = terms[0]
    for term in terms[1:]:
        total = rounded(total + term, dtype)
    added: Tensor = (total / len(terms) if is_mean else total).reshape(own.shape)
    return added


def _other_eps(args: Sequence[Any]) -> Iterator[CallFault]:
    other = _number(args[1])
    if other is None or not 0 < other <= LARGEST_EPS:
        return
    for eps in EPS:
        if eps != other:
            yield CallFault(
                f"eps is {eps:g}, not {other:g}",
                lambda a, eps=eps: (a[0], eps, *a[2:]),  # type: ignore[misc]
            )


def _of_root(call: Call) -> Iterator[CallFault]:
    """List roots that are left out, and eps that is added to the root instead."""
    is_inverse = call.name == "rsqrt"
    maker = call.made(0)
    if maker is not None and maker.name == "add" and len(maker.args) > 1:
        eps = _number(maker.args[1])
        if eps is not None and 0 < eps <= LARGEST_EPS:

            def outside(a: Sequence[Any], eps: float, other: float) -> Tensor:
                root: Tensor = (a[0] - eps).clamp_min(0).sqrt() + other
                return root.reciprocal() if is_inverse else root

            for other in (eps, *(other for other in EPS if other not in (0.0, eps))):
                which = f"{eps:g}" if other == eps else f"{other:g}, not {eps:g}"
                yield CallFault(
                    f"eps ({which}) is added outside the root, not inside",
                    result=lambda a, _, eps=eps, other=other: outside(a, eps, other),  # type: ignore[misc]
                )
    yield CallFault(
        "the root is left out", result=lambda a, _: 1 / a[0] if is_inverse else a[0].clone()
    )


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.dim() == 0:
        value = float(value)
    return value if isinstance(value, float) else None
