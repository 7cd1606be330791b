"""Compare two engines on the same tokens: their probabilities, weights and module outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice

from qgate.charts.overviews import Overview, Overviewed
from qgate.comparing.dump_comparison import compare_dumps
from qgate.comparing.dump_differences import PairErrors
from qgate.dumps import Dump
from qgate.engines.causes import find_causes
from qgate.engines.compute import TokenValues, figures_of, values_of
from qgate.engines.findings import EngineLimits, hold_limits
from qgate.engines.opening import EnginePair, open_pair
from qgate.engines.profile import position_profile, worst_samples
from qgate.engines.record import EnginesRecord, SiteDifference
from qgate.engines.scored import EngineRun, Pair
from qgate.engines.weights import (
    MatchedWeights,
    checkpoint_weights,
    dump_weights,
    match_weights,
)
from qgate.errors import QgateError

LISTED_SITES = 200


@dataclass(frozen=True, repr=False)
class EngineComparison(Overviewed):
    """The record of a comparison, and the values of all tokens that it is of."""

    record: EnginesRecord
    samples: list[Pair]
    values: list[TokenValues]

    def overview(self) -> Overview:
        """Describe the record."""
        return self.record.overview()


def compare_engines(
    actual: str,
    reference: str,
    *,
    head: str = "",
    weights: tuple[str, str] | None = None,
    limits: EngineLimits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EnginesRecord:
    """Compare two engines that scored the same tokens.

    actual, reference   dumps, files of logits, or JSON lines; the reference drew the tokens
    head                the module of dumps whose output is the logits
    weights             checkpoints that the engines loaded, to see whether they are the same
    limits              figures above which the comparison fails
    progress            called with the number of samples done, and of all
    """
    return compare_tokens(
        actual, reference, head=head, weights=weights, limits=limits, progress=progress
    ).record


def compare_tokens(
    actual: str,
    reference: str,
    *,
    head: str = "",
    weights: tuple[str, str] | None = None,
    limits: EngineLimits | None = None,
    progress: Callable[[int, int], None] | None = None,
    most_drawn: int = 0,
) -> EngineComparison:
    """Compare two engines as `compare_engines` does, and keep the values of all tokens.

    most_drawn  samples whose differences the record keeps, token by token
    """
    pair = open_pair(actual, reference, head)
    a, r = pair.actual, pair.reference
    values = values_of(pair.samples, progress)
    record = EnginesRecord(actual, reference, figures_of(pair.samples, values))
    record.causes = find_causes(pair.samples)
    matched = matched_weights(pair, weights)
    if matched is not None:
        record.weights = matched.comparison()
    elif a.dump is not None and r.dump is not None:
        record.notes.append("the dumps hold no weights: whether they are the same is not known")
    if a.dump is not None and r.dump is not None:
        _add_sites(record, a.dump, r.dump)
    record.notes += _notes(a, r, record)
    record.limits = hold_limits(record, limits or EngineLimits())
    record.beyond = [figure.reason for figure in record.limits if figure.reason]
    record.profile = position_profile(values)
    record.sample_lines = worst_samples(pair.samples, values, most_drawn)
    return EngineComparison(record, pair.samples, values)


def matched_weights(
    pair: EnginePair, weights: tuple[str, str] | None = None
) -> MatchedWeights | None:
    """Compare the weights of checkpoints, else those in the dumps; return None without any."""
    if weights is not None:
        return match_weights(*(checkpoint_weights(spec) for spec in weights))
    if pair.actual.dump is None or pair.reference.dump is None:
        return None
    of_dumps = dump_weights(pair.actual.dump), dump_weights(pair.reference.dump)
    return match_weights(*of_dumps) if all(of_dumps) else None


def _add_sites(record: EnginesRecord, actual: Dump, reference: Dump) -> None:
    """Add the tensors that differ: first those that do while the inputs of their module agree."""
    try:
        comparison = compare_dumps(actual, reference, operation="forward")
    except QgateError as error:
        record.notes.append(f"the tensors of the dumps were not compared: {error}")
        return
    record.sites_compared = len(comparison.pairs)
    record.sites_differing = len(comparison.different)
    first = comparison.first
    if first is not None:
        record.first_site = _site(first)
    local = comparison.different.of_origin("local")[:LISTED_SITES]
    titles = {pair.title for pair in local}
    worst = (pair for pair in comparison.worst_first() if pair.title not in titles)
    record.sites = [_site(pair) for pair in islice(chain(local, worst), LISTED_SITES)]


def _site(pair: PairErrors) -> SiteDifference:
    return SiteDifference(pair.title, pair.origin, pair.relative_mse, pair.max_abs)


def site_of(title: str) -> str:
    """Return the title of a tensor without the call that it is of: all calls are one site."""
    return re.sub(r", (?:iteration|sample|micro-batch|call) \d+", "", title)


def _notes(actual: EngineRun, reference: EngineRun, record: EnginesRecord) -> list[str]:
    notes = []
    figures = record.figures
    if figures.kl is None:
        notes.append("without logits of both, KL is the estimate k3 from the tokens' probabilities")
    if figures.flips is None:
        notes.append("the most likely tokens are not told by both, so flips are not counted")
    if figures.samples == 1:
        notes.append("one sample: intervals are over runs of its tokens")
    if (actual.dump is None) != (reference.dump is None):
        notes.append("one side is no dump: modules are not compared")
    return notes
