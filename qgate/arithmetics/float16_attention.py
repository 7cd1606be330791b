"""Attention of float16 whose sums are kept in float16, wholly or in part.

`tl.dot(p, v, out_dtype=tl.float16)` rounds the product of each tile of keys to float16 before
float32 adds it: sageattention 1 attends so. conch's paged attention keeps all it carries from tile
to tile in the dtype of its result: scores, the running largest, sums of probabilities, results.

Recorded from Triton's interpreter on a CPU, where the product of a tile and a sum over it are
rounded once. The tensor core of a GPU rounds its float16 accumulator more often, which nobody
recorded yet. bf16 is left out on purpose, as in `split_float16`: one rounding costs 0.4 % there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qgate.arithmetics.attention import KnownAttention
from qgate.arithmetics.products import runs

PRODUCTS, RUNNING = "products", "running"
"""What is rounded: the product of each tile; or all that is carried from tile to tile, too."""
SUMS_WORDS = {
    PRODUCTS: "products of tiles rounded to float16",
    RUNNING: "scores, maximum, sums and result kept in float16",
}
_TILES = (64, 16, 32, 128, 0)


def attend_with_sums(
    scores: Tensor, values: Tensor, tiles: Iterable[slice], sums: str, dtype: torch.dtype,
    moved: Callable[[Tensor, bool], Tensor] = lambda x, _: x,
) -> Tensor:  # fmt: skip
    """Return softmax(scores) @ values with sums rounded to a dtype, before the last rounding.

    `moved` adds noise to what is rounded; the flag says if that is an exponential.
    """

    def rounded(x: Tensor, is_exponential: bool = False) -> Tensor:
        return moved(x, is_exponential).to(dtype).to(x.dtype)

    def carried(x: Tensor) -> Tensor:
        return rounded(x) if sums == RUNNING else x

    scores = carried(scores)
    most = torch.full_like(scores[..., :1], -math.inf)
    total = torch.zeros_like(most)
    result = scores.new_zeros(*scores.shape[:-1], values.shape[-1])
    for tile in tiles:
        part = scores[..., tile]
        higher = torch.maximum(most, part.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -math.inf, 0.0)
        shrink = carried(carried(most - base).exp())
        p = carried(part - base).exp()
        narrow = rounded(p, True)
        total = carried(total * shrink)
        total = carried(total + carried((narrow if sums == RUNNING else p).sum(-1, keepdim=True)))
        product = rounded(narrow @ values[..., tile, :])
        result = carried(carried(result * shrink) + product)
        most = higher
    return result / total


@dataclass(frozen=True)
class Float16Attention(KnownAttention):
    """Attention whose sums are rounded to 16 bits; `sums` says which."""

    sums: str = PRODUCTS
    has_gradients: ClassVar[bool] = False

    def values(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None,
        dtype: torch.dtype, tile: int = 0, descending: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return float32 results before their last rounding to `dtype`."""
        scores = query.double() @ key.double().mT * scale
        if mask is not None and mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask.double()
        keys = key.shape[-2]
        tiles = runs(keys, tile or keys, math.ceil(keys / (tile or keys)))
        ordered = reversed(tiles) if descending else tiles
        return attend_with_sums(scores, value.double(), ordered, self.sums, dtype).float()

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, scale: float,
        mask: Tensor | None, dtype: torch.dtype, tile: int = 0, descending: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        raise NotImplementedError(f"no known gradients of {self.words}")


KNOWN = (
    Float16Attention(
        "float16-products", f"fused attention, {SUMS_WORDS[PRODUCTS]}", (torch.float16,), _TILES,
    ),
    Float16Attention(
        "float16-running", f"fused attention, {SUMS_WORDS[RUNNING]}", (torch.float16,), _TILES,
        sums=RUNNING,
    ),
)  # fmt: skip
