"""Reading tensors in flat order into a small float64 buffer, whatever their layout and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from qgate.stats.bits import slabs

_FROM_DEVICE = 2**22
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def require_floats(x: object, side: str) -> Tensor:
    """The tensor without its graph; TypeError for anything that has no errors to speak of."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{side}: expected a tensor or chunks of one, not {type(x).__name__}.")
    if x.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{side}: cannot compare a {x.dtype} tensor; allowed: {allowed}.")
    if x.layout != torch.strided:
        raise TypeError(f"{side}: cannot read a tensor of layout {x.layout}: call .to_dense().")
    return x.detach()


def copy_flat(x: Tensor, start: int, out: Tensor) -> None:
    """out = x.flatten()[start:start + len(out)], without the copy that flatten may make."""
    size = len(out)
    if x.is_contiguous():
        out.copy_(x.view(-1)[start : start + size])
    elif size:
        row_size = x[0].numel()
        row, skipped = divmod(start, row_size)
        done = 0
        if skipped:
            done = min(row_size - skipped, size)
            copy_flat(x[row], skipped, out[:done])
            row += 1
        rows = (size - done) // row_size
        if rows:
            part = x[row : row + rows]
            out[done : done + rows * row_size].view(part.shape).copy_(part)
            done += rows * row_size
        if done < size:
            copy_flat(x[row + rows], 0, out[done:])


def _on_host(chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """What lies on a device comes in parts: a copy for each portion would wait for each."""
    for chunk in chunks:
        if isinstance(chunk, Tensor) and chunk.device.type not in ("cpu", "meta"):
            yield from (slab.detach().cpu() for slab in slabs(chunk, _FROM_DEVICE))
        else:
            yield chunk


class Reader:
    """Hands out a tensor, or chunks of any sizes one after the other, in portions that fit."""

    def __init__(self, source: Tensor | Iterable[Tensor], side: str) -> None:
        if not isinstance(source, Iterable) or hasattr(source, "__array__"):
            source = require_floats(source, side)
        self._side = side
        chunks = (source,) if isinstance(source, Tensor) else source
        self._chunks: Iterator[Tensor] = _on_host(chunks)
        self._chunk = torch.empty(0, device="cpu")
        self._used = 0
        self.taken = 0
        self.wide = False
        """Whether a float64 tensor was read: only its squares can leave float64's range."""

    def read(self, out: Tensor) -> int:
        """Fill `out` from its start; how much there was, which is less only at the end."""
        filled = 0
        while filled < len(out):
            if self._used == self._chunk.numel():
                following = next(self._chunks, None)
                if following is None:
                    break
                self._chunk, self._used = require_floats(following, self._side), 0
                self.wide |= self._chunk.dtype == torch.float64
            size = min(self._chunk.numel() - self._used, len(out) - filled)
            copy_flat(self._chunk, self._used, out[filled : filled + size])
            self._used += size
            filled += size
        self.taken += filled
        return filled

    def read_all(self) -> int:
        """Skip to the end; how many elements there were in all."""
        left = self._chunk.numel() - self._used
        left += sum(require_floats(chunk, self._side).numel() for chunk in self._chunks)
        self.taken += left
        return self.taken
