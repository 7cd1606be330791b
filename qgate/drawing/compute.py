"""Analyze dumps: read each tensor once and add up its figures."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from qgate import formats
from qgate.drawing.fitting import group_summary
from qgate.drawing.loss_scaling import loss_scale
from qgate.drawing.quant_types import compare_formats, compare_quant_types, compared_names
from qgate.drawing.rank_differences import ranks_of, sample_cells
from qgate.drawing.tensor_maps import by_channel, row_name, tensor_map
from qgate.drawing.tensor_pass import (
    Batch,
    BatchSummary,
    DrawingRequest,
    Group,
    MapCandidates,
    summarize_batch,
    values_of,
)
from qgate.dumps.choosing import ChosenRecords, all_totals, batches, choose, nbytes, open_cached
from qgate.engine import Failure, Workers, map_items
from qgate.errors import QgateError
from qgate.results.rows import StoredRows
from qgate.storage.locations import location_of
from qgate.summaries.outcomes import edges_of
from qgate.summaries.pool import Pool, Pooling
from qgate.summaries.record import (
    ANALYSIS,
    DumpAnalysis,
    GroupSummary,
    LossScale,
    TensorSummary,
)

if TYPE_CHECKING:
    from qgate.storage.locations import Location

__all__ = ["DrawingRequest", "analyze_dump"]

_AS_WIDE = ("bf16", "float32", "float64")
_GROUP = ("quant_type", "layer_type", "operation", "name", "dtype")
_SHORT = {"bfloat16": "bf16", "float16": "fp16"}
# If more tensors than these take their workers down, the cause is not in the tensors.
_MOST_DEATHS = 16
Step = Callable[[int, int], None]


@dataclass
class _Totals:
    """The tensors of all batches, in the order of the records, and their groups."""

    rows: StoredRows[TensorSummary] = field(default_factory=StoredRows)
    maps: MapCandidates = field(default_factory=MapCandidates)
    pools: defaultdict[Group, Pooling] = field(default_factory=lambda: defaultdict(Pooling))
    notes: list[str] = field(default_factory=list)


def analyze_dump(
    *folders: str | Location, request: DrawingRequest | None = None, step: Step | None = None
) -> DumpAnalysis:
    """Analyze dumps as one: two runs with other quant types, or a rank in each.

    `step` gets the number of tensors that are done, and of all.
    """
    request = request or DrawingRequest()
    if not folders:
        raise QgateError("no dump was given to analyze; name its folder.")
    open_cached.cache_clear()  # a dump may have been written anew since
    dumps = [open_cached(folder) for folder in dict.fromkeys(map(location_of, folders))]
    chosen = choose(dumps, request.fields, request.tensors)
    names, kind = compared_names(chosen.labels, request.compare)
    format_names = [*request.formats, *(names if kind == "formats" else ())]
    measured = tuple(dict.fromkeys(formats.get(name).name for name in format_names))
    totals = _read_tensors(chosen, replace(request, formats=measured), step)
    tensors = totals.rows.plain()
    pools = {group: pooling.pool for group, pooling in sorted(totals.pools.items())}
    if not tensors:
        why = [*totals.notes, *chosen.notes, "no tensor is left"][0].rstrip(".")
        raise QgateError(f"nothing to analyze in {str(dumps[0].folder)!r}: {why}.")
    if kind == "quant_types":
        comparison = compare_quant_types(chosen, names, workers=request.workers, most=request.most)
    else:
        comparison = compare_formats(tensors, names)
    notes = [note for dump in dumps for note in dump.notes()]
    return {
        "kind": ANALYSIS,
        "dump": dict(all_totals(dumps)),
        "settings": {
            "formats": list(measured),
            "compare": None if request.compare is None else list(request.compare),
            "wanted": {name: str(value) for name, value in request.fields.items()},
            "rows": request.rows,
            "most": request.most,
            "seed": request.seed,
            **({"of_tensors": chosen.total} if chosen.count < chosen.total else {}),
        },
        "formats": edges_of(measured),
        "notes": [*notes, *chosen.notes, *dict.fromkeys(totals.notes), *_counting_notes(tensors)],
        "tensors": tensors,
        "groups": [
            cast(GroupSummary, {**dict(zip(_GROUP, key, strict=True)), **group_summary(pool)})
            for key, pool in pools.items()
        ],
        "comparison": comparison,
        "loss_scales": _loss_scales(pools, measured),
        "ranks": ranks_of(tensors),
        "samples": sample_cells(tensors),
        "maps": [
            tensor_map(
                by_channel(record.record, values_of(record, request.most)), kind,
                title=tensor["title"], order=tensor["order"], rank=tensor["rank"],
                row_name=row_name(record.record),
            )
            for kind, record, tensor in totals.maps.best()
        ],
    }  # fmt: skip


def _read_tensors(chosen: ChosenRecords, request: DrawingRequest, step: Step | None) -> _Totals:
    totals, done, deaths = _Totals(), 0, 0
    parts = batches(chosen, lambda located: nbytes(located.record))
    of_batch = replace(request, workers=1)
    pending = (Batch(tuple(part), of_batch) for part in parts)
    for batch, summary in _batch_summaries(pending, request.workers):
        done += len(batch.records)
        if step is not None:
            step(done, chosen.count)
        if isinstance(summary, Failure):
            (located,) = batch.records
            name = f"{located.folder}: {located.record.title}, order {located.record.order}"
            chosen.lost.add(located.key)
            deaths += 1
            if deaths > _MOST_DEATHS:
                raise QgateError(f"{name}, and {deaths - 1} others before it: {summary.reason}.")
            totals.notes.append(f"left out: {name}: {summary.reason}")
            continue
        chosen.lost.update(summary.lost)
        for tensor in summary.tensors:
            totals.rows.append_packed(tensor)
        totals.maps.extend(summary.maps)
        totals.notes += summary.notes
        for group, pool in summary.pools.items():
            totals.pools[group].add(pool)
    return totals


def _batch_summaries(
    pending: Iterable[Batch], workers: Workers | int
) -> Iterator[tuple[Batch, BatchSummary | Failure]]:
    """Summarize batches in order; one that took its process down is tried again by tensor."""
    queue, submitted = itertools.tee(pending)
    for summary, batch in zip(map_items(summarize_batch, submitted, workers), queue, strict=True):
        if isinstance(summary, Failure) and len(batch.records) > 1:
            singles = (replace(batch, records=(record,)) for record in batch.records)
            yield from _batch_summaries(singles, workers)
        else:
            yield batch, summary


def _loss_scales(pools: Mapping[Group, Pool], names: Sequence[str]) -> list[LossScale]:
    """Advise on all gradients together: one loss scale serves them all."""
    gradients: dict[str, Pool] = {}
    for (_, _, operation, name, dtype), pool in pools.items():
        if operation == "backward" and name.startswith("grad") and dtype:
            gradients[dtype] = gradients[dtype] + pool if dtype in gradients else pool
    if not gradients:
        return []
    most = max(gradients.values(), key=lambda pool: pool.elements)
    edges = edges_of(names)
    own = [name for name in names if not edges[name]["scaled"] and name not in _AS_WIDE]
    return [scale for name in own if (scale := loss_scale(most, name)) is not None]


def _counting_notes(tensors: Sequence[TensorSummary]) -> list[str]:
    """Note how many tensors are counted as rounded values, or in part."""
    wide = part = 0
    for tensor in tensors:
        dtype = tensor["dtype"]
        exact = "bf16" if dtype.startswith("float8") else _SHORT.get(dtype, dtype)
        wide += tensor["counted_as"] not in ("", dtype, exact)
        part += tensor["counted"] < tensor["elements"]
    notes = []
    if wide:
        notes.append(
            f"{wide} tensors have more values than can be counted: their shares and quantiles "
            "are of values rounded to bf16; extremes, means, standard deviations and non-finite "
            "values are exact"
        )
    if part:
        notes.append(f"of {part} tensors a share of the elements was counted")
    return notes
