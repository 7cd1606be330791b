"""The facts of a metric, and the table of all metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from qgate.errors import unknown
from qgate.registry import Registry

Direction = Literal["lower", "higher", "steady", "equal"]
Logarithm = Literal["", "decibel", "log2"]
Source = Literal[
    "errors",
    "gate",
    "task",
    "long_text",
    "metric",
    "plan",
    "conformance",
    "format",
    "dump",
    "activations",
    "checkpoint",
    "experts",
    "engines",
]


class ErrorSumsLike(Protocol):
    """The error sums that a formula reads, see `qgate.stats.ErrorSums`."""

    @property
    def count(self) -> int: ...
    @property
    def m2_actual(self) -> float: ...
    @property
    def m2_reference(self) -> float: ...
    @property
    def co(self) -> float: ...
    @property
    def sum_square_actual(self) -> float: ...
    @property
    def sum_square_reference(self) -> float: ...
    @property
    def dot(self) -> float: ...
    @property
    def sum_square_error(self) -> float: ...
    @property
    def sum_abs_error(self) -> float: ...
    @property
    def sum_error(self) -> float: ...
    @property
    def max_abs_error(self) -> float: ...
    @property
    def sum_abs_reference(self) -> float: ...
    @property
    def max_abs_reference(self) -> float: ...
    @property
    def scale_reference(self) -> float: ...
    @property
    def scale_error(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number, with all facts that code needs to compare and show it.

    label, column   its name in a sentence, and in the narrow head of a table
    unit            "dB", "%" and so on; empty where it has none or that of the data
    direction       which way is better; `steady` is better where it was, `equal` is not compared by
                    size at all
    definition      the formula in words or signs
    sources         what is measured; "errors" are read from error sums by `formula`
    exact           the value where there is no error
    degree          how it grows with the data: by 2^degree where all numbers double
    bounded         1 is perfect, and the distance to 1 counts
    logarithm       a difference of it is a factor: of sizes (log2), of energies (decibel)
    signed          better the nearer it is to zero: a limit is about its magnitude
    relative        an error relative to its reference: float noise has a floor, and one that
                    vanished says that nothing differs any more
    counted         a share that counts elements
    textual         a text, which is only compared for equality
    bands           where it is excellent, good and fair
    complement_of   the metric that this one is 1 less
    part, base      which part of a tensor it is about, and the metric of the whole
    tolerance       share that it may move by, whatever the limit of regressions is; 0: that limit
    room            how many times the usual tolerance other arithmetic may take
    task            a figure of a model's own task: `task_margin` holds it, on both sides
    """

    name: str
    label: str
    direction: Direction
    definition: str
    sources: tuple[Source, ...] = ("errors",)
    column: str = ""
    unit: str = ""
    formula: Callable[[ErrorSumsLike], float] | None = None
    exact: float = 0.0
    degree: int = 0
    bounded: bool = False
    logarithm: Logarithm = ""
    signed: bool = False
    relative: bool = False
    counted: bool = False
    textual: bool = False
    bands: tuple[float, ...] = ()
    complement_of: str = ""
    part: str = ""
    base: str = ""
    tolerance: float = 0.0
    room: float = 1.0
    task: bool = False

    @property
    def short(self) -> str:
        """Its name where there is little room: `MSE`, `correlation`."""
        return self.column or self.label

    @property
    def head(self) -> str:
        """The head of a column: `SQNR dB`, `rel. MSE`."""
        return f"{self.short} {self.unit}".rstrip()

    def function(self, sums: ErrorSumsLike) -> float:
        """Compute it from error sums; NaN for no pairs."""
        if self.formula is None or not sums.count:
            return math.nan
        return self.exact if sums.max_abs_error == 0 else self.formula(sums)

    def factor(self, difference: float) -> float:
        """Convert a difference of logarithms to a factor of sizes or energies."""
        if self.logarithm == "log2":
            return float(2.0 ** min(max(difference, -999.0), 999.0))
        return float(10.0 ** min(max(difference / 10, -300.0), 300.0))

    def ratio(self, old: float, new: float) -> float | None:
        """Return new over old; of logarithms the factor that they differ by.

        Values below zero have no ratio, nor has anything to zero.
        """
        if self.logarithm:
            return self.factor(new - old)
        return new / old if old > 0 and new >= 0 else None

    def slack(self, tolerance: float, value: float) -> float:
        """Return how much a share is of a value: of what a logarithm is of, where it is steady."""
        if self.logarithm == "log2":
            return math.log2(1 + tolerance)
        if self.logarithm and self.direction == "steady":
            return 10 * math.log10(1 + tolerance)
        return tolerance * abs(value)

    def text(self, value: float, digits: int = 6) -> str:
        """Write a value: fixed digits for decibels, percent and what is bounded, else powers."""
        if math.isnan(value):
            return "undefined"
        if self.logarithm == "decibel":
            return "exact" if value == math.inf else f"{value:.2f} {self.unit}"
        if self.unit == "%":
            return f"{value:.2f}%"
        return f"{value:.{digits}{'f' if self.bounded else 'e'}} {self.unit}".rstrip()

    def cell(self, value: float) -> str:
        """Write a value for a table of numbers under `head`, which has the unit."""
        if not math.isfinite(value):
            return str(value)
        if self.logarithm == "decibel":
            return f"{value:.3f}"
        if self.unit == "%":
            return f"{value:.4f}"
        return f"{value:.8f}" if self.bounded else f"{value:.{6 if self.degree else 4}e}"

    def to_dict(self) -> dict[str, object]:
        """Return the fields that records of a run keep."""
        names = ("name", "label", "unit", "direction", "definition", "degree", "bounded",
                 "logarithm", "signed")  # fmt: skip
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor that metrics can be about; `room` as in `Metric`."""

    name: str
    words: str
    room: float = 1.0


# Of the worst channel 0.11 was seen to come and go, of whole tensors 0.02.
PARTS = (
    TensorPart("worst_channel", "of the worst channel", room=5.0),
    TensorPart("worst_token", "of the worst token", room=5.0),
    TensorPart("worst_sample", "of the worst sample", room=5.0),
    TensorPart("without_massive", "without massive elements"),
)


_SAMPLE = re.compile(r"sample_[0-9]{1,9}", re.ASCII)


def sample_part(number: int) -> str:
    """Return the part of a metric that is about one sample of the evaluation, counted from 0."""
    return f"sample_{number}"


def sample_number(part: str) -> int | None:
    """Return the sample that a part of a metric is about; None for another part."""
    return int(part.removeprefix("sample_")) if _SAMPLE.fullmatch(part) else None


class MetricTable(Registry[Metric]):
    """All metrics by name, with those of the parts of a tensor, which follow from the whole."""

    def __init__(self) -> None:
        super().__init__("metric")
        self._parts: dict[str, Metric] = {}

    def add(self, entry: Metric, *aliases: str) -> Metric:
        super().add(entry, *aliases)
        for part in PARTS:
            of_part = replace(
                entry,
                name=f"{entry.name}@{part.name}",
                label=f"{entry.label} {part.words}",
                column="",
                sources=(),
                formula=None,
                part=part.name,
                base=entry.name,
                room=part.room,
            )
            self._parts[of_part.name] = of_part
        return entry

    def remove(self, name: str) -> None:
        """Take back a metric that was added."""
        super().remove(name)
        self._parts = {key: part for key, part in self._parts.items() if part.base != name}

    def find(self, name: str) -> Metric:
        """Return a metric of the whole or of a part by its exact name, else a plain one."""
        metric = self.entries.get(name) or self._parts.get(name) or self._of_sample(name)
        return metric or Metric(name=name, label=name, direction="lower", definition="", sources=())

    def get(self, name: str) -> Metric:
        """Return a metric of the whole or of a part; an unknown name is an error with near ones."""
        if entry := self.entries.get(name) or self._parts.get(name) or self._of_sample(name):
            return entry
        whole, at, part = name.partition("@")
        if at and whole in self.entries:
            raise unknown("part of a tensor", part, [entry.name for entry in PARTS])
        raise unknown(self.noun, name, self.entries)

    def _of_sample(self, name: str) -> Metric | None:
        """Return a metric of one sample, of which there are as many as the evaluation has."""
        whole, _, part = name.partition("@")
        number = sample_number(part)
        if whole not in self.entries or number is None:
            return None
        entry = self.entries[whole]
        label = f"{entry.label} of sample {number}"
        return replace(
            entry,
            name=name,
            label=label,
            column="",
            sources=(),
            formula=None,
            part=part,
            base=whole,
        )

    def of(self, source: Source) -> list[Metric]:
        """List the metrics of one source, in the order they were added."""
        return [metric for metric in self if source in metric.sources]

    def parts_of(self, name: str) -> list[Metric]:
        """List the metrics of the parts of a tensor that belong to one of the whole."""
        return [metric for metric in self._parts.values() if metric.base == name]


METRICS = MetricTable()
