"""The arithmetic of real code: what it rounds between operators, how it multiplies and attends.

Eager code in 16 bits rounds the result of each operator, fused code those of some, and fused
attention the unnormalized probabilities, which it divides by their sum last. An `Arithmetic` says
which of this a kernel does. Its result is definite: the same roundings give the same bits, but for
values within float noise of a rounding boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qgate.arithmetics.attention import FusedSteps, tiles_of
from qgate.arithmetics.cpu_flash_attention import fast_exponential
from qgate.arithmetics.float16_attention import SUMS_WORDS, attend_with_sums
from qgate.arithmetics.known import KnownProduct
from qgate.expected.known_attention import KnownRule
from qgate.expected.stages import BEFORE_CAST, OPERATOR, StageCast
from qgate.stats.bits import short_name

CODES, SCALED = "codes", "scaled"
_CODES_WORDS = {CODES: "the product of codes", SCALED: "the product times one scale"}
HALVES = (torch.bfloat16, torch.float16)
"""The dtypes that intermediate values may be rounded to."""
INSIDE = "."
"""Stands between the name of an operator that holds others and theirs."""
EXPONENTIAL, SUMS = 2.0**-20, 2.0**-23
"""Relative float noise of exponentials, which processors approximate, and of other results."""
MULTIPLYING = frozenset({"mm", "bmm", "convolution"})


@dataclass(frozen=True)
class AttentionRule:
    """The way of fused attention from probabilities to their product with the values.

    dtype      what unnormalized probabilities are rounded to before the product
    tile       keys per step of the running largest score; 0 for all at once
    ascending  False if the last keys come first
    lanes      numbers that are exponentiated together by a polynomial of third degree; those that
               are left over are exact, as all are with 0
    sums       which sums are rounded to the dtype, too: a key of SUMS_WORDS; none if empty
    """

    dtype: torch.dtype
    tile: int = 0
    ascending: bool = True
    lanes: int = 0
    sums: str = ""

    def words(self) -> str:
        order = "" if self.ascending else ", the last keys first"
        tile = f"in tiles of {self.tile} keys{order}" if self.tile else "all keys at once"
        coarse = ", exponentials to 13 bits as by torch on a CPU" if self.lanes else ""
        to = f"rounded to {short_name(self.dtype)}"
        coarse += f", {SUMS_WORDS[self.sums]}" if self.sums else ""
        return f"fused attention ({tile}), P {to} and divided last{coarse}"


@dataclass(frozen=True)
class Arithmetic:
    """Which intermediate values a kernel rounds, and how it computes products and attention.

    dtype      what results of operators are rounded to
    sites      numbers of the operators in order of execution
    arguments  positions of dequantized arguments that are rounded to the dtype
    attention  how a softmax and the product after it are computed, if fused
    product    the known arithmetic of matrix products, with K cut into `splits` parts
    """

    dtype: torch.dtype
    sites: frozenset[int] = frozenset()
    arguments: tuple[int, ...] = ()
    attention: AttentionRule | KnownRule | None = None
    product: KnownProduct | None = None
    splits: int = 1
    names: tuple[str, ...] = field(default=(), compare=False)
    """The operators of the example."""

    def rounds(self, site: int, name: str, count: int) -> bool:
        """Tell if the result of one of `count` operators is rounded; of other ones by its name."""
        if count == len(self.names):
            return site in self.sites
        named = [number for number, other in enumerate(self.names) if other == name]
        return 2 * len(self.sites.intersection(named)) > len(named)

    def words(self) -> str:
        parts = []
        if self.product is not None:
            parts.append(self.product.with_splits(self.splits))
        if self.attention is not None:
            parts.append(self.attention.words())
        to = f"rounded to {short_name(self.dtype)}"
        if len(self.sites) > 1 and self.sites >= eager_sites(self.names):
            parts.append(f"the result of each operator {to}")
        elif self.sites:
            names = [self.names[site] for site in sorted(self.sites)]
            counts = Counter(_operator_words(name) for name in names if name != BEFORE_CAST)
            of = ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())
            parts += [f"the results of {of} {to}"] if of else []
            parts += [f"values {to} before they are quantized inside"] * (BEFORE_CAST in names)
        if self.arguments:
            listed = ", ".join(map(str, self.arguments))
            parts.append(f"dequantized values of argument {listed} {to}")
        return "; ".join(parts)

    @property
    def size(self) -> int:
        """Return how much is rounded: the simplest arithmetic that explains a result is named."""
        return len(self.sites) + len(self.arguments)


def _operator_words(name: str) -> str:
    outer, _, inner = name.rpartition(INSIDE)
    inner = _CODES_WORDS.get(inner, inner)
    return f"{inner} in {outer}" if outer else inner


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the values of a tensor to a dtype, and keep its own."""
    return value.to(dtype).to(value.dtype)


def attend(
    scores: Tensor, values: Tensor, rule: AttentionRule, noise: Noise | None = None
) -> Tensor:
    """Return softmax(scores) @ values as fused attention computes it, tile by tile of keys."""
    tiles = tiles_of(scores.shape[-1], rule.tile, not rule.ascending)
    if rule.sums:

        def moved(x: Tensor, is_exponential: bool) -> Tensor:
            unit = EXPONENTIAL if is_exponential else SUMS
            return x if noise is None else noise.inexact(x, unit)

        return attend_with_sums(scores, values, tiles, rule.sums, rule.dtype, moved)

    def exponential(x: Tensor) -> Tensor:
        p = x.exp()
        if rule.lanes:
            whole = p.shape[-1] // rule.lanes * rule.lanes
            p[..., :whole] = fast_exponential(x[..., :whole].float()).to(p)
        return p if noise is None else noise(p, EXPONENTIAL)

    steps = FusedSteps(_added, scaled_first=True, exponential=exponential)
    result, _, total = steps.summed(scores, 1.0, values, rule.dtype, tiles)
    return result / total


def _added(a: Tensor, b: Tensor, start: Tensor | None) -> Tensor:
    sums = a.to(b.dtype) @ b.mT
    return sums if start is None else start + sums


class Noise:
    """Moves values by float noise, up or down at random."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, values: Tensor, unit: float) -> Tensor:
        shifts = torch.randn(values.shape, generator=self.generator, dtype=values.dtype)
        return values * (1 + unit * shifts.to(values.device))

    def inexact(self, values: Tensor, unit: float) -> Tensor:
        """Move values but for those that float32 holds: they are no rounded ones."""
        return torch.where(values.float() == values, values, self(values, unit))

    def restart(self) -> None:
        """Begin a computation anew."""

    def cast(self, values: Tensor, cast: StageCast) -> Tensor:
        """Return the codes of values that are moved."""
        return cast(self.inexact(values, SUMS))


def eager_sites(names: Sequence[str]) -> frozenset[int]:
    """Return the operators inside of no other, without the last one, which gives the result.

    Codes of a narrow format are no intermediate values of 16 bits.
    """
    return frozenset(
        site for site, name in enumerate(names[:-1]) if INSIDE not in name and name != OPERATOR
    )


def toggled(arithmetic: Arithmetic, sites: Sequence[int]) -> Arithmetic:
    """Return an arithmetic that rounds these results if it did not, and the other way around."""
    return replace(arithmetic, sites=arithmetic.sites ^ frozenset(sites))
