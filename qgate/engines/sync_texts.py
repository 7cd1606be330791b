"""A sync for the screen: which weights are stale and where, then modules, then tokens."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from qgate.engines.sync_record import StaleGroup, SyncRecord, WeightFinding
from qgate.text import brief, counted, one_line, percent

HEAD = ("weight", "rank", "it is", "rows", "differing", "relative error")


def headline(record: SyncRecord) -> str:
    """Return the result in one line: weights first, then modules, then tokens."""
    groups = [group for group in record.groups if group.relation != "near"]
    if groups:
        return group_text(record, groups[0])
    weights = _right_weights(record)
    if record.beyond:
        return f"{one_line(record.beyond[0])}; {weights}"
    if record.begins:
        return f"outputs begin to differ at {one_line(record.begins)}; {weights}"
    return weights


def _right_weights(record: SyncRecord) -> str:
    """Say matches many weights the engine has of its trainer."""
    step = "" if record.step is None else f" of step {record.step}"
    if record.nearest and record.exact:
        matches = f": {record.exact:,} bit for bit, {record.nearest:,} as the nearest codes"
    else:
        matches = " as the nearest codes" if record.nearest else " bit for bit"
    near = len(record.findings) - len(record.wrong)
    more = f"; {near:,} next to the nearest codes" if near else ""
    skipped = len({*record.unread, *(name.rpartition(" (")[0] for name in record.alone)})
    more += f"; {counted(skipped, 'weight')} not compared" if skipped else ""
    return f"the engine has the trainer's weights{step}{matches}{more}"


def group_text(record: SyncRecord, group: StaleGroup) -> str:
    """Say where weights are not the trainer's, and what they are instead."""
    first = next(f for f in record.findings if (f.relation, f.step) == (group.relation, group.step))
    of_step = "the trainer's" if record.step is None else f"those of step {record.step}"
    where = one_line(group.where)
    counts = f"{group.weights:,} of {counted(group.total, 'weight')} there are not {of_step}"
    if group.total == 1:
        verb = "is" if first.rows.startswith("row ") else "are"
        counts = f"{first.rows or 'they'} {verb} not {of_step}"
    if group.relation == "near":
        return f"codes next to the nearest ones {where}: {counts}"
    kind = f"weights of step {group.step}" if group.relation == "stale" else relation_text(first)
    return f"{kind} {where}: {counts}"


def relation_text(finding: WeightFinding) -> str:
    """Say what a weight is."""
    if finding.relation == "stale":
        return f"weights of step {finding.step}"
    if finding.relation == "near":
        return "next to the nearest codes"
    return one_line(finding.holds) or "weights of no known step"


def result_lines(record: SyncRecord, limit: int = 10) -> Iterator[str]:
    """Say which weights are not the trainer's, where outputs begin to differ, and by how much."""
    yield headline(record)
    texts = [group_text(record, group) for group in record.groups]
    texts += [f"outputs begin to differ at {one_line(record.begins)}"] if record.begins else []
    texts += [one_line(reason) for reason in record.beyond]
    yield from (text for text in texts if not headline(record).startswith(text))
    compared = record.exact + record.nearest + len(record.findings)
    steps = f", with the steps {', '.join(map(str, record.steps))}" if record.steps else ""
    yield f"{counted(compared, 'weight')} compared, each on its rank{steps}"
    if record.k3 is not None:
        yield f"mean k3 {brief(record.k3)} nats per token over {record.tokens:,} tokens"
    if record.findings:
        yield ""
        rows = [finding_row(finding) for finding in record.findings[:limit]]
        yield tabulate(rows, HEAD, tablefmt="simple", disable_numparse=True)
        if len(record.findings) > limit:
            yield f"… and {counted(len(record.findings) - limit, 'weight')} more"
    if record.modules:
        yield ""
        modules = [(one_line(m.name), brief(m.relative_mse)) for m in record.modules]
        yield tabulate(
            modules, ("module", "relative MSE"), tablefmt="simple", disable_numparse=True
        )
    yield from (f"note: {one_line(note)}" for note in record.notes)


def finding_row(finding: WeightFinding) -> tuple[str, ...]:
    """Write a finding, as `HEAD` names its parts."""
    share = finding.differing / finding.sampled if finding.sampled else 1.0
    error = "–" if finding.relative_error is None else brief(finding.relative_error)
    return (
        one_line(finding.name),
        str(finding.rank),
        one_line(relation_text(finding)),
        finding.rows or "all",
        percent(share),
        error,
    )
