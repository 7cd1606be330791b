"""One portion of two tensors as float64, small enough for the cache, and its sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.stats._sums import ErrorSums, scale_for
from qgate.stats.bits import slabs
from qgate.stats.summary import Floats
from qgate.tensor_inputs import plain_tensor

_FROM_DEVICE = 2**22
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def require_floats(x: object, side: str) -> Tensor:
    """Return the tensor without its graph; raise TypeError for anything but floats."""
    return plain_tensor(x, "compare", DTYPES, f"{side}: ").detach()


def copy_flat(x: Tensor, start: int, out: Tensor) -> None:
    """Copy x.flatten()[start:start + len(out)], without the copy that flatten may make."""
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
    """Copy tensors of a device in large parts, because each copy waits."""
    for chunk in chunks:
        if isinstance(chunk, Tensor) and chunk.device.type not in ("cpu", "meta"):
            yield from (slab.detach().cpu() for slab in slabs(chunk, _FROM_DEVICE))
        else:
            yield chunk


class Reader:
    """A tensor, or chunks of any sizes one after the other, read in portions."""

    def __init__(self, source: Tensor | Iterable[Tensor], side: str) -> None:
        if not isinstance(source, Iterable) or hasattr(source, "__array__"):
            source = require_floats(source, side)
        self._side = side
        chunks = (source,) if isinstance(source, Tensor) else source
        self._chunks: Iterator[Tensor] = _on_host(chunks)
        self._chunk = torch.empty(0, device="cpu")
        self._used = 0
        self.elements_read = 0
        self.wide = False
        """True after a float64 tensor was read: only its squares can leave float64's range."""

    def read(self, out: Tensor) -> int:
        """Fill `out` from its start and return how much was read, less only at the end."""
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
        self.elements_read += filled
        return filled

    def read_all(self) -> int:
        """Skip to the end and return the number of elements in all."""
        remaining = self._chunk.numel() - self._used
        remaining += sum(require_floats(chunk, self._side).numel() for chunk in self._chunks)
        self.elements_read += remaining
        return self.elements_read


ROW = 1024
ROWS = 31
ELEMENTS = ROW * ROWS
NOISE = 2.0**-46  # relative: the most that rounding leaves of a constant's deviations


class Portion:
    """The buffers, used again for each portion; `sums` overwrites them.

    Pairs that are not finite are set aside: 0 on both sides, and marked in `bad`.
    """

    def __init__(self) -> None:
        self._buffers = [torch.empty(ELEMENTS, dtype=torch.float64, device="cpu") for _ in range(5)]
        self._ones = np.ones((ROW, 1))
        self._negative = np.empty(ELEMENTS, np.bool_)
        self.a = self.r = self.error = self.size = self.scratch = np.empty(0)
        self.count = 0
        self.largest_error = 0.0
        self.wide = False
        self.bad: npt.NDArray[np.bool_] | None = None

    def fill(self, actual: Reader, reference: Reader) -> bool:
        """Read the next portion; False at the end, or where one side has fewer values."""
        self.count = actual.read(self._buffers[0])
        if reference.read(self._buffers[1]) != self.count or not self.count:
            return False
        rows = -(-self.count // ROW)
        views = (buffer[: rows * ROW].numpy() for buffer in self._buffers)
        self.a, self.r, self.error, self.size, self.scratch = views
        self.a[self.count :] = self.r[self.count :] = 0
        self.wide = actual.wide or reference.wide
        self.bad = None
        self._subtract()
        return True

    @property
    def finite(self) -> bool:
        """True if all errors are finite, so that no pair is set aside."""
        return self.largest_error < math.inf

    def set_aside(self, bad: npt.NDArray[np.bool_]) -> None:
        self.bad = bad
        self.a[bad] = self.r[bad] = 0
        self._subtract()

    @property
    def pairs(self) -> int:
        return self.count - (0 if self.bad is None else int(self.bad.sum()))

    @property
    def unpaired(self) -> int:
        """The number of elements of the buffers without a pair."""
        return len(self.a) - self.pairs

    def sign_flips(self) -> int:
        if self.wide:  # where a product of two numbers may be too small for a sign
            np.multiply(np.sign(self.a), np.sign(self.r), out=self.scratch)
        else:
            np.multiply(self.a, self.r, out=self.scratch)
        return int(np.count_nonzero(np.less(self.scratch, 0, out=self._negative[: len(self.a)])))

    def sums(self) -> ErrorSums:
        """Return the sums of the portion; the buffers are overwritten."""
        n, unit = self.pairs, 1.0
        if not n:
            return ErrorSums()
        scale_a = scale_r = scale_error = 1.0
        if self.wide:
            unit = self._shrink()
            scale_a, scale_r, scale_error = map(self._scale, (self.a, self.r, self.error))
            np.abs(self.error, out=self.size)
            self.largest_error = float(self.size.max())
        np.abs(self.r, out=self.scratch)
        largest_reference = float(self.scratch.max())
        abs_error, error, squares, abs_reference, sum_a, sum_r = self._dots(
            (self.size, None),
            (self.error, None),
            (self.error, self.error),
            (self.scratch, None),
            (self.a, None),
            (self.r, None),
        )
        mean_a, mean_r = sum_a / n, sum_r / n
        self._center(self.a, mean_a)
        self._center(self.r, mean_r)
        rest_a, rest_r, m2_a, m2_r, co = self._dots(
            (self.a, None),
            (self.r, None),
            (self.a, self.a),
            (self.r, self.r),
            (self.a, self.r),
        )
        if m2_a <= n * (NOISE * mean_a) ** 2 and self._constant(self.a):
            mean_a += float(self.a[self._pair_mask][0])
            rest_a = m2_a = co = 0.0
        if m2_r <= n * (NOISE * mean_r) ** 2 and self._constant(self.r):
            mean_r += float(self.r[self._pair_mask][0])
            rest_r = m2_r = co = 0.0
        return ErrorSums(
            n,
            mean_a,
            mean_r,
            m2_a,
            m2_r,
            co,
            m2_a + n * mean_a * mean_a,
            m2_r + n * mean_r * mean_r,
            co + n * mean_a * mean_r,
            squares,
            abs_error,
            error,
            self.largest_error,
            abs_reference,
            largest_reference,
            scale_a,
            scale_r,
            scale_error * unit,
            rest_a / n,
            rest_r / n,
        )

    @np.errstate(over="ignore", invalid="ignore")
    def _subtract(self) -> None:
        np.subtract(self.a, self.r, out=self.error)
        np.abs(self.error, out=self.size)
        self.largest_error = float(self.size.max())

    def _dots(self, *pairs: tuple[Floats, Floats | None]) -> list[float]:
        """Sum products, or values: row by row, then over the rows."""
        rows = len(self.a) // ROW
        partial = np.empty((len(pairs), rows, 1, 1))
        for (x, y), out in zip(pairs, partial, strict=True):
            column = self._ones if y is None else y.reshape(rows, ROW, 1)
            np.matmul(x.reshape(rows, 1, ROW), column, out=out)
        totals: list[float] = partial.sum(axis=(1, 2, 3)).tolist()
        return totals

    def _center(self, x: Floats, mean: float) -> None:
        np.subtract(x, mean, out=x)
        x[self.count :] = 0
        if self.bad is not None:
            x[self.bad] = 0

    @property
    def _pair_mask(self) -> npt.NDArray[np.bool_]:
        mask = np.arange(len(self.a)) < self.count
        return mask if self.bad is None else mask & ~self.bad

    def _constant(self, x: Floats) -> bool:
        values = x[self._pair_mask]
        return bool(values.min() == values.max())

    def _shrink(self) -> float:
        """Quarter the differences where one is too large for float64; return the unit, 4 or 1."""
        if self.finite:
            return 1.0
        np.subtract(self.a / 4, self.r / 4, out=self.error)
        return 4.0

    @staticmethod
    def _scale(x: Floats) -> float:
        """Divide by the power of two that makes squares safe, and return it."""
        scale = scale_for(float(np.abs(x).max()))
        if scale != 1:
            np.multiply(x, 1 / scale, out=x)
        return scale
