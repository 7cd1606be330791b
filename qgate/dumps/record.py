"""Records of a dump: for each tensor its site in the model, its time in the run, and its figures.

A record stands for a tensor with its values, or for exact counts of them, or for neither. It is one
line of an index, so all of it is plain data.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from qgate.errors import QgateError, unknown
from qgate.records import Meta, validate
from qgate.records.plain_data import plain

Operation = Literal["forward", "backward"]
Phase = Literal["pre", "post"]
OPERATIONS: tuple[Operation, ...] = ("forward", "backward")
PHASES: tuple[Phase, ...] = ("pre", "post")
FIELDS = (
    "layer_type", "layer", "operation", "phase", "component", "module", "name", "quant_type",
    "rank", "iteration", "sample", "micro_batch", "call",
)  # fmt: skip
"""The fields that records are selected by."""
_MOST = 2**63
_Whole = Annotated[int, Meta(ge=0)]
_NotFinite = Literal["nan", "inf", "-inf"]


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Location of values: a key in a file of the dump, and the hash of their bytes."""

    file: str
    key: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Record of one tensor of a run.

    order        place in the order of execution, within its rank
    module       full name of the module; empty where it is not known
    layer_type   attention, linear, or what was asked for
    layer        index of the block, None where it is not known
    component    linear, FA (an attention function), or another kind of site
    name         query, key, value, context, input, weight, output, attention_weights, grad_input …
    quant_type   label given when collecting: hifp8, mxfp8, bf16 …
    call         number of earlier calls of the module in the iteration
    shape, dtype of the tensor as it flowed; dtype without `torch.`
    stats        min, max, mean, std, amax and elements over finite values; shares of what a format
                 saturates and flushes, named `FORMAT.saturated_share`, `FORMAT.flushed_share`
    nonfinite    counts of nan, posinf, neginf: never left out
    sampled      share of the elements that the statistics are of, 1 for all of them
    tensor       location of its values; counts: location of their exact counts
    extra        other settings of the collector
    """

    order: int
    layer_type: str
    operation: Operation
    phase: Phase
    component: str
    name: str
    module: str = ""
    layer: int | None = None
    quant_type: str = ""
    rank: int = 0
    world_size: int = 1
    iteration: int | None = None
    sample: int | None = None
    micro_batch: int | None = None
    call: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    sampled: float = 1.0
    tensor: StoredValues | None = None
    counts: StoredValues | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise unknown("operation of a record", self.operation, OPERATIONS)
        if self.phase not in PHASES:
            raise unknown("phase of a record", self.phase, PHASES)
        for name in ("order", "rank", "call"):
            if getattr(self, name) < 0:
                raise QgateError(f"{name} {getattr(self, name)} of a record is below 0.")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def title(self) -> str:
        """Name the tensor uniquely in its dump, for people.

        `L3 layers.3.attention forward query, rank 1, iteration 0, sample 2`
        """
        layer = "" if self.layer is None else f"L{self.layer} "
        parts = [f"{layer}{self.module or self.layer_type} {self.operation} {self.name}"]
        parts += [self.quant_type] if self.quant_type else []
        parts.append(f"rank {self.rank}")
        # Samples are micro-batches and calls are counted with them, unless somebody labels them.
        usual = self.sample or 0
        for word, number in (
            ("iteration", self.iteration),
            ("sample", self.sample),
            ("micro-batch", None if self.micro_batch == usual else self.micro_batch),
            ("call", None if self.call in (0, usual, self.micro_batch) else self.call),
        ):
            parts += [] if number is None else [f"{word} {number}"]
        return ", ".join(parts)

    def to_dict(self) -> dict[str, object]:
        """Return plain data; fields with their default are left out, but for the shape."""
        line = {name: getattr(self, name) for name in _REQUIRED}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default or name == "shape":
                line[name] = dataclasses.asdict(value) if name in _STORED else value
        return {name: plain(value) for name, value in line.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Record:
        """Read a line of an index, checked field by field; unknown fields are of a newer version.

        Records share equal texts, shapes and counts of values that are not finite.
        """
        line = dict(content)
        for name in line:
            if name not in _FIELDS:
                raise unknown("field of a dump record", name, _FIELDS)
        try:
            validate(line, _RecordLine)
        except ValueError as error:
            raise QgateError(f"a record cannot be used: {error}.") from None
        if math.prod(line.get("shape", ())) >= _MOST:
            raise QgateError("shape of a record has more elements than there are addresses.")
        for name in _STORED:
            if (stored := line.get(name)) is not None:
                file = sys.intern(stored["file"])
                line[name] = StoredValues(file, stored["key"], stored["digest"])
        for name in _TEXTS & line.keys():
            line[name] = sys.intern(line[name])
        if "shape" in line:
            line["shape"] = _shared_shape(tuple(line["shape"]))
        if "nonfinite" in line:
            line["nonfinite"] = _shared_counts(tuple(line["nonfinite"].items()))
        if "stats" in line:
            line["stats"] = {sys.intern(key): float(n) for key, n in line["stats"].items()}
        return cls(**line)


@functools.lru_cache(maxsize=4096)
def _shared_shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return sizes


@functools.lru_cache(maxsize=4096)
def _shared_counts(items: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return dict(items)


class _StoredLine(TypedDict):
    file: str
    key: str
    digest: str


class _RecordLine(TypedDict):
    """A line of an index: the fields of a Record as JSON has them."""

    order: _Whole
    layer_type: str
    operation: str
    phase: str
    component: str
    name: str
    module: NotRequired[str]
    layer: NotRequired[int | None]
    quant_type: NotRequired[str]
    rank: NotRequired[_Whole]
    world_size: NotRequired[_Whole]
    iteration: NotRequired[int | None]
    sample: NotRequired[int | None]
    micro_batch: NotRequired[int | None]
    call: NotRequired[_Whole]
    shape: NotRequired[Annotated[list[_Whole], Meta(max_length=64)]]
    dtype: NotRequired[str]
    stats: NotRequired[dict[str, float | _NotFinite]]
    nonfinite: NotRequired[dict[str, _Whole]]
    sampled: NotRequired[float | _NotFinite]
    tensor: NotRequired[_StoredLine | None]
    counts: NotRequired[_StoredLine | None]
    extra: NotRequired[dict[str, Any]]


_REQUIRED = ("order", "layer_type", "operation", "phase", "component", "name")
_STORED = ("tensor", "counts")
_FIELDS = tuple(field.name for field in dataclasses.fields(Record))
_DEFAULTS: dict[str, object] = {
    f.name: {} if f.default is dataclasses.MISSING else f.default
    for f in dataclasses.fields(Record)
    if f.name not in _REQUIRED
}
_TEXTS = frozenset(
    ("layer_type", "operation", "phase", "component", "name", "module", "quant_type", "dtype")
)


class GroupTotals(TypedDict):
    records: int
    bytes: int


class DumpTotals(TypedDict):
    """The totals of a dump, or of several as if they were one.

    header  the fields that the writer of the dump gave it
    states  how each rank ended; of several dumps they are named by the number of the dump, too
    by      totals by field and its value
    """

    folder: str
    qgate: str
    created: str
    world_size: int
    header: Mapping[str, object]
    records: int
    with_values: int
    with_counts: int
    with_nonfinite: int
    bytes: int
    stored_bytes: int
    states: Mapping[int | str, str]
    by: dict[str, dict[str, GroupTotals]]
    notes: list[str]


# Selecting -------------------------------------------------------------------------------------


class RecordSelection:
    """Allowed values of some fields of records, by `FIELDS`; texts may be patterns: `grad_*`.

    matching   records that `count` was given and that match
    """

    def __init__(self, fields: Mapping[str, object]) -> None:
        self.matching = 0
        self._fields = fields
        self._patterns: dict[str, tuple[object, ...]] = {}
        for name, value in fields.items():
            if name not in FIELDS:
                raise unknown("field to select by", name, FIELDS)
            if isinstance(value, Collection) and not isinstance(value, str):
                self._patterns[name] = tuple(value)
            elif value is not None:
                self._patterns[name] = (value,)
        self._values: dict[str, set[object]] = {name: set() for name in self._patterns}

    def allows(self, name: str, value: object) -> bool:
        """Tell whether a field may have a value; a field without patterns may have any."""
        patterns = self._patterns.get(name)
        return patterns is None or any(_matches(value, pattern) for pattern in patterns)

    def matches(self, record: Record) -> bool:
        return all(self.allows(name, getattr(record, name)) for name in self._patterns)

    def count(self, record: Record) -> bool:
        """Tell whether a record matches, and note its values for `check`."""
        for name, values in self._values.items():
            values.add(getattr(record, name))
        is_match = self.matches(record)
        self.matching += is_match
        return is_match

    def check(self, source: str) -> None:
        """Refuse a value that no counted record has, and a selection that none matches."""
        for name, patterns in self._patterns.items():
            for pattern in patterns:
                if not any(_matches(value, pattern) for value in self._values[name]):
                    field_name = f"{name.replace('_', ' ')} in this dump"
                    raise unknown(field_name, str(pattern), map(str, self._values[name]))
        if self._patterns and not self.matching:
            listed = ", ".join(f"{name} {value}" for name, value in self._fields.items())
            raise QgateError(f"no record of {source} has all of {listed}.")


def _matches(value: object, pattern: object) -> bool:
    if isinstance(value, str) and isinstance(pattern, str):
        return value == pattern or fnmatch.fnmatchcase(value, pattern)
    return value == pattern
