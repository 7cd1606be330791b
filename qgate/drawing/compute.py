"""Dumps under all analyses: each tensor is looked at once, and what they say of it adds up."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from qgate import formats
from qgate.drawing.fitting import group_portrait
from qgate.drawing.loss_scaling import loss_scale
from qgate.drawing.quant_types import compare_formats, compare_quant_types, compared_names
from qgate.drawing.rank_differences import ranks_of, sample_cells
from qgate.drawing.shown import PicturedTensors
from qgate.drawing.tensor_maps import tensor_map
from qgate.drawing.tensor_pass import Batch, Glance, Group, Looked, batches, look, values_of
from qgate.dumps.choosing import ChosenRecords, choose, opened
from qgate.dumps.summing import all_totals
from qgate.engine import Failure, Workers, outcomes
from qgate.errors import QgateError
from qgate.results.rows import StoredRows
from qgate.storage.places import place_of
from qgate.summaries.pooling import Pool, Pooling, edges_of
from qgate.summaries.record import (
    ANALYSIS,
    DumpAnalysis,
    GroupPortrait,
    LossScale,
    Map,
    TensorPortrait,
)

if TYPE_CHECKING:
    from qgate.storage.places import Place

FORMATS = ("fp8_e4m3", "fp8_e5m2", "hif8", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4", "fp16", "bf16")
_AS_WIDE = ("bf16", "float32", "float64")
# More tensors than these that take their workers down are no matter of the tensors.
_MOST_DEATHS = 16
Step = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class DrawingRequest:
    """What to analyze.

    formats   names of formats and dtypes whose losses are measured
    compare   two quant types of the dumps, or two formats; without them, what there is
    wanted    only records with these fields: `{"layer": 3, "name": "grad_*"}`
    rows      elements of each tensor that block formats are measured on, whole rows
    most      elements of each tensor that are looked at at all; all of them without it
    tensors   how many tensors are looked at, evenly spaced; all of them without it
    seed      chooses the rows
    workers   who looks: processes, or another engine
    """

    formats: Sequence[str] = FORMATS
    compare: tuple[str, str] | None = None
    wanted: Mapping[str, object] = field(default_factory=dict)
    rows: int = 2**16
    most: int | None = None
    tensors: int | None = None
    seed: int = 0
    workers: Workers | int = 1


@dataclass
class _Found:
    """What all batches said, in the order of the records."""

    shown: PicturedTensors = field(default_factory=PicturedTensors)
    tensors: StoredRows[TensorPortrait] = field(default_factory=StoredRows)
    pooling: defaultdict[Group, Pooling] = field(default_factory=lambda: defaultdict(Pooling))
    notes: list[str] = field(default_factory=list)

    @property
    def pools(self) -> dict[Group, Pool]:
        return {group: each.pool for group, each in self.pooling.items()}


def analyze_dump(
    *folders: str | Place, asked: DrawingRequest | None = None, step: Step | None = None
) -> DumpAnalysis:
    """All that is drawn of dumps; `step` is told how many tensors are done, of how many.

    Several dumps are looked at as one: two runs with other quant types, or a rank in each.
    """
    asked = asked or DrawingRequest()
    if not folders:
        raise QgateError("no dump was given to analyze; name its folder.")
    opened.cache_clear()  # what was opened before may have been written anew
    dumps = [opened(folder) for folder in dict.fromkeys(map(place_of, folders))]
    chosen = choose(dumps, asked.wanted, asked.tensors)
    some = {"of_tensors": chosen.of} if chosen.count < chosen.of else {}
    names, kind = compared_names(chosen.labels, asked.compare)
    measured = _known([*asked.formats, *(names if kind == "formats" else ())])
    glance = Glance(measured, asked.rows, asked.most, asked.seed)
    found = _look(chosen, glance, asked.workers, step)
    tensors, pools = found.tensors.settled(), found.pools
    if not tensors:
        why = [*found.notes, *chosen.notes, "no tensor is left"][0].rstrip(".")
        raise QgateError(f"nothing to analyze in {str(dumps[0].folder)!r}: {why}.")
    if kind == "quant_types":
        comparison = compare_quant_types(chosen, names, workers=asked.workers, most=asked.most)
    else:
        comparison = compare_formats(tensors, names)
    told = [note for dump in dumps for note in dump.notes()]
    return {
        "kind": ANALYSIS,
        "dump": all_totals(dumps),
        "settings": {**_settings(asked, measured), **some},
        "formats": edges_of(measured),
        "notes": [*told, *chosen.notes, *dict.fromkeys(found.notes), *_rounded(tensors)],
        "tensors": tensors,
        "groups": [_group(key, pool) for key, pool in sorted(pools.items())],
        "comparison": comparison,
        "loss_scales": _loss_scales(pools, measured),
        "ranks": ranks_of(tensors),
        "samples": sample_cells(tensors),
        "maps": _maps(found.shown, asked.most),
    }


def _known(names: Sequence[str]) -> tuple[str, ...]:
    """Formats by their own names, each once."""
    return tuple(dict.fromkeys(formats.get(name).name for name in names))


def _look(
    chosen: ChosenRecords, glance: Glance, workers: Workers | int, step: Step | None
) -> _Found:
    found, done, deaths = _Found(), 0, 0
    for part, looked in _looked_at(batches(chosen, glance), workers):
        done += len(part.places)
        if step is not None:
            step(done, chosen.count)
        if isinstance(looked, Failure):
            (place,) = part.places
            name = f"{place.folder}: {place.record.title}, order {place.record.order}"
            chosen.lost.add(place.key)
            deaths += 1
            if deaths > _MOST_DEATHS:
                raise QgateError(f"{name}, and {deaths - 1} others before it: {looked.reason}.")
            found.notes.append(f"left out: {name}: {looked.reason}")
            continue
        chosen.lost.update(looked.lost)
        for tensor in looked.tensors:
            found.tensors.append_packed(tensor)
        found.shown.follow(looked.shown)
        found.notes += looked.notes
        for group, pool in looked.pools.items():
            found.pooling[group].add(pool)
    return found


def _looked_at(
    parts: Iterable[Batch], workers: Workers | int
) -> Iterator[tuple[Batch, Looked | Failure]]:
    """In order; of neighbors that took their process down, each is tried by itself."""
    given, sent = itertools.tee(parts)
    for looked, part in zip(outcomes(look, sent, workers), given, strict=True):
        if isinstance(looked, Failure) and len(part.places) > 1:
            yield from _looked_at((replace(part, places=(p,)) for p in part.places), workers)
        else:
            yield part, looked


def _group(key: Group, pool: Pool) -> GroupPortrait:
    names = ("quant_type", "layer_type", "operation", "name", "dtype")
    return cast(GroupPortrait, {**dict(zip(names, key, strict=True)), **group_portrait(pool)})


def _loss_scales(pools: Mapping[Group, Pool], names: Sequence[str]) -> list[LossScale]:
    """For all gradients together: one loss scale serves them all."""
    gradients: dict[str, Pool] = {}
    for (_, _, operation, name, dtype), pool in sorted(pools.items()):
        if operation == "backward" and name.startswith("grad") and dtype:
            gradients[dtype] = gradients[dtype] + pool if dtype in gradients else pool
    if not gradients:
        return []
    most = max(gradients.values(), key=lambda pool: pool.elements)
    edges = edges_of(names)
    own = [name for name in names if not edges[name]["scaled"] and name not in _AS_WIDE]
    found = [loss_scale(most, name) for name in own]
    return [scale for scale in found if scale is not None]


def _maps(shown: PicturedTensors, most: int | None) -> list[Map]:
    return [
        tensor_map(
            values_of(place, most),
            kind,
            title=tensor["title"],
            order=tensor["order"],
            rank=tensor["rank"],
        )
        for kind, place, tensor in shown.chosen()
    ]


def _rounded(tensors: Sequence[TensorPortrait]) -> list[str]:
    wide = part = 0
    for tensor in tensors:
        wide += tensor["counted_as"] not in ("", *_names(tensor["dtype"]))
        part += tensor["counted"] < tensor["elements"]
    said = []
    if wide:
        said.append(
            f"{wide} tensors have more values than can be counted: their shares and quantiles "
            "are of values rounded to bf16; extremes, means, standard deviations and non-finite "
            "values are exact"
        )
    if part:
        said.append(f"of {part} tensors a share of the elements was counted")
    return said


def _names(dtype: str) -> tuple[str, ...]:
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
    return (dtype, short) if not dtype.startswith("float8") else (dtype, "bf16")


def _settings(asked: DrawingRequest, measured: Sequence[str]) -> dict[str, Any]:
    return {
        "formats": list(measured),
        "compare": None if asked.compare is None else list(asked.compare),
        "wanted": {name: str(value) for name, value in asked.wanted.items()},
        "rows": asked.rows,
        "most": asked.most,
        "seed": asked.seed,
    }
