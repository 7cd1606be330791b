"""Attention of 16 bits as fused kernels compute it, and its gradients.

All of them round the unnormalized probabilities to 16 bits before the product with the values, and
divide last by the float32 sum of the probabilities that are not rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qgate.arithmetics.float32 import fma
from qgate.arithmetics.tensor_core import TensorCore, chain

LOG2_E = 1 / math.log(2)
Multiply = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""Multiplies [..., M, K] and [..., N, K]; the float32 sums [..., M, N] begin with the third."""


@dataclass(frozen=True)
class BackwardRounding:
    """Choices of a fused attention on its way back.

    after_scale   gradients of scores are rounded to 16 bits after the scale, not before it
    of_p          probabilities are rounded to 16 bits before they meet the gradients of the scores
    base_e        exponents are taken below the sum in base e, and turned to base 2 last
    """

    after_scale: bool = False
    of_p: bool = False
    base_e: bool = False


@dataclass(frozen=True)
class FusedSteps:
    """The steps of a fused attention between its matrix products.

    multiply       computes the products
    scaled_first   the running largest is one of scaled scores; steps of it are not scaled again
    wide           exponentials and sums are computed in float64 and rounded once
    exponential    computes probabilities from exponents in base e; None: the one of base 2 does
    """

    multiply: Multiply
    scaled_first: bool = False
    wide: bool = True
    exponential: Callable[[Tensor], Tensor] | None = None

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None,
        dtype: torch.dtype, tiles: Iterable[slice],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the float32 results before their last rounding, and the logarithms of the sums.

        `tiles` are the keys of each step of the running largest, in their order.
        """
        scores, scale = self._scores(query, key, scale, mask)
        result, top, total = self.summed(scores, scale, value, dtype, tiles)
        empty = total == 0
        top = top.masked_fill(empty, 0.0)
        if self.exponential is not None:
            log_sums = top * scale + total.double().log().float()
        else:
            # The fast logarithm of CUDA is the one of base 2, times ln 2.
            log2 = (total.double().log2().float() if self.wide else total.log2()) * (1 / LOG2_E)
            log_sums = self._multiplied_and_added(top, scale, log2)
        inverse = total.masked_fill(empty, 1.0).reciprocal()
        return result * inverse, log_sums.masked_fill(empty, math.inf)

    def summed(
        self, scores: Tensor, scale: float, value: Tensor, dtype: torch.dtype,
        tiles: Iterable[slice],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return sums of values, the largest score and the sum of probabilities of each row.

        Probabilities are those of scores times the scale, rounded to `dtype` where they meet the
        values. All is in the dtype of the scores.
        """
        base2 = _in_base_2(scores, scale)
        top = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        total = torch.zeros_like(top)
        result: Tensor | None = None
        for tile in tiles:
            part = scores[..., tile]
            largest = torch.maximum(top, part.amax(-1, keepdim=True))
            above = largest.masked_fill(largest == -math.inf, 0.0)
            if self.exponential is None:
                p = self._exp2(part * base2 - above * base2)
            else:
                p = self.exponential(part * scale - above * scale)
            step = top * base2 - above * base2 if self.scaled_first else (top - above) * base2
            shrink = self._exp2(step)
            total = total * shrink + self._sum(p)
            begun = None if result is None else result * shrink
            result = self.multiply(p.to(dtype), value[..., tile, :].mT, begun)
            top = largest
        if result is None:
            raise ValueError("attention over no tile of keys")
        return result, top, total

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, output: Tensor,
        log_sums: Tensor, scale: float, mask: Tensor | None, dtype: torch.dtype,
        rounding: BackwardRounding,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the float32 gradients of query, key and value before their last rounding.

        `output` is the rounded result.
        """
        scores, factor = self._scores(query, key, scale, mask)
        if rounding.base_e:
            exponents = self._multiplied_and_added(scores, factor, -log_sums) * LOG2_E
        else:
            exponents = scores * _in_base_2(scores, factor) - log_sums * LOG2_E
        p = self._exp2(exponents)
        rounded_p = p.to(dtype)
        along = self._sum(grad.double() * output if self.wide else grad.float() * output).float()
        inner = self.multiply(grad, value, None) - along
        before, after = (scale, 1.0) if rounding.after_scale else (1.0, scale)
        of_scores = (before * (rounded_p.float() if rounding.of_p else p) * inner).to(dtype)
        return (
            self.multiply(of_scores, key.mT, None) * after,
            self.multiply(of_scores.mT, query.mT, None) * after,
            self.multiply(rounded_p.mT, grad.mT, None),
        )

    def _scores(
        self, query: Tensor, key: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, float]:
        """Return scores and the factor that they still need."""
        scores = self.multiply(query, key, None)
        if mask is None:
            return scores, scale
        if mask.dtype is torch.bool:
            return scores.masked_fill(~mask, -math.inf), scale
        return self._multiplied_and_added(scores, scale, mask.float()), 1.0

    def _exp2(self, exponents: Tensor) -> Tensor:
        return torch.exp2(exponents.double() if self.wide else exponents).to(exponents)

    def _sum(self, x: Tensor) -> Tensor:
        return (x.double() if self.wide else x).sum(-1, keepdim=True).to(x)

    def _multiplied_and_added(self, x: Tensor, factor: float, added: Tensor) -> Tensor:
        if not self.wide:
            return x * factor + added
        return fma(x, x.new_tensor(factor), added)


def tiles_of(keys: int, tile: int, descending: bool = False) -> list[slice]:
    """Cut keys into tiles, the last of which may be shorter; `tile` 0 takes all at once."""
    tiles = [slice(start, start + (tile or keys)) for start in range(0, keys, tile or keys or 1)]
    return tiles[::-1] if descending else tiles


def _in_base_2(like: Tensor, scale: float) -> Tensor:
    """Return the scale times log2(e) in float32."""
    return like.new_tensor(scale) * like.new_tensor(LOG2_E)


@dataclass(frozen=True)
class KnownAttention:
    """One arithmetic of attention over operands of 16 bits.

    name            how a user asks for it
    words           how a report says it
    dtypes          the dtypes of operands that it is for
    tiles           keys of one step of the running largest, likeliest first; 0 for all keys
    core            adds the products; None: they are exact and rounded once to float32
    scaled_first, exponential   see `FusedSteps`
    backward        what is rounded on the way back
    """

    name: str
    words: str
    dtypes: tuple[torch.dtype, ...]
    tiles: tuple[int, ...]
    core: TensorCore | None = None
    scaled_first: bool = False
    exponential: Callable[[Tensor], Tensor] | None = None
    backward: BackwardRounding = BackwardRounding()
    has_gradients: ClassVar[bool] = True

    def tilings(self, keys: int) -> tuple[tuple[int, bool], ...]:
        """List tiles with whether they are taken from the last, each way to cut the keys once."""
        sizes = dict.fromkeys(min(tile, keys) if tile else keys for tile in self.tiles)
        return tuple(
            (size, descending)
            for size in sizes
            for descending in ((True, False) if size < keys else (False,))
        )

    def values(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None,
        dtype: torch.dtype, tile: int = 0, descending: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return float32 results [..., M, V] before their last rounding to `dtype`.

        query [..., M, D], key [..., K, D] and value [..., K, V] hold exact values of `dtype`, with
        a head of keys for each head of queries. A mask is added to the scores, or true where a key
        is seen. `tile` 0 takes all keys at once.
        """
        return self._attended(query, key, value, scale, mask, dtype, tile, descending)[0]

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, scale: float,
        mask: Tensor | None, dtype: torch.dtype, tile: int = 0, descending: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return float32 gradients of query, key and value before their last rounding."""
        result, log_sums = self._attended(query, key, value, scale, mask, dtype, tile, descending)
        return self._steps(dtype).gradients(
            query, key, value, grad, result.to(dtype), log_sums, scale, mask, dtype,
            self.backward,
        )  # fmt: skip

    def with_tile(self, tile: int, descending: bool, keys: int) -> str:
        """Return the words of a report, with the tiles of keys if there are several."""
        if not 0 < tile < keys:
            return self.words
        order = ", the last first" if descending else ""
        return f"{self.words}, {tile} keys at once{order}"

    def multiply(self, dtype: torch.dtype, a: Tensor, b: Tensor, start: Tensor | None) -> Tensor:
        """Return the float32 products of `a` [..., M, K] and `b` [..., N, K], added to `start`."""
        if self.core is not None:
            return chain(self.core, a, b, (dtype, dtype), start)
        sums = a.double() @ b.double().mT
        return (sums if start is None else sums + start).float()

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None,
        dtype: torch.dtype, tile: int, descending: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tiles = tiles_of(key.shape[-2], tile, descending)
        return self._steps(dtype).attended(query, key, value, scale, mask, dtype, tiles)

    def _steps(self, dtype: torch.dtype) -> FusedSteps:
        multiply = functools.partial(self.multiply, dtype)
        return FusedSteps(multiply, self.scaled_first, exponential=self.exponential)
