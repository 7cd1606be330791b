"""One portion of two tensors as float64, small enough for the cache, and its sums.

Portions have a fixed size whatever the chunks they come in, and are summed by rows of fixed length,
so a result has the same bits for any chunking and any number of threads. The size is below the one
from which torch, or a BLAS for a row, shares an operation among threads: on a busy machine the
barrier after each small operation costs a hundred times the operation.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from qgate.stats._reading import Reader
from qgate.stats._sums import ErrorSums, Floats, scale_for

ROW = 1024
ROWS = 31
ELEMENTS = ROW * ROWS
NOISE = 2.0**-46  # relative: what rounding may leave of a constant's deviations from its mean


class Portion:
    """The buffers, used again for each portion; `sums` is the last that may be asked of one.

    Pairs that are not finite are set aside: 0 on both sides, and marked in `bad`.
    """

    def __init__(self) -> None:
        self._buffers = [torch.empty(ELEMENTS, dtype=torch.float64, device="cpu") for _ in range(5)]
        self._ones = np.ones((ROW, 1))
        self._negative = np.empty(ELEMENTS, np.bool_)
        self.a = self.r = self.error = self.size = self.spare = np.empty(0)
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
        self.a, self.r, self.error, self.size, self.spare = views
        self.a[self.count :] = self.r[self.count :] = 0
        self.wide = actual.wide or reference.wide
        self.bad = None
        self._subtract()
        return True

    @property
    def finite(self) -> bool:
        """Whether all errors are, so that nothing needs to be set aside."""
        return self.largest_error < math.inf

    def set_aside(self, bad: npt.NDArray[np.bool_]) -> None:
        self.bad = bad
        self.a[bad] = self.r[bad] = 0
        self._subtract()

    @property
    def pairs(self) -> int:
        return self.count - (0 if self.bad is None else int(self.bad.sum()))

    @property
    def holes(self) -> int:
        """Elements of the buffers that stand for no pair."""
        return len(self.a) - self.pairs

    def sign_flips(self) -> int:
        if self.wide:  # where a product of two numbers may be too small for a sign
            np.multiply(np.sign(self.a), np.sign(self.r), out=self.spare)
        else:
            np.multiply(self.a, self.r, out=self.spare)
        return int(np.count_nonzero(np.less(self.spare, 0, out=self._negative[: len(self.a)])))

    def sums(self) -> ErrorSums:
        """Overwrites the buffers."""
        n, unit = self.pairs, 1.0
        if not n:
            return ErrorSums()
        scale_a = scale_r = scale_error = 1.0
        if self.wide:
            unit = self._shrink()
            scale_a, scale_r, scale_error = map(self._scale, (self.a, self.r, self.error))
            np.abs(self.error, out=self.size)
            self.largest_error = float(self.size.max())
        np.abs(self.r, out=self.spare)
        largest_reference = float(self.spare.max())
        abs_error, error, squares, abs_reference, sum_a, sum_r = self._dots(
            (self.size, None),
            (self.error, None),
            (self.error, self.error),
            (self.spare, None),
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
            mean_a += float(self.a[self._kept][0])
            rest_a = m2_a = co = 0.0
        if m2_r <= n * (NOISE * mean_r) ** 2 and self._constant(self.r):
            mean_r += float(self.r[self._kept][0])
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
        """Sums of products, or of values: row by row, then over the rows."""
        rows = len(self.a) // ROW
        partial = np.empty((len(pairs), rows, 1, 1))
        for (x, y), out in zip(pairs, partial, strict=True):
            column = self._ones if y is None else y.reshape(rows, ROW, 1)
            np.matmul(x.reshape(rows, 1, ROW), column, out=out)
        found: list[float] = partial.sum(axis=(1, 2, 3)).tolist()
        return found

    def _center(self, x: Floats, mean: float) -> None:
        np.subtract(x, mean, out=x)
        x[self.count :] = 0
        if self.bad is not None:
            x[self.bad] = 0

    @property
    def _kept(self) -> npt.NDArray[np.bool_]:
        kept = np.arange(len(self.a)) < self.count
        return kept if self.bad is None else kept & ~self.bad

    def _constant(self, x: Floats) -> bool:
        kept = x[self._kept]
        return bool(kept.min() == kept.max())

    def _shrink(self) -> float:
        """A quarter of the differences where one is too large for float64; and 4 or 1 to say so."""
        if self.finite:
            return 1.0
        np.subtract(self.a / 4, self.r / 4, out=self.error)
        return 4.0

    @staticmethod
    def _scale(x: Floats) -> float:
        """Divide by the power of two that makes squares safe."""
        scale = scale_for(float(np.abs(x).max()))
        if scale != 1:
            np.multiply(x, 1 / scale, out=x)
        return scale
