"""The page of a sync: stale weights first, then every one of them, modules, notes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qgate.charts.pages import Cell, Evidence, HeadView, number
from qgate.charts.reports import Section, SectionTable, report_page
from qgate.engines.sync_record import SyncRecord, WeightFinding
from qgate.engines.sync_texts import HEAD, finding_row, group_text, headline, relation_text
from qgate.text import brief

_MODULE_HEAD = ("module", "relative MSE")
_PHONE_WEIGHTS = {"weight": 46, "rank": 14, "it is": 22, "differing": 18}
_PHONE_MODULES = {"module": 64, "relative MSE": 36}
_ALL_RIGHT = "All weights that were compared are the trainer's."
_NO_OUTPUTS = "Outputs are compared where qgate.probe.outputs recorded the same request in both."
_FACTS = (
    ("compared", "a sample of rows and columns of each weight on each rank, and digests of rows"),
    ("differing", "share of the sampled elements that are not the trainer's; an update of a small "
     "learning rate changes few of them in 16 or 8 bits"),
    ("relative error", "energy of the difference over that of the trainer's weight"),
    ("relative MSE", "of sampled columns of a module's output, over all tokens"),
)  # fmt: skip


def page(record: SyncRecord, files: Sequence[str]) -> str:
    """Render the page; `files` are beside it."""
    title = headline(record)
    is_open = record.findings or record.begins or record.unread or record.alone
    tone = "fail" if record.failed else "warn" if is_open else "good"
    rows = [_row(finding) for finding in record.findings]
    weights = SectionTable(
        head=HEAD, rows=rows, words=4, label="weights", name="all-weights", narrow=_PHONE_WEIGHTS,
        filters=[(HEAD[2], 2, sorted({str(row[2].text) for row in rows}))],
    )  # fmt: skip
    unread = SectionTable(
        head=("weight", "why"), words=2, label="weights", title="Weights that could not be read",
        rows=[[Cell(name), Cell(why)] for name, why in record.unread.items()],
    )  # fmt: skip
    modules = SectionTable(
        head=_MODULE_HEAD, words=1, label="modules", name="modules", narrow=_PHONE_MODULES,
        rows=[[Cell(m.name), number(m.relative_mse)] for m in record.modules],
    )  # fmt: skip
    return report_page(
        [
            Section(
                anchor="findings", title="Findings", evidence=list(_evidence(record)),
                total=len(record.groups) + len(record.beyond), empty=_ALL_RIGHT,
            ),
            Section(
                anchor="weights", title="Weights that are not the trainer's", link="Weights",
                total=len(rows), tables=[table for table in (weights, unread) if table.rows],
                empty=_ALL_RIGHT,
            ),
            Section(
                anchor="modules", title="Outputs of modules", link="Modules",
                total=len(record.modules), tables=[modules], empty=_NO_OUTPUTS,
            ),
        ],
        verdict=title, tone=tone, head_view=_head_view(record, tone), files=files,
        notes=record.notes,
    )  # fmt: skip


def _head_view(record: SyncRecord, tone: str) -> HeadView:
    near = len(record.findings) - len(record.wrong)
    counts = [
        ("fail", len(record.wrong), "not the trainer's", "#weights"),
        ("warn", near, "next to the nearest codes", "#weights"),
        ("good", record.exact, "bit for bit", "#weights"),
        ("good", record.nearest, "as the nearest codes", "#weights"),
        ("warn", len(record.unread), "could not be read", "#weights"),
    ]
    compared = record.exact + record.nearest + len(record.findings)
    step = "not known" if record.step is None else str(record.step)
    return HeadView(
        {"fail": "failed", "good": "passed", "warn": "open"}[tone],
        [row for row in counts if row[1]],
        [(compared, "weights on their ranks")],
        "What the figures mean",
        [("trainer", record.trainer), ("engine", record.engine), ("step", step)],
        _FACTS,
    )


def _evidence(record: SyncRecord) -> Iterator[Evidence]:
    for group in record.groups:
        tone = "warn" if group.relation == "near" else "fail"
        share = f"{group.weights:,} of {group.total:,}"
        yield Evidence(tone, group.relation, group_text(record, group), value=share)
    for reason in record.beyond:
        yield Evidence("fail", "exceeded", reason)
    if record.begins:
        yield Evidence("warn", "modules", f"outputs begin to differ at {record.begins}")
    if record.k3 is not None:
        text = f"mean k3 in nats per token over {record.tokens:,} tokens"
        yield Evidence("info", "tokens", text, value=brief(record.k3))


def _row(finding: WeightFinding) -> list[Cell]:
    name, rank, _, rows, share, error = finding_row(finding)
    size = math.nan if finding.relative_error is None else finding.relative_error
    return [
        Cell(name),
        number(float(finding.rank), rank),
        Cell(relation_text(finding), tone="" if finding.relation == "near" else "fail"),
        Cell(rows),
        number(finding.differing / max(finding.sampled, 1), share),
        number(size, error),
    ]
