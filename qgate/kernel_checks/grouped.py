"""Grouped products: rows sorted by expert, one matrix for each group, and groups that are wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.expected.noise import Expected


def grouped_product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each group by its own matrix, as a grouped GEMM with offsets does.

    x     rows (rows, k), those of group 0 first
    w     matrices (groups, n, k)
    ends  the row after the last one of each group, as `torch.nn.functional.grouped_mm` takes them;
          a group without rows ends where the one before it does
    """
    rows = ends.tolist()
    if ends.dim() != 1 or len(rows) != len(w):
        raise ValueError(
            f"ends of shape {tuple(ends.shape)} are not those of {len(w)} groups: give one row "
            "number for each matrix of w."
        )
    starts = [0, *rows[:-1]]
    if any(end < start for start, end in zip(starts, rows, strict=True)) or rows[-1] != len(x):
        raise ValueError(
            f"ends {rows} do not divide {len(x)} rows: they never fall, and the last one is "
            "the number of rows."
        )
    parts = [x[a:b] @ w[group].T for group, (a, b) in enumerate(zip(starts, rows, strict=True))]
    return torch.cat(parts)


def describe_groups(
    x: Tensor, w: Tensor, ends: Tensor, actual: Tensor, expected: Expected, wrong: Tensor
) -> str:
    """Name groups whose rows are zero, another matrix's, or off by a factor; empty if none are."""
    words: list[str] = []
    start = 0
    for group, end in enumerate(ends.tolist()):
        rows = (wrong[start:end].any(1).nonzero().flatten() + start).tolist()
        if rows:
            words.append(_group_words(group, rows, range(start, end), x, w, actual, expected))
        start = end
    if not all(words):
        return ""
    more = f", and so for {len(words) - 3} more" if len(words) > 3 else ""
    return "; ".join(words[:3]) + more


def _group_words(
    group: int,
    rows: list[int],
    whole: range,
    x: Tensor,
    w: Tensor,
    actual: Tensor,
    expected: Expected,
) -> str:
    a, e = actual[rows].double(), expected.values[rows]
    half = expected.width[rows]
    part = "all" if len(rows) == len(whole) else f"{len(rows)} of {len(whole)}"
    part += " rows" if len(whole) != 1 else " row"
    where = f"{part} of group {group}" + ("" if part.startswith("all") else f", from {rows[0]},")
    if not bool(a.any()):
        return f"{where} are zero: no tile computes them"
    for other in range(len(w)):
        product = x[rows].double() @ w[other].double().T
        room = 4 * half * (product.norm() / e.norm().clamp_min(1e-300)).clamp_min(1.0)
        if other != group and bool(((a - product).abs() <= room).all()):
            return f"{where} are multiplied by the matrix of group {other}"
    factor = float((a * e).sum() / e.square().sum())
    rounding = 2.0**-20 * e.abs().amax()
    if bool(((a - factor * e).abs() <= half * max(1.0, abs(factor)) + rounding).all()):
        return f"{where} are {factor:.4g} times the expected: the scale of this group is off"
    return ""
