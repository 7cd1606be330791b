"""The errors of a tensor against its reference, from one pass; results merge."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from qgate.charts.overviews import Overview, Overviewed
from qgate.errors import QgateError
from qgate.kernels import proving
from qgate.loading import LateModule
from qgate.metrics import METRICS
from qgate.stats._axis_errors import AxisCollector, AxisErrors
from qgate.stats._error_pass import RELATIVE_ERROR, DifferenceCounts, Element, ErrorPass, NonFinite
from qgate.stats._portion import Reader, require_floats
from qgate.stats._sums import ErrorSums
from qgate.tensor_inputs import usual_arithmetic
from qgate.text import counted, decibels

if TYPE_CHECKING:
    from qgate.charts import figure as figure
    from qgate.charts import palette as palette
    from qgate.charts import sheet as charts_sheet
    from qgate.charts.sheet import Sheet
    from qgate.stats import _device_pass as _device_pass
else:
    figure = LateModule("qgate.charts.figure")
    palette = LateModule("qgate.charts.palette")
    charts_sheet = LateModule("qgate.charts.sheet")
    _device_pass = LateModule("qgate.stats._device_pass")


__all__ = ["AxisErrors", "Element", "ErrorStats", "NonFinite", "errors"]

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, eq=False, repr=False)
class ErrorStats(Overviewed):
    """The result of `errors`; `a + b` is its result for both together.

    Neither the counts nor the sums of a + b depend on which side comes first, not in the last bit.
    Sums that are merged in another grouping agree to a few 1e-16 of the sums of magnitudes.
    """

    elements: int
    """The number of pairs, finite or not."""
    sums: ErrorSums
    """The sums over the pairs that are finite on both sides."""
    actual_non_finite: NonFinite
    reference_non_finite: NonFinite
    mismatched: int
    """The number of pairs with a NaN or an infinity on one side that the other has not."""
    sign_flips: int
    """The number of pairs of which one is negative and the other positive."""
    differences: DifferenceCounts
    worst: tuple[Element, ...]
    """The finite pairs that differ most, the worst first and equals by `flat`."""
    worst_room: int
    first_non_finite: Element | None
    channels: AxisErrors | None = None
    tokens: AxisErrors | None = None

    percentile_error: ClassVar[float] = RELATIVE_ERROR
    """The largest relative error of a percentile: it is read from counts in bins 2^-7 wide."""

    @property
    def finite(self) -> bool:
        """True if neither side has a NaN or an infinity."""
        return self.elements == self.sums.count

    def metric(self, name: str, *, finite_only: bool = False) -> float:
        """Return one of `METRICS`; NaN, which passes no limit, if a value was not finite.

        Equal infinities at one place are no agreement either: nothing bounds their error.
        `finite_only` leaves out the pairs that are not finite.
        """
        value = METRICS.get(name).function(self.sums)
        return value if self.finite or finite_only else math.nan

    def metrics(self, *, finite_only: bool = False) -> dict[str, float]:
        return {
            metric.name: self.metric(metric.name, finite_only=finite_only)
            for metric in METRICS.of("errors")
        }

    def percentile(self, q: float, *, finite_only: bool = False) -> float:
        """Return a percentile of |actual - reference|, to a relative error `percentile_error`.

        It is the smallest difference that at least q percent of the pairs do not exceed (numpy's
        "inverted_cdf"); zero and the maximum are exact. NaN as for `metric`.
        """
        largest = self.metric("max_abs", finite_only=True)
        value = self.differences.percentile(q, largest)
        return value if self.finite or finite_only else math.nan

    def percentiles(self, *, finite_only: bool = False) -> dict[str, float]:
        return {f"p{q}": self.percentile(q, finite_only=finite_only) for q in PERCENTILES}

    def overview(self) -> Overview:
        """Describe the errors: how many values there are, all metrics, and percentiles."""
        unfit = self.elements - self.sums.count
        title = f"Errors of {counted(self.elements, 'value')}"
        title += f", {unfit:,} of them not finite: no metric" if unfit else ""
        figures = [*self.metrics().items(), *self.percentiles().items()]
        names = ("figure", "value")
        return Overview(title, figures, lambda row: dict(zip(names, row, strict=True)), "figure")

    def _draw(self) -> Sheet | None:
        octaves = self.differences.octaves()
        if not octaves:
            return None
        title = f"SQNR {decibels(self.metric('sqnr_db', finite_only=True))}: differences by octave"
        picture = charts_sheet.sheet(7, 3.2, title)
        (axes,) = charts_sheet.panels(picture, 1, 1)
        axes.bar(list(octaves), list(octaves.values()), width=0.9, color=palette.BLUE)
        figure.dress(axes, x="log2 |actual - reference|", y="values", grid="y")
        return picture

    def __add__(self, other: ErrorStats) -> ErrorStats:
        if not isinstance(other, ErrorStats):
            return NotImplemented
        moved = [replace(pair, flat=pair.flat + self.elements) for pair in other.worst]
        room = min(self.worst_room, other.worst_room)
        first = self.first_non_finite
        if first is None and other.first_non_finite is not None:
            later = other.first_non_finite
            first = replace(later, flat=later.flat + self.elements)
        return ErrorStats(
            elements=self.elements + other.elements,
            sums=self.sums + other.sums,
            actual_non_finite=self.actual_non_finite + other.actual_non_finite,
            reference_non_finite=self.reference_non_finite + other.reference_non_finite,
            mismatched=self.mismatched + other.mismatched,
            sign_flips=self.sign_flips + other.sign_flips,
            differences=self.differences + other.differences,
            worst=tuple(sorted([*self.worst, *moved], key=lambda pair: pair.badness)[:room]),
            worst_room=room,
            first_non_finite=first,
            channels=_merged("channel_axis", self.channels, other.channels),
            tokens=_merged("token_axis", self.tokens, other.tokens),
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain data: numbers, lists and dictionaries of them."""
        views = {"channels": self.channels, "tokens": self.tokens}
        first = self.first_non_finite
        return {
            "elements": self.elements,
            "metrics": self.metrics(),
            "percentiles": self.percentiles(),
            "percentile_error": self.percentile_error,
            "sign_flips": self.sign_flips,
            "actual_non_finite": asdict(self.actual_non_finite),
            "reference_non_finite": asdict(self.reference_non_finite),
            "mismatched": self.mismatched,
            "first_non_finite": None if first is None else _plain(first),
            "worst": [_plain(element) for element in self.worst],
            "sums": asdict(self.sums),
        } | {name: view.to_dict() for name, view in views.items() if view is not None}

    def __str__(self) -> str:
        lines = [f"errors of {self.elements:,} elements"]
        for metric in METRICS.of("errors"):
            value = self.metric(metric.name)
            lines.append(f"  {metric.label:20} {value:>14.6g} {metric.unit}".rstrip())
        percentiles = "  ".join(f"{name} {value:.3g}" for name, value in self.percentiles().items())
        lines.append(f"  {'|difference|':20} {percentiles}")
        lines.append(f"  {'Sign flips':20} {self.sign_flips:>14,}")
        for side in ("actual", "reference"):
            odd: NonFinite = getattr(self, f"{side}_non_finite")
            if odd.total:
                kinds = f"{odd.nan} NaN, {odd.positive_infinity} +Inf, {odd.negative_infinity} -Inf"
                lines.append(f"  not finite, {side}: {kinds}")
        if self.first_non_finite:
            lines.append(f"  first at {self.first_non_finite}")
        lines += [f"  worst at {element}" for element in self.worst[:3]]
        return "\n".join(lines)


@usual_arithmetic()
def errors(
    actual: Tensor | Iterable[Tensor],
    reference: Tensor | Iterable[Tensor],
    *,
    channel_axis: int | None = None,
    token_axis: int | None = None,
    worst: int = 10,
) -> ErrorStats:
    """Compare two tensors of one shape, or two streams of chunks with as many elements in all.

    Both are read once, converted to float64 a portion at a time, and never written to; the result
    does not grow with them. Dtypes may differ: float64, float32, float16, bfloat16. Two tensors are
    on one device; chunks may be on any. `channel_axis` and `token_axis` add the errors per index of
    an axis and need tensors.
    """
    if worst < 0:
        raise QgateError(f"worst={worst}: the number of elements to keep is not negative.")
    if isinstance(actual, Tensor) != isinstance(reference, Tensor):
        kinds = f"{type(actual).__name__} and {type(reference).__name__}"
        raise TypeError(f"cannot compare {kinds}: give two tensors, or two iterables of chunks.")
    shape: tuple[int, ...] | None = None
    if isinstance(actual, Tensor) and isinstance(reference, Tensor):
        actual, reference = require_floats(actual, "actual"), require_floats(reference, "reference")
        shape = tuple(actual.shape)
        if actual.shape != reference.shape:
            raise QgateError(
                f"actual has shape {shape} and reference {tuple(reference.shape)}: "
                "they must be the same, nothing is broadcast."
            )
        if actual.device != reference.device:
            raise QgateError(
                f"actual is on {actual.device} and reference on {reference.device}: they must be "
                "on one device. Move one of them, as with reference.to(actual.device)."
            )
    views = {"channels": channel_axis, "tokens": token_axis}
    axes = {name: _collector(shape, axis) for name, axis in views.items() if axis is not None}
    read_actual, read_reference = Reader(actual, "actual"), Reader(reference, "reference")
    error_pass: ErrorPass | _device_pass.DevicePass
    if (
        isinstance(actual, Tensor)
        and isinstance(reference, Tensor)
        and not axes
        and (actual.device.type != "cpu" or proving.serves(actual.device))
        and _device_pass.serves(actual, reference)
    ):
        error_pass = _device_pass.DevicePass(worst)
        complete = error_pass.run(actual, reference)
    else:
        error_pass = ErrorPass(worst, list(axes.values()))
        complete = error_pass.run(read_actual, read_reference)
    if not complete:
        raise QgateError(
            f"actual has {read_actual.read_all()} elements in all its chunks and reference "
            f"{read_reference.read_all()}: they must be as many."
        )
    first = error_pass.first_non_finite
    return ErrorStats(
        elements=error_pass.elements,
        sums=error_pass.sums,
        actual_non_finite=error_pass.actual,
        reference_non_finite=error_pass.reference,
        mismatched=error_pass.mismatched,
        sign_flips=error_pass.sign_flips,
        differences=error_pass.differences,
        worst=tuple(element.located(shape) for element in error_pass.worst),
        worst_room=worst,
        first_non_finite=None if first is None else first.located(shape),
        **{name: collector.result() for name, collector in axes.items()},
    )


def _collector(shape: tuple[int, ...] | None, axis: int) -> AxisCollector:
    if shape is None:
        raise QgateError("errors per channel or token need tensors: chunks have no shape.")
    return AxisCollector(shape, axis)


def _merged(name: str, a: AxisErrors | None, b: AxisErrors | None) -> AxisErrors | None:
    if a is not None and b is not None:
        return a + b
    if a is not b:
        raise QgateError(f"only one side was made with {name}: give it to both, or to none.")
    return None


def _plain(element: Element) -> dict[str, object]:
    return asdict(element) | {"index": list(element.index)}
