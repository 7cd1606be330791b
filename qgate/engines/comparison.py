"""Compare two engines on the same tokens: their probabilities, weights and module outputs."""

from __future__ import annotations

from collections.abc import Callable

from qgate.comparing.dump_comparison import compare_dumps
from qgate.dumps import Dump
from qgate.engines.compute import token_figures
from qgate.engines.findings import EngineLimits, reasons
from qgate.engines.opening import open_run
from qgate.engines.record import EnginesRecord, SiteDifference
from qgate.engines.scored import EngineRun, align
from qgate.engines.weights import checkpoint_weights, compare_weights, dump_weights
from qgate.errors import QgateError


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
    a, r = open_run(actual, head), open_run(reference, head)
    figures = token_figures(align(a, r), progress)
    record = EnginesRecord(actual, reference, figures)
    if weights is not None:
        record.weights = compare_weights(*(checkpoint_weights(spec) for spec in weights))
    elif a.dump is not None and r.dump is not None:
        of_dumps = dump_weights(a.dump), dump_weights(r.dump)
        if all(of_dumps):
            record.weights = compare_weights(*of_dumps)
        else:
            record.notes.append("the dumps hold no weights: whether they are the same is not known")
    if a.dump is not None and r.dump is not None:
        _add_sites(record, a.dump, r.dump)
    record.notes += _notes(a, r, record)
    record.beyond = reasons(record, limits or EngineLimits())
    return record


def _add_sites(record: EnginesRecord, actual: Dump, reference: Dump) -> None:
    """Find the first tensor that differs while the inputs of its module agree."""
    try:
        comparison = compare_dumps(actual, reference, operation="forward")
    except QgateError as error:
        record.notes.append(f"the tensors of the dumps were not compared: {error}")
        return
    record.sites_compared = len(comparison.pairs)
    record.sites_differing = len(comparison.different)
    first = comparison.first
    if first is not None:
        record.first_site = SiteDifference(
            first.title, first.origin, first.relative_mse, first.max_abs
        )


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
