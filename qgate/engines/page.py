"""The page of a comparison: the diagnosis first, then limits, modules, weights, tokens, pictures.

It is one file that needs no network; everything from the engines is escaped. Scripts only sort and
filter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from urllib.parse import urlencode

from qgate.charts import svg
from qgate.charts.lines import Line, color_lines, line_chart, numbered_axis
from qgate.charts.pages import Cell, Evidence, HeadView, number
from qgate.charts.reports import Section, SectionTable, report_page
from qgate.charts.svg import BOTTOM, TOP, cut_to_width, document
from qgate.engines.record import (
    CarryingToken,
    EnginesRecord,
    LimitedFigure,
    PositionProfile,
    SampleDifferences,
    SiteDifference,
    WeightDifference,
)
from qgate.engines.texts import (
    carrier_text,
    diagnosis,
    figure_rows,
    headline,
    site_text,
    values_apart,
    weight_relation,
    weights_text,
)
from qgate.text import brief, counted, percent

_TOKEN_HEAD = ("sample", "position", "token", "A", "B", "A less B", "share of k3")
_SAMPLE_HEAD = ("sample", "tokens", "k3 per token", "share of k3")
_WEIGHT_HEAD = ("weight", "it is", "dtype of A", "of B", "relative error")
_SITE_HEAD = ("tensor", "difference", "relative MSE", "largest difference")
_PHONE_TOKENS = {"sample": 22, "position": 24, "A less B": 27, "share of k3": 27}
_PHONE_SAMPLES = {"sample": 20, "tokens": 20, "k3 per token": 31, "share of k3": 29}
_PHONE_WEIGHTS = {"weight": 50, "it is": 25, "relative error": 25}
_PHONE_SITES = {"tensor": 52, "difference": 24, "relative MSE": 24}
_ORIGINS = {"local": "starts here", "carried": "carried", "enters": "enters here"}
_CARRIED = (
    "k3 is exp(d) - 1 - d of the difference d of two log-probabilities: 0 where they are equal; "
    "its mean over tokens that B drew estimates the KL divergence. A share is that of its sum."
)
_ESTIMATES = "The ± is half of a 95 % interval. KL and k3 are from B to A, in nats per token."

_NO_MODULES = "Modules are compared where both engines are dumps."
_NO_WEIGHTS = "No weights were given: dumps hold them, or --weights names the checkpoints."
_NO_SAMPLES = "No sample differs."
_ALONG = (
    "Log-probability of each token in A less that in B: an error of a cache or a state grows along "
    "the samples, one of a kernel stands at single tokens."
)
_WIDTH, _HEIGHT = 440.0, 230.0
_FIRST = 1
"""Position of the first token that has a log-probability."""
_AIR = 0.08


def page(record: EnginesRecord, files: Sequence[str]) -> str:
    """Render the page; `files` are beside it."""
    verdict, cause, size = _heading(record)
    return report_page(
        list(_sections(record)), verdict=verdict, cause=cause, about=size, tone=_tone(record),
        head_view=_head_view(record), files=files, notes=record.notes,
    )  # fmt: skip


def _sections(record: EnginesRecord) -> Iterator[Section]:
    figures, weights = record.figures, record.weights
    evidence = [*map(_limit_row, record.limits), *_reason_rows(record)]
    yield Section(anchor="findings", title="Findings", evidence=evidence)
    sites = [_site(site) for site in record.sites]
    more = record.sites_differing - len(sites)
    yield Section(
        anchor="modules", title="Where the difference begins", link="Modules", total=len(sites),
        about=f"{site_text(record)}." if record.sites_compared and not sites else "",
        tables=[SectionTable(
            head=_SITE_HEAD, rows=sites, words=2, label="tensors that differ", name="all-sites",
            narrow=_PHONE_SITES, filters=[_filter(_SITE_HEAD[1], sites)],
            more=f"{more:,} more." * (more > 0),
        )] if sites else [],
        empty="" if record.sites_compared else _NO_MODULES,
    )  # fmt: skip
    rows = [*map(_weight, weights.differences)] if weights else []
    more = weights.rounded + weights.differing - len(rows) if weights else 0
    yield Section(
        anchor="weights", title="Weights", total=len(rows),
        about=f"{weights_text(weights)}." if weights else "",
        tables=[SectionTable(
            head=_WEIGHT_HEAD, rows=rows, words=4, label="weights", name="all-weights",
            narrow=_PHONE_WEIGHTS, filters=[_filter(_WEIGHT_HEAD[1], rows)],
            more=f"{more:,} more." * (more > 0),
        )] if rows else [],
        empty="" if weights else _NO_WEIGHTS,
    )  # fmt: skip
    tokens = [_token(carrier) for carrier in figures.carriers]
    yield Section(
        anchor="tokens", title="Tokens that carry most of the difference", link="Worst tokens",
        total=len(tokens), about=_CARRIED, empty="All tokens have equal log-probabilities.",
        tables=[SectionTable(
            head=_TOKEN_HEAD, rows=tokens, words=1, label="tokens", name="worst-tokens",
            narrow=_PHONE_TOKENS,
        )],
    )  # fmt: skip
    yield Section(
        anchor="positions", title="Differences along the samples", link="Along the samples",
        total=len(record.sample_lines), about=_ALONG, empty=_NO_SAMPLES,
        whole=profile_chart(record.profile) if record.profile else "",
        figures=[sample_chart(sample) for sample in record.sample_lines],
    )  # fmt: skip
    worst = [
        [
            Cell(sample.sample),
            number(float(sample.tokens), f"{sample.tokens:,}"),
            number(sample.k3),
            number(sample.share, percent(sample.share)),
        ]
        for sample in figures.worst_samples
    ]
    yield Section(
        anchor="samples", title="Samples that carry most of the difference", link="Worst samples",
        total=len(worst), empty=_NO_SAMPLES,
        tables=[SectionTable(
            head=_SAMPLE_HEAD, rows=worst, words=1, label="samples", name="worst-samples",
            narrow=_PHONE_SAMPLES,
        )],
    )  # fmt: skip


def _tone(record: EnginesRecord) -> str:
    """Return the color of the headline; a difference without a limit is neither good nor bad."""
    if record.beyond or record.causes:
        return "fail"
    return "good" if record.figures.equal_share == 1 else "warn"


def _heading(record: EnginesRecord) -> tuple[str, str, str]:
    """Return the verdict, what explains the difference, and its size."""
    size = headline(record)
    names = f"{record.actual} and {record.reference}"
    cause = diagnosis(record)
    if record.beyond:
        verdict = f"{counted(len(record.beyond), 'limit')} exceeded"
    elif record.figures.equal_share == 1 and not cause:
        return size, "", ""
    else:
        verdict = f"{names} differ"
    return (verdict, cause, size) if cause else (verdict, size, "")


def _head_view(record: EnginesRecord) -> HeadView:
    """Return how many limits, tensors and weights differ, the engines, and folded figures."""
    held = sum(figure.limit is not None and not figure.reason for figure in record.limits)
    differing = record.weights.differing if record.weights else 0
    show_weights = urlencode({"table": "all-weights", _WEIGHT_HEAD[1]: "other values"})
    of_tensors = f"of {record.sites_compared:,} tensors differ"
    exceeded = len(record.beyond)
    rows = [
        ("fail", exceeded, f"limit{'s' * (exceeded != 1)} exceeded", "#findings"),
        ("good", held, f"limit{'s' * (held != 1)} held", "#findings"),
        ("warn", record.sites_differing, of_tensors, "#modules"),
        ("warn", differing, "of the weights differ", f"#show&{show_weights}"),
    ]
    figures = record.figures
    return HeadView(
        {"fail": "failed", "good": "passed", "warn": "open"}[_tone(record)],
        [row for row in rows if row[1]],
        [(figures.tokens, "tokens"), (figures.samples, "samples")],
        "All figures",
        [("A", record.actual), ("B", f"{record.reference}, which drew the tokens")],
        [*figure_rows(figures), ("±", _ESTIMATES)],
    )


def _limit_row(figure: LimitedFigure) -> Evidence:
    """Return a figure beside its limit."""
    value = "–" if figure.value is None else brief(figure.value)
    if figure.limit is None:
        return Evidence("info", "no limit", figure.figure, value=value)
    times = None
    if figure.value is not None:
        none = math.inf if figure.value else 0.0
        times = figure.value / figure.limit if figure.limit else none
    tone, badge = ("fail", "exceeded") if figure.reason else ("good", "held")
    text = figure.reason or figure.figure
    return Evidence(tone, badge, text, value=value, limit=f"≤ {brief(figure.limit)}", times=times)


def _reason_rows(record: EnginesRecord) -> Iterator[Evidence]:
    """Yield what explains the difference, and who carries it."""
    for cause in record.causes:
        yield Evidence("warn", "cause", cause)
    if record.weights is not None and record.weights.differing:
        yield Evidence("warn", "weights", weights_text(record.weights))
    if record.first_site is not None:
        yield Evidence("warn", "modules", site_text(record))
    if carrier := carrier_text(record.figures):
        yield Evidence("warn", "stands out", carrier)


def _filter(name: str, rows: Sequence[Sequence[Cell]]) -> tuple[str, int, list[str]]:
    """Return the choices of the second column of a table."""
    return name, 1, sorted({str(row[1].text) for row in rows})


def _site(site: SiteDifference) -> list[Cell]:
    sizes = (math.nan if size is None else size for size in (site.relative_mse, site.max_abs))
    origin = _ORIGINS.get(site.origin, "unknown")
    return [
        Cell(site.site),
        Cell(origin, tone="fail" * (site.origin == "local")),
        *map(number, sizes),
    ]


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
        Cell(
            "other values" if difference.relation == "differs" else text,
            tone="fail" * (not is_rounded),
        ),
        *map(Cell, difference.dtypes),
        number(math.nan if error is None else error),
    ]


def profile_chart(profile: PositionProfile) -> str:
    """Draw the mean and the largest size of the differences at each position of all samples."""
    lines = color_lines([Line("largest", profile.largest), Line("mean", profile.mean)])
    count, step = len(profile.mean), profile.step
    x = numbered_axis(lines.colored, count, _WIDTH, "position", _FIRST, step)
    y = svg.logarithmic(lines.values, BOTTOM, TOP, "size of the difference (nats)")
    pace = f", each over {step:,} positions" if step > 1 else ""
    text = f"Differences of log-probabilities at {count:,} places{pace}."
    body = line_chart(lines, x, y, (), width=_WIDTH)
    return document(_WIDTH, _HEIGHT, "all samples, by position", text, body)


def sample_chart(sample: SampleDifferences) -> str:
    """Draw the difference of each token of one sample."""
    lines = color_lines([Line("A less B", sample.differences)])
    values = lines.values or [0.0]
    low, high = min(0.0, *values), max(0.0, *values)
    air = _AIR * (high - low) or 1.0
    x = numbered_axis(
        lines.colored, len(sample.differences), _WIDTH, "position", _FIRST, sample.step
    )
    y = svg.linear(low - air, high + air, BOTTOM, TOP + 14, "nats", 5)
    title = f"sample {cut_to_width(sample.sample, 300, 13)}"
    text = f"{percent(sample.share)} of the difference"
    body = line_chart(lines, x, y, [("", text)], width=_WIDTH)
    return document(_WIDTH, _HEIGHT, title, f"It carries {text}.", body)
