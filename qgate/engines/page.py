"""The page of a comparison: the result first, then figures, pictures, tokens, weights, modules.

It is one file that needs no network; everything from the engines is escaped. Scripts only sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qgate.charts.pages import Cell, number, render
from qgate.charts.svg import LIGHT, STYLE
from qgate.engines.plots import profile_chart, sample_chart
from qgate.engines.record import CarryingToken, EnginesRecord, WeightDifference
from qgate.engines.texts import (
    carrier_text,
    figure_rows,
    headline,
    site_text,
    values_apart,
    weight_relation,
    weights_text,
)
from qgate.text import percent, shortened

_TOKEN_HEAD = ("sample", "position", "token", "A", "B", "A less B", "share of k3")
_SAMPLE_HEAD = ("sample", "tokens", "k3 per token", "share of k3")
_WEIGHT_HEAD = ("weight", "it is", "dtype of A", "of B", "relative error")


def page(record: EnginesRecord, files: Sequence[str]) -> str:
    """Render the page; `files` are beside it."""
    figures, weights = record.figures, record.weights
    first = headline(record)
    samples = [sample_chart(sample) for sample in record.sample_lines]
    links = [
        ("figures", "Figures", 0),
        ("positions", "Along the samples", len(samples)),
        ("tokens", "Worst tokens", len(figures.carriers)),
        ("samples", "Worst samples", len(figures.worst_samples)),
        ("weights", "Weights", len(weights.differences) if weights else 0),
        ("modules", "Modules", 0),
        ("files", "Files", len(files)),
    ]
    return render(
        "engines/page",
        title=shortened(first, 120),
        plot_style=f"{STYLE}@media print{{.plot{{{LIGHT}}}}}",
        first=first,
        tone=_tone(record),
        about=f"A is {record.actual}, B is {record.reference}, which drew the tokens.",
        findings=_findings(record),
        links=links,
        figures=[*figure_rows(figures)],
        profile=profile_chart(record.profile) if record.profile else "",
        samples=samples,
        token_head=_TOKEN_HEAD,
        tokens=[_token(carrier) for carrier in figures.carriers],
        sample_head=_SAMPLE_HEAD,
        worst_samples=[
            [
                Cell(sample.sample),
                number(float(sample.tokens), f"{sample.tokens:,}"),
                number(sample.k3),
                number(sample.share, percent(sample.share)),
            ]
            for sample in figures.worst_samples
        ],
        weights_text=f"{weights_text(weights)}." if weights else "",
        weight_head=_WEIGHT_HEAD,
        weights=[_weight(difference) for difference in weights.differences] if weights else [],
        more_weights=_all_differing(record) - (len(weights.differences) if weights else 0),
        modules=f"{site_text(record)}." if record.sites_compared else "",
        files=files,
        notes=record.notes,
    )


def _tone(record: EnginesRecord) -> str:
    """Return the color of the headline; a difference without a limit is neither good nor bad."""
    if record.beyond or record.causes:
        return "fail"
    return "good" if record.figures.equal_share == 1 else ""


def _findings(record: EnginesRecord) -> list[tuple[str, str]]:
    """Return what is beyond a limit, what explains the difference, and who carries it."""
    rows = [("fail", text) for text in record.beyond]
    rows += [("warn", text) for text in record.causes]
    if carrier := carrier_text(record.figures):
        rows.append(("warn", carrier))
    if record.weights is not None and record.weights.differing:
        rows.append(("warn", weights_text(record.weights)))
    if record.first_site is not None:
        rows.append(("warn", site_text(record)))
    return rows or [("info", "No limit is broken, and no token or sample stands out.")]


def _token(carrier: CarryingToken) -> list[Cell]:
    actual, reference = values_apart(carrier.actual, carrier.reference)
    return [
        Cell(carrier.sample),
        number(float(carrier.position), f"{carrier.position:,}"),
        number(float(carrier.token), f"{carrier.token}"),
        number(carrier.actual, actual),
        number(carrier.reference, reference),
        number(carrier.actual - carrier.reference),
        number(carrier.share, percent(carrier.share)),
    ]


def _weight(difference: WeightDifference) -> list[Cell]:
    error = difference.relative_error
    is_rounded = difference.relation == "rounded"
    text = "rounded" if is_rounded else weight_relation(difference)
    return [
        Cell(difference.name),
        Cell("other values" if difference.relation == "differs" else text, bad=not is_rounded),
        *map(Cell, difference.dtypes),
        number(math.nan if error is None else error),
    ]


def _all_differing(record: EnginesRecord) -> int:
    weights = record.weights
    return 0 if weights is None else weights.rounded + weights.differing
