"""Rounding at random by a named generator: each element's bits follow from a seed and its place.

Philox4x32-10 (Salmon et al., SC 2011) makes four words of 32 bits from a counter of four words and
a key of two, which is the seed. Libraries differ in where they put an element's place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from qgate.errors import QgateError, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Layout = Literal["words", "triton", "torch"]
LARGEST_SEED = 2**64 - 1
_MASK = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_TRITON_UNIT = 4.6566127342e-10
_THREADS = 256
"""Threads of a block in torch's kernels of distributions."""


class DrawSource(Protocol):
    """A source of numbers from 0 to 1 that depend on the place of an element alone."""

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return a float64 number for each element of a tensor."""


def philox(counter: Tensor, seed: int, rounds: int = 10) -> Tensor:
    """Return four words for each counter of four words, as int64 along the last axis."""
    import torch

    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(rounds):
        first, second = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c1 = (second >> 32 & _MASK) ^ c1 ^ k0, second & _MASK
        c2, c3 = (first >> 32 & _MASK) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _STEPS[0]) & _MASK, (k1 + _STEPS[1]) & _MASK
    return torch.stack([c0, c1, c2, c3], -1)


@dataclass(frozen=True)
class Philox:
    """Draws of Philox4x32-10 for the elements of a tensor, i = 0, 1, 2, … in row-major order.

    seed    the key, from 0 to 2^64 - 1
    offset  where the tensor's draws begin
    layout  "words": word i % 4 of counter offset + i // 4, as `randint4x` of Triton has them;
            "triton": `tl.rand(seed, offset + i)`, the first word of counter offset + i;
            "torch": `torch.rand` on CUDA with this seed and offset of its generator: thread
            i % T of the second half of the counter, word i // T % 4 of its call i // 4T
    blocks  "torch": the most thread blocks of the device, multiprocessors times threads of one
            over 256; T is 256 times that, or less for small tensors
    bits    "words": the low bits of a word that are used
    carry   "words": round up where the bits added to those cut off carry over, else where they are
            below them
    """

    seed: int
    offset: int = 0
    layout: Layout = "words"
    blocks: int = 0
    bits: int = 32
    carry: bool = False

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise unknown("layout of Philox", self.layout, get_args(Layout))
        for name, low, high in (("seed", 0, LARGEST_SEED), ("offset", 0, 2**62), ("bits", 1, 32)):
            number = getattr(self, name)
            if not isinstance(number, int) or not low <= number <= high:
                raise QgateError(f"{name}={number!r} is not allowed; it is from {low} to {high}.")
        if (self.layout == "torch") != (self.blocks > 0) or self.offset % 4 * (self.blocks > 0):
            raise QgateError(
                f"blocks={self.blocks} with offset={self.offset} is not allowed for layout "
                f"{self.layout!r}: 'torch' needs the device's blocks, such as 1056 of an H200 or "
                "864 of an A100, and an offset that is a multiple of 4; others have no blocks."
            )
        if self.layout != "words" and (self.bits != 32 or self.carry):
            raise QgateError(
                f"bits={self.bits} and carry={self.carry} are for layout 'words'; "
                f"{self.layout!r} has numbers of its own."
            )

    def words(self, count: int, device: torch.device | None = None) -> Tensor:
        """Return the word of each element as int64."""
        import torch

        position = torch.arange(count, dtype=torch.int64, device=device)
        zero, word = torch.zeros_like(position), position % 4
        if self.layout == "torch":
            threads = _THREADS * min(self.blocks, -(-count // _THREADS) or 1)
            call = position // (4 * threads) + self.offset // 4
            counter, word = [call, zero, position % threads, zero], position // threads % 4
        elif self.layout == "triton":
            counter, word = [position + self.offset, zero, zero, zero], zero
        else:
            counter = [position // 4 + self.offset, zero, zero, zero]
        counter[:2] = counter[0] & _MASK, counter[0] >> 32
        drawn = philox(torch.stack(counter, -1), self.seed)
        return drawn.gather(-1, word.unsqueeze(-1)).squeeze(-1)

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return a float64 number for each element of a tensor."""
        import torch

        words = self.words(math.prod(shape), device).view(shape)
        if self.layout == "triton":
            signed = torch.where(words < 2**31, words, _MASK - words)
            return (signed.float() * torch.tensor(_TRITON_UNIT, device=device)).double()
        if self.layout == "torch":
            # In (0, 1] as cuRAND has it, and 1 becomes 0.
            number = (words.float() * 2.0**-32 + 2.0**-33).double()
            return torch.where(number == 1, 0.0, number)
        return unit(words, self.bits, self.carry)


@dataclass(frozen=True)
class RandomWords:
    """Draws from words of a kernel of yours, one for each element; `Philox` explains the rest."""

    words: Tensor
    bits: int = 32
    carry: bool = False

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return a float64 number for each element of a tensor."""
        if tuple(self.words.shape) != tuple(shape):
            raise QgateError(
                f"random words of shape {tuple(self.words.shape)} do not fit a tensor of shape "
                f"{tuple(shape)}: give one for each element."
            )
        return unit(self.words.long().to(device), self.bits, self.carry)


def unit(words: Tensor, bits: int, carry: bool) -> Tensor:
    """Return the low bits of words as float64 numbers from 0 up to 1."""
    low = words & (1 << bits) - 1
    return ((1 << bits) - 1 - low if carry else low).double() * 2.0**-bits
