"""The sites of a dump, and their values: all records of a site as one tensor.

Ranks, iterations, samples and calls are parts of the same thing, so their exact counts are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from qgate import formats
from qgate.dumps import Dump, Record
from qgate.errors import QgateError
from qgate.formats.losses import Losses, losses_of_values
from qgate.gate.measuring.pictures import magnitude_picture
from qgate.gate.subjects import OUTSIDE, layer_order
from qgate.results.pictures import MagnitudePicture
from qgate.stats import Counts, counts
from qgate.stats.bits import BY_NAME, COUNTABLE, DIRECT, slabs
from qgate.stats.summary import Floats, Ints, Summary, distinct

_ROOM = 2**24


@dataclass(frozen=True)
class DumpSite:
    """Module and direction in a model, with all records that were collected there."""

    name: str
    layer: str
    scope: str
    order: int
    records: tuple[Record, ...]

    @property
    def has_values(self) -> bool:
        return all(record.tensor is not None for record in self.records)


@dataclass
class Sites:
    """Sites of a dump in the order of execution; `left_out` counts records by why."""

    sites: list[DumpSite]
    left_out: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, dump: Dump) -> Sites:
        by_site: dict[str, list[Record]] = {}
        left_out: Counter[str] = Counter()
        for record in _unique_records(dump):
            if why := _unusable(record):
                left_out[why] += 1
            else:
                by_site.setdefault(site_name(record), []).append(record)
        return cls(
            [
                DumpSite(name, layer_name(of[0].layer), of[0].operation, order, tuple(of))
                for order, (name, of) in enumerate(by_site.items())
            ],
            left_out,
        )

    def in_layer(self, layer: str) -> list[DumpSite]:
        return [site for site in self.sites if site.layer == layer]

    @cached_property
    def layers(self) -> list[str]:
        return sorted({site.layer for site in self.sites}, key=layer_order)


def _unique_records(dump: Dump) -> Iterator[Record]:
    """Yield all records; one that comes twice would count its tensor twice."""
    before: set[tuple[int, int]] = set()
    for record in dump.records():
        position = (record.rank, record.order)
        if position in before:
            raise QgateError(
                f"{str(dump.folder)!r} has {record.title} twice (record {record.order} of rank "
                f"{record.rank}): its tensors would be counted twice. `qgate dumps verify` looks "
                "at all of it."
            )
        before.add(position)
        yield record


def _unusable(record: Record) -> str:
    if record.tensor is None and record.counts is None:
        return "have neither values nor counts"
    if record.dtype not in BY_NAME and "counted_as" not in record.extra:
        return f"are of {record.dtype or 'no dtype'}"
    return ""


def site_name(record: Record) -> str:
    """Return `layers.0.self_attn.q_proj:forward.input`; without a module, layer and type."""
    where = record.module
    if not where:
        layer = "" if record.layer is None else f"layers.{record.layer}."
        where = f"{layer}{record.layer_type}"
    return f"{where}:{record.operation}.{record.name}"


def layer_name(layer: int | None) -> str:
    return OUTSIDE if layer is None else f"layers.{layer}"


def layer_in_name(site: str) -> str:
    """Return the layer in a site's name: its first number, as for the collector."""
    numbers = [part for part in site.partition(":")[0].split(".") if part.isdecimal()]
    return layer_name(int(numbers[0]) if numbers else None)


# The values of a site ---------------------------------------------------------------------------


@dataclass(eq=False)
class SitePool(Summary):
    """Counts of each value at a site, over all its records.

    nonfinite   elements that are not finite in the tensors as they flowed
    first_bad   the first record that has some
    rounded     some tensors were wider than 16 bits, and were rounded to bf16 to be counted
    share       of all elements that were counted, less than 1 if the collector took a share
    """

    values: Floats
    weights: Ints
    nan: int
    posinf: int
    neginf: int
    nonfinite: int = 0
    first_bad: str = ""
    rounded: bool = False
    share: float = 1.0
    largest: float = 0.0

    @property
    def n(self) -> int:  # type: ignore[override]
        return int(self.weights.sum()) + self.nan + self.posinf + self.neginf

    def weighted(self) -> tuple[Floats, Ints]:
        return self.values, self.weights

    @property
    def amax(self) -> float:
        """Return the largest finite magnitude, even if only a share was counted."""
        return max(super().amax, self.largest) if len(self.values) else self.largest


def pool(dump: Dump, records: Sequence[Record]) -> SitePool:
    """Add up the counts of records."""
    by_dtype: dict[str, Counts] = {}
    nonfinite, first_bad, rounded, elements, largest = 0, "", False, 0, 0.0
    for record in records:
        counted, bad = _counted(dump, record)
        by_dtype.setdefault(counted.dtype, Counts(counted.dtype)).add(counted)
        elements += record.elements
        nonfinite += bad
        first_bad = first_bad or (record.title if bad else "")
        rounded |= BY_NAME.get(record.dtype) in DIRECT
        largest = max(largest, record.stats.get("amax", 0.0) if record.sampled < 1 else 0.0)
    parts = list(by_dtype.values())
    values, weights = zip(*(part.weighted() for part in parts), strict=True)
    return SitePool(
        *distinct(np.concatenate(values), np.concatenate(weights)),
        nan=sum(part.nan for part in parts),
        posinf=sum(part.posinf for part in parts),
        neginf=sum(part.neginf for part in parts),
        nonfinite=nonfinite,
        first_bad=first_bad,
        rounded=rounded,
        share=sum(part.n for part in parts) / elements if elements else 1.0,
        largest=largest,
    )


def _counted(dump: Dump, record: Record) -> tuple[Counts, int]:
    """Count the patterns of a record's tensor, and the elements that are not finite."""
    if record.counts is not None and (record.sampled == 1 or record.tensor is None):
        stored = dump.counts(record)
        dtype = str(record.extra.get("counted_as", record.dtype))
        of_stored = Counts.of_patterns(dtype, stored["patterns"], stored["counts"])
        _check_whole(record, of_stored.n)
        return of_stored, sum(record.nonfinite.values())
    tensor = dump.tensor(record)
    of_tensor = counts(tensor, via="bf16" if tensor.dtype in DIRECT else None)
    assert isinstance(of_tensor, Counts)
    _check_whole(record, of_tensor.n)
    odd = of_tensor.n - of_tensor.finite
    if tensor.dtype in DIRECT:
        odd = sum(int((~part.isfinite()).sum()) for part in slabs(tensor, _ROOM))
    return of_tensor, odd


def pool_picture(pooled: SitePool, fmt: str = "", losses: Losses | None = None) -> MagnitudePicture:
    """Draw where the values of a site lie, and how many of them a format loses."""
    losses = losses or Losses()
    return magnitude_picture(
        *pooled.weighted(),
        fmt=fmt,
        nonfinite=pooled.nan + pooled.posinf + pooled.neginf,
        saturated=round(losses.saturated_share * pooled.finite),
        flushed=round(losses.flushed_share * pooled.finite),
    )


def _check_whole(record: Record, counted: int) -> None:
    if record.sampled == 1 and counted != record.elements:
        raise QgateError(
            f"the counts of {record.title} are of {counted} elements, and it has "
            f"{record.elements}: the dump is damaged."
        )


# Losses of a format -----------------------------------------------------------------------------


def needs_values(fmt: str) -> bool:
    """Tell if counts are not enough for a format: its scales are those of blocks or tensors."""
    return formats.get(fmt).always_scaled


def losses_of_pool(pooled: SitePool, fmt: str) -> Losses:
    """Count the losses of a plain cast, from how often each value occurs."""
    element = formats.get(fmt)
    assert element.kind == "element"
    values, weights = pooled.weighted()
    values = np.concatenate([values, [np.nan, np.inf, -np.inf]])
    weights = np.concatenate([weights, [pooled.nan, pooled.posinf, pooled.neginf]])
    losses = losses_of_values(element, values, weights)
    # Counting rounds 32-bit tensors to bf16, and so makes Inf of their very largest.
    own = min(losses.inf, max(pooled.nonfinite - losses.nan, 0))
    posinf = min(losses.posinf, own)
    return losses.before_rounding(posinf, own - posinf)


def losses_of_tensors(dump: Dump, records: Sequence[Record], fmt: str) -> Losses:
    """Count the losses of a format with scales of its own, tensor by tensor."""
    losses = Losses()
    for record in records:
        for part in _parts(dump.tensor(record), fmt):
            losses += formats.report(part, fmt)
    return losses


def _parts(tensor: Tensor, fmt: str) -> Iterator[Tensor]:
    """Yield parts with whole blocks; a format with a scale of the tensor needs it all at once."""
    if tensor.dtype in COUNTABLE and tensor.dtype.itemsize == 1:
        tensor = tensor.bfloat16()
    of = formats.get(fmt)
    if of.kind == "block" and not of.needs_amax:
        yield from slabs(tensor, _ROOM, of.block)
    elif tensor.numel():
        yield tensor
