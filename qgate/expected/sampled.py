"""Samples of a quantized tensor: groups that share a scale, and what the definition makes of them.

The definition is slow, so of a large tensor it gets the groups where quantizers go wrong: the
first, the middle and the last one, short last blocks, the first and last of every sample, those of
the largest and the smallest magnitude, zeros, numbers that are not finite, and some at random.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qgate.expected.conventions import with_options
from qgate.expected.group_scales import rounded_to
from qgate.formats.definition import quantize as define
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

SMALL = 2**10
"""Elements up to which all of a tensor is looked at, and about how many of a larger one are."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTH = 128
_MOST = 2**14


@dataclass(frozen=True)
class GroupSample:
    """Groups of one tensor as rows of one width, and where they lie."""

    rows: Tensor
    settings: QuantizerSettings
    part: int
    lines: Tensor
    blocks: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements of another tensor of that shape in the same places."""
        return list(_parts(tensor, self.settings))[self.part][self.lines, self.blocks]

    def place(self, shape: torch.Size, row: int, column: int) -> tuple[int, ...]:
        """Return the index of one element in a tensor of a shape."""
        places = torch.arange(shape.numel(), device=self.rows.device).view(shape)
        flat = int(self.of(places)[row, column])
        return tuple(int(index) for index in np.unravel_index(flat, shape))


def undefined(q: QuantizerSettings) -> str:
    """Say why groups of a tensor have no expected values by themselves; empty where they do."""
    if q.rounding == "stochastic":
        return "stochastic rounding has no expected value"
    if isinstance(q.scale, Tensor) and q.scale.numel() > 1:
        return "its scales are a tensor that was given"
    if q.format.kind == "element" and q.format.tapered and q.granularity is not None:
        return "its scale comes from the squared error of all elements"
    if q.format.kind == "block" and q.format.by_rows:
        return "its scales come from whole rows"
    if q.format.kind == "block" and q.format.by_blocks:
        return "its scales are quantized with those of all blocks"
    if q.rotation is not None:
        return "its groups are rotated"
    if q.groups is not None:
        return "its groups are listed by a function"
    return ""


def sample_groups(x: Tensor, q: QuantizerSettings, seed: int = 0) -> list[GroupSample]:
    """Choose groups of a tensor, those of full width and those that are shorter apart."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number, groups in enumerate(_parts(x.detach(), q)):
        if groups.numel():
            chosen = _chosen(groups, x.shape[0] if x.dim() > 2 else 1, generator).to(x.device)
            lines, blocks = chosen // groups.shape[1], chosen % groups.shape[1]
            samples.append(GroupSample(groups[lines, blocks], q, number, lines, blocks))
    return samples


def _parts(x: Tensor, q: QuantizerSettings) -> Iterator[Tensor]:
    """View a tensor as lines of whole groups, and as lines of short last ones."""
    if q.granularity == "channel":
        channels = (x if x.dim() else x.reshape(1)).movedim(q.axis_of(x.dim()), 0)
        yield channels.reshape(len(channels), 1, -1)
        return
    if q.tile is not None:
        yield from _tiles(x, q.tile)
        return
    if q.granularity == "block":
        moved = x.movedim(q.axis_of(x.dim()), -1) if x.dim() else x.reshape(1)
        lines, width = moved.reshape(-1, moved.shape[-1]), q.block
    else:
        lines, width = x.reshape(1, -1), min(_WIDTH, x.shape[-1] if x.dim() else 1)
    end = lines.shape[1] // width * width
    yield lines[:, :end].reshape(len(lines), end // width, width)
    yield lines[:, end:].unsqueeze(1)


def _tiles(x: Tensor, tile: tuple[int, int]) -> Iterator[Tensor]:
    """View a tensor as lines of tiles of one size: whole ones, those at its ends."""
    ends = [size // side * side for size, side in zip(x.shape[-2:], tile, strict=True)]
    spans = [((0, end, side), (end, size, size - end))
             for size, side, end in zip(x.shape[-2:], tile, ends, strict=True)]  # fmt: skip
    for (top, bottom, rows), (first, last, columns) in itertools.product(*spans):
        part = x[..., top:bottom, first:last]
        if not part.numel():
            continue
        split = part.reshape(-1, (bottom - top) // rows, rows, (last - first) // columns, columns)
        tiles = split.transpose(2, 3)
        yield tiles.reshape(-1, tiles.shape[2], rows * columns)


def _chosen(groups: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Return the flat indices of the groups to look at, of `groups` as [lines, blocks, width]."""
    lines, blocks, width = groups.shape
    count = lines * blocks
    if groups.numel() <= SMALL:
        return torch.arange(count)
    # Two reductions: abs() would write the whole tensor once more.
    amax = torch.maximum(groups.amax(-1), -groups.amin(-1)).reshape(-1)
    usable = (amax > 0) & amax.isfinite()
    listed = [0, count - 1]
    listed += [int(amax.where(usable, -1).argmax()), int(amax.where(usable, torch.inf).argmin())]
    # Zeros and what is not finite, if there are any.
    listed += [int((amax == 0).int().argmax()), int((~amax.isfinite()).int().argmax())]
    listed += [blocks - 1, count // 2]
    for number in range(samples):
        listed += [count * number // samples, count * (number + 1) // samples - 1]
    listed += torch.randint(count, (max(4, SMALL // width),), generator=generator).tolist()
    return torch.tensor(sorted(set(listed[: max(2, _MOST // width)])))


def define_groups(sample: GroupSample, q: QuantizerSettings, whole: Tensor) -> Floats:
    """Return what the definition makes of sampled groups of the tensor `whole`."""
    rows = sample.rows.double().cpu().numpy()
    if q.granularity == "channel":
        q = with_options(q, axis=0)
    elif q.granularity == "block":
        q = with_options(q, axis=-1, tile=None)
    needs_all = q.granularity == "tensor" or (q.format.kind == "block" and q.format.needs_amax)
    count = len(rows)
    if needs_all and q.scale is None:
        # Scales of the whole tensor come from its ends: those are in the sample then.
        rows = np.concatenate([rows, np.zeros((2, rows.shape[1]))])
        rows[-2:, 0] = _ends(whole, finite=q.granularity != "tensor")
    with np.errstate(all="ignore"):
        return define(rows, q, double=whole.dtype == torch.float64)[:count]


def _ends(x: Tensor, *, finite: bool) -> tuple[float, float]:
    low, high = float(x.amin()), float(x.amax())
    if finite and not (math.isfinite(low) and math.isfinite(high)):
        x = x.where(x.isfinite(), 0.0)
        return float(x.amin()), float(x.amax())
    return low, high


def cast_once(values: Floats, dtype: torch.dtype) -> Tensor:
    """Round float64 values to a dtype, to 16 bits without a stop at float32."""
    if dtype.itemsize == 2:
        name = "fp16" if dtype == torch.float16 else "bf16"
        rounded = rounded_to(name, values, saturate=False)
        return torch.from_numpy(rounded).to(torch.float32).to(dtype)
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def differing(actual: Tensor, expected: Tensor) -> Tensor:
    """Return where bits differ, signs of zero included; one NaN is as good as another."""
    bits = _INTEGERS[actual.dtype.itemsize]
    differ: Tensor = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    is_nan: Tensor = actual.isnan() & expected.isnan()
    return differ & ~is_nan
