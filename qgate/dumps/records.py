"""What a dump says of one tensor: where in the model and when in the run it was, and what it is.

A record stands for a tensor with its values, or for exact counts of them, or for neither. It is one
line of an index, so all of it is plain data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qgate.errors import QgateError, unknown

Operation = Literal["forward", "backward"]
Phase = Literal["pre", "post"]
OPERATIONS: tuple[Operation, ...] = ("forward", "backward")
PHASES: tuple[Phase, ...] = ("pre", "post")
_MOST = 2**63


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Where values are: a key in a file of the dump, and the hash of their bytes.

    Dumps of version 1 have SHA-256, under that name, or the hash of version 2.
    """

    file: str
    key: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One tensor of a run.

    order        place in the order of execution, within its rank
    module       full name of the module; empty where it is not known
    layer_type   attention, linear, or what was asked for
    layer        index of the block, None where it is not known
    component    linear, FA (an attention function), or another kind of site
    name         query, key, value, context, input, weight, output, attention_weights, grad_input …
    quant_type   label given by whoever collected: hifp8, mxfp8, bf16 …
    call         how many times the module had been called before in the iteration
    shape, dtype of the tensor as it flowed; dtype without `torch.`
    stats        min, max, mean, std, amax and elements over finite values; shares of what a format
                 saturates and flushes, named `FORMAT.saturated_share`, `FORMAT.flushed_share`
    nonfinite    counts of nan, posinf, neginf: never left out
    sampled      share of the elements that the statistics are of, 1 for all of them
    tensor       where its values are; counts: where the exact counts of them are
    extra        whatever else the collector was told
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
        """Name the tensor for people, so that no other of its dump has the name:
        `L3 layers.3.attention forward query, rank 1, iteration 0, sample 2`."""
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data; fields that say nothing are left out."""
        made = {f.name: getattr(self, f.name) for f in _FIELDS if _says(self, f)}
        for name in ("tensor", "counts"):
            if name in made:
                made[name] = dataclasses.asdict(made[name])
        told: dict[str, Any] = plain(made)
        return {**told, "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Record:
        """The record of a line, believed field by field; unknown ones are of a newer version."""
        made = dict(given)
        for name in ("tensor", "counts"):
            if isinstance(place := made.get(name), dict) and "sha256" in place:
                made[name] = {"digest" if key == "sha256" else key: place[key] for key in place}
        for name, value in made.items():
            if name not in _GOOD:
                raise unknown("field of a dump record", name, _GOOD)
            if not _GOOD[name](value):
                raise QgateError(f"{name} of a record is {str(value)[:60]!r}.")
        for name in ("tensor", "counts"):
            if made.get(name) is not None:
                made[name] = StoredValues(**{**made[name], "file": sys.intern(made[name]["file"])})
        made["shape"] = _shape_of(tuple(made.get("shape", ())))
        if "nonfinite" in made:
            made["nonfinite"] = _counts_of(tuple(made["nonfinite"].items()))
        for name in _TEXTS & made.keys():
            made[name] = sys.intern(made[name])
        if "stats" in made:
            stats = made["stats"].items()
            made["stats"] = {sys.intern(name): float(value) for name, value in stats}
        try:
            return cls(**made)
        except TypeError:
            lacking = ", ".join(n for n in _REQUIRED if n not in made)
            raise QgateError(f"a record has no {lacking}.") from None


# Many records say the same: they share their texts, their shapes and what was not finite.


@functools.lru_cache(maxsize=4096)
def _shape_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return sizes


@functools.lru_cache(maxsize=4096)
def _counts_of(items: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return dict(items)


def plain(value: Any) -> Any:
    """As JSON has it: numbers that are not finite, and what is no plain data, become texts."""
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return plain(value.item())
    return str(value)[:200].removeprefix("torch.")


def _says(record: Record, of: dataclasses.Field[Any]) -> bool:
    value = getattr(record, of.name)
    if of.default is not dataclasses.MISSING:
        return bool(value != of.default)
    if of.default_factory is not dataclasses.MISSING:
        return bool(value)
    return True


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _whole_or_none(value: object) -> bool:
    return value is None or (type(value) is int and -_MOST < value < _MOST)


def _shape(value: object) -> bool:
    """What a tensor can have: as many elements as there are addresses."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(map(_whole, value))
        and math.prod(value) < _MOST
    )


def _text(value: object) -> bool:
    return isinstance(value, str)


def _number(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return -_MOST < value < _MOST
    return isinstance(value, float) or value in ("nan", "inf", "-inf")


def _place(value: object) -> bool:
    names = {f.name for f in dataclasses.fields(StoredValues)}
    return value is None or (
        isinstance(value, dict) and value.keys() == names and all(map(_text, value.values()))
    )


_FIELDS = dataclasses.fields(Record)
_REQUIRED = ("order", "layer_type", "operation", "phase", "component", "name")
_TEXTS = frozenset(
    ("layer_type", "operation", "phase", "component", "name", "module", "quant_type", "dtype")
)
_GOOD: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("order", "rank", "world_size", "call"), _whole),
    **dict.fromkeys(("layer", "iteration", "sample", "micro_batch"), _whole_or_none),
    **dict.fromkeys(_TEXTS, _text),
    **dict.fromkeys(("tensor", "counts"), _place),
    "shape": _shape,
    "stats": lambda value: isinstance(value, dict) and all(map(_number, value.values())),
    "nonfinite": lambda value: isinstance(value, dict) and all(map(_whole, value.values())),
    "sampled": _number,
    "extra": lambda value: isinstance(value, dict),
}
