"""Candidates of a mixed precision, each measured by a process that has the model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from qgate.activation_stats.networks import LoadedNetwork, NetworkSource, network_of
from qgate.activation_stats.record import Proposal, Sensitive
from qgate.activation_stats.sensitivity import (
    ModelRuns,
    Progress,
    QuantizableLayers,
    SensitivityTarget,
    propose,
    quantize_alone,
)
from qgate.activation_stats.subjects import Sample
from qgate.engine import Failure, PackedValue, Workers, map_items
from qgate.errors import QgateError


@dataclass(frozen=True, eq=False)
class CandidateRequest:
    """All samples, and the layers that can be quantized."""

    samples: Sequence[Sample]
    names: Sequence[str]
    predicts: bool


@dataclass(frozen=True, eq=False)
class LayerTrial:
    """A layer to quantize alone; with a target, the ranking that a search starts from."""

    format: str
    names: Sequence[str]
    target: SensitivityTarget | None = None

    def __str__(self) -> str:
        if self.target is not None:
            return f"a proposal for {self.format}"
        return f"{self.names[0]} in {self.format}"


# The network and the request, which is packed once for other processes.
CandidateBench = tuple[NetworkSource, CandidateRequest | PackedValue[CandidateRequest]]
# The references and quantized weights of the last bench of this process.
_cached: list[tuple[LoadedNetwork, CandidateRequest, ModelRuns, QuantizableLayers]] = []


def sensitivity_of(
    source: NetworkSource,
    request: CandidateRequest,
    formats: Sequence[str],
    targets: Sequence[SensitivityTarget],
    workers: Workers,
    progress: Progress | None = None,
) -> tuple[list[Sensitive], list[Proposal]]:
    """Rank layers by format, the most harmful first, and propose for each format and target."""
    if not formats:
        return [], []
    bench = (source, request if isinstance(source, LoadedNetwork) else PackedValue(request))
    rankings: dict[str, list[Sensitive]] = {fmt: [] for fmt in formats}
    try:
        items = [LayerTrial(fmt, [name]) for fmt in formats for name in request.names]
        measured = _outcomes(items, bench, workers)
        for item in items:
            ranking = rankings[item.format]
            if progress is not None:
                progress(f"sensitivity {item.format}", len(ranking), len(request.names))
            ranking.append(next(measured))
        for ranking in rankings.values():
            ranking.sort(key=lambda layer: (layer["sqnr_db"], layer["module"]))
        items = [
            LayerTrial(fmt, [layer["module"] for layer in ranking], target)
            for fmt, ranking in rankings.items()
            for target in targets
        ]
        proposals = list(_outcomes(items, bench, workers))
    finally:
        _cached.clear()
    return [layer for ranking in rankings.values() for layer in ranking], proposals


def measure(item: LayerTrial, bench: CandidateBench) -> Sensitive | Proposal:
    """Measure a candidate; references, and the weights of one format, are computed once."""
    source, packed = bench
    network = network_of(source)
    request = packed.value() if isinstance(packed, PackedValue) else packed
    if not _cached or _cached[0][0] is not network or _cached[0][1] is not request:
        runs = ModelRuns(
            network.root, request.samples, network.device, network.name, request.predicts
        )
        _cached[:] = [
            (network, request, runs, QuantizableLayers(network.root, request.names, item.format))
        ]
    _, _, runs, layers = _cached[0]
    if layers.format != item.format:
        layers = QuantizableLayers(network.root, request.names, item.format)
        _cached[:] = [(network, request, runs, layers)]
    if item.target is None:
        return quantize_alone(runs, layers, item.names[0])
    return propose(runs, layers, item.names, item.target)


def _outcomes(
    items: Sequence[LayerTrial], bench: CandidateBench, workers: Workers
) -> Generator[Any, None, None]:
    measured = map_items(measure, items, workers, shared=bench) if items else ()
    for item, outcome in zip(items, measured, strict=True):
        if isinstance(outcome, Failure):
            raise QgateError(f"the sensitivity of {item} is missing: {outcome.reason}.")
        yield outcome
