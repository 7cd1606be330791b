"""Codes that a kernel decodes as other values than the format's, read off its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CODE_BITS = 4
"""Bits of the widest codes whose values are worked out."""
EQUATIONS = 4
"""Results per code from which a table of codes is not fitted by chance."""
NEAR = 1e-4
"""Relative error of a code's value, worked out from a result in float32."""


@dataclass(frozen=True)
class CodeTable:
    """The values of a format's codes, those that a kernel decodes them as, and what these give."""

    right: Tensor
    actual: Tensor
    result: Tensor

    @property
    def largest_change(self) -> float:
        """Return how much larger than the format's the largest decoded value is."""
        return float(self.actual.abs().max() / self.right.abs().max())

    def words(self) -> str:
        """Say which codes are decoded wrongly."""
        off = self.actual - self.right
        wrong = (off.abs() > NEAR * self.right.abs().max()).nonzero().reshape(-1).tolist()
        factor = float(self.actual @ self.right / self.right.square().sum())
        is_scaled = (self.actual - factor * self.right).abs() <= NEAR * self.actual.abs().max()
        if not wrong or bool(is_scaled.all()):
            return ""
        size = float(off.mean())
        if len(wrong) == len(off) and float((off - size).abs().max()) <= NEAR * abs(size):
            way = "high" if size > 0 else "low"
            return f"has every code decoded {abs(size):.4g} too {way} (the zero point is off)"
        listed = ", ".join(
            f"{float(self.right[i]):g} as {float(self.actual[i]):.4g}" for i in wrong[:3]
        )
        more = ", …" if len(wrong) > 3 else ""
        return f"has {len(wrong)} of {len(off)} codes decoded wrongly: {listed}{more}"


def find_table(
    like: Callable[[Tensor], Tensor], ideal: Tensor, scales: Tensor, actual: Tensor
) -> CodeTable | None:
    """Solve for the values of codes that give the actual result.

    like    the reference as a function of this argument, which must be linear
    scales  the scale of each element
    """
    codes = (ideal / scales).nan_to_num(0.0)
    right = codes.round(decimals=6).unique()
    if not 2 <= len(right) <= 2**CODE_BITS or actual.numel() < EQUATIONS * len(right):
        return None
    offset = like(torch.zeros_like(ideal))
    shares = [like((codes - value).abs().lt(1e-5) * scales) - offset for value in right]
    matrix = torch.stack([share.reshape(-1) for share in shares], 1)
    if not _is_sum(like(ideal) - offset, matrix, right):
        return None
    target = (actual.double() - offset).reshape(-1)
    solved = torch.linalg.lstsq(matrix, target[:, None]).solution.reshape(-1)
    result = (matrix @ solved).reshape(actual.shape) + offset
    return CodeTable(right, solved, result)


def _is_sum(whole: Tensor, matrix: Tensor, right: Tensor) -> bool:
    """Check that the reference is linear in the argument."""
    remainder = whole.reshape(-1) - matrix @ right
    return float(remainder.square().sum()) <= 1e-16 * float(whole.square().sum())
