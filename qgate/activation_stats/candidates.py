"""Candidates of a mixed precision: each is measured by whoever has the model, wherever that is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qgate.activation_stats.network_hosts import Host, Where, host_of
from qgate.activation_stats.record import Proposal, Sensitive
from qgate.activation_stats.sensitivity import (
    Layers,
    Progress,
    Runs,
    SensitivityTarget,
    alone,
    propose,
    rank,
)
from qgate.activation_stats.subjects import Sample
from qgate.engine import Failure, Sent, Workers, outcomes
from qgate.errors import QgateError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class CandidateRequest:
    """All samples, and the layers that can be quantized."""

    samples: Sequence[Sample]
    names: Sequence[str]
    predicts: bool


@dataclass(frozen=True, eq=False)
class CandidateBench:
    """The network, and what is measured with it; packed once for other processes."""

    where: Where
    asked: CandidateRequest | Sent[CandidateRequest]


@dataclass(frozen=True, eq=False)
class FormatCandidate:
    """A layer that is quantized alone."""

    format: str
    name: str


@dataclass(frozen=True, eq=False)
class Search:
    """The fewest layers of a ranking that reach a target."""

    format: str
    ranking: Sequence[str]
    target: SensitivityTarget


# What the last bench of this process is worth keeping of: references, and quantized weights.
_kept: list[tuple[Host, CandidateRequest, Runs, Layers]] = []


def sensitivity_of(
    where: Where,
    asked: CandidateRequest,
    formats: Sequence[str],
    targets: Sequence[SensitivityTarget],
    workers: Workers,
    progress: Progress | None = None,
) -> tuple[list[Sensitive], list[Proposal]]:
    """Layers by format, the most harmful first, and a proposal for each format and target."""
    bench = CandidateBench(where, asked if isinstance(where, Host) else Sent(asked))
    try:
        rankings = _ranked(bench, asked.names, formats, workers, progress)
        items = [
            Search(fmt, [each["module"] for each in found], target)
            for fmt, found in rankings.items()
            for target in targets
        ]
        proposals = list(_outcomes(search, items, bench, workers, _search_text))
    finally:
        _kept.clear()
    return [each for found in rankings.values() for each in found], proposals


def _ranked(
    bench: CandidateBench,
    names: Sequence[str],
    formats: Sequence[str],
    workers: Workers,
    progress: Progress | None,
) -> dict[str, list[Sensitive]]:
    items = [FormatCandidate(fmt, name) for fmt in formats for name in names]
    found: dict[str, list[Sensitive]] = {fmt: [] for fmt in formats}
    measured = _outcomes(measure, items, bench, workers, _candidate_text)
    for item in items:
        if progress is not None:
            progress(f"sensitivity {item.format}", len(found[item.format]), len(names))
        found[item.format].append(next(measured))
    return {fmt: rank(each) for fmt, each in found.items()}


def measure(item: FormatCandidate, bench: CandidateBench) -> Sensitive:
    runs, layers = _tools(bench, item.format)
    return alone(runs, layers, item.name)


def search(item: Search, bench: CandidateBench) -> Proposal:
    runs, layers = _tools(bench, item.format)
    return propose(runs, layers, item.ranking, item.target)


def _candidate_text(item: FormatCandidate) -> str:
    return f"{item.name} in {item.format}"


def _search_text(item: Search) -> str:
    return f"a proposal for {item.format}"


def _outcomes(
    function: Callable[[Item, CandidateBench], Result],
    items: Sequence[Item],
    bench: CandidateBench,
    workers: Workers,
    text: Callable[[Item], str],
) -> Generator[Result, None, None]:
    if not items:
        return
    found = outcomes(function, items, workers, shared=bench)
    for item, each in zip(items, found, strict=True):
        if isinstance(each, Failure):
            raise QgateError(f"the sensitivity of {text(item)} is missing: {each.reason}.")
        yield each


def _tools(bench: CandidateBench, fmt: str) -> tuple[Runs, Layers]:
    """Made once by each process; weights are kept of one format at a time."""
    host = host_of(bench.where)
    asked = bench.asked.value() if isinstance(bench.asked, Sent) else bench.asked
    if not _kept or _kept[0][0] is not host or _kept[0][1] is not asked:
        runs = Runs(host.root, asked.samples, host.device, host.name, asked.predicts)
        _kept[:] = [(host, asked, runs, Layers(host.root, asked.names, fmt))]
    _, _, runs, layers = _kept[0]
    if layers.format != fmt:
        layers = Layers(host.root, asked.names, fmt)
        _kept[:] = [(host, asked, runs, layers)]
    return runs, layers
