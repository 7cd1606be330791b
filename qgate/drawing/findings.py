"""Findings of an analysis as sentences: broken values first, then losses, then notes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qgate.drawing.losses import FormatLosses, FormatSummary, losses_in
from qgate.summaries.reading import (
    apart_by_member,
    by_kind,
    figure_of,
    figures_of,
    flushed,
    format_label,
    is_gradient,
    layer_of,
    layers_apart,
    layers_named,
    none_stands_out,
    nonfinite,
    outliers,
    quant_type_of,
    ratios_db,
    saturated,
    saturation_cost,
    tensor_title,
    two_ratios,
    worst,
)
from qgate.summaries.record import DumpAnalysis, PeerCell, TensorSummary
from qgate.text import brief, counted, decibels, percent
from qgate.text.findings import Finding, worst_first

Findings = Iterator[Finding]
FORMATS_ABOUT = (
    "SQNR with the format's own scales; a format without scales is cast as it is or with the one "
    "power of two that loses least, whichever is better. Massive elements are a few that are more "
    "than 20 times above the rms of the others: they can hide the loss of all others. Flushed and "
    "saturated are shares of finite values, cast as they are if the format has no scales; the last "
    "column is the part of a tensor's squared error that comes from saturated values, in the mean. "
    "A format with scales of its own may saturate by design: its scale rule leaves the largest "
    "values of a block out."
)
FEW_DB, OUTLIER, CORRELATION = 20.0, 20.0, 0.99
MUCH_FLUSHED = 0.01
_BARE = {"scaled": False}
_HUGE = 2.0**60


@dataclass(frozen=True)
class DumpFindings:
    """Sentences, and the losses of formats, the worst first, that page, text and terminal show."""

    findings: list[Finding]
    formats: list[FormatSummary]


def findings_of(analysis: DumpAnalysis) -> DumpFindings:
    losses = losses_in(analysis)
    summaries = [
        lost.summary(name, format_label(analysis, name), by_design=_is_scaled(analysis, name))
        for name, lost in losses.items()
    ]
    formats = sorted(filter(None, summaries), key=lambda summary: summary.least_db)
    bare = {n: lost for n, lost in losses.items() if not _is_scaled(analysis, n)}
    sentences = [
        *_nonfinite(analysis),
        *_weights(analysis),
        *_overflow(analysis, bare),
        *_flush(bare),
        *_losses(formats),
        *_hidden(analysis, losses),
        *_loss_scales(analysis),
        *rank_findings(analysis),
        *sample_findings(analysis),
        *_channels(analysis),
        *_pairs(analysis),
    ]
    return DumpFindings(worst_first(sentences), formats)


def _is_scaled(analysis: DumpAnalysis, name: str) -> bool:
    return bool(analysis["formats"].get(name, _BARE)["scaled"])


# Values ------------------------------------------------------------------------------------------


def _nonfinite(analysis: DumpAnalysis) -> Findings:
    broken = [tensor for tensor in analysis["tensors"] if nonfinite(tensor)]
    if not analysis["tensors"]:
        yield Finding("fail", "The dump holds no tensors to analyze.")
    if not broken:
        return
    kinds = {"NaN": "nan", "+Inf": "posinf", "−Inf": "neginf"}
    counts = {name: int(figures_of(broken, key).sum()) for name, key in kinds.items()}
    words = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    first = min(broken, key=lambda tensor: (tensor["order"], tensor["rank"]))
    yield Finding(
        "fail",
        f"{counted(len(broken), 'tensor')} {'holds' if len(broken) == 1 else 'hold'} values that "
        f"are not finite ({words}); the first in order of execution is {tensor_title(first)}.",
    )


def _weights(analysis: DumpAnalysis) -> Findings:
    ranks = analysis["ranks"]
    if ranks and (names := ranks["unequal_weights"]):
        text = f"{counted(len(names), 'weight')} not equal on all ranks, such as "
        yield Finding("warn", f"{text}{tensor_title({'title': names[0]})}.")


def _overflow(analysis: DumpAnalysis, bare: Mapping[str, FormatLosses]) -> Findings:
    """Say which casts saturate values; formats with scales of their own saturate by design."""
    lost = {name: losses.saturated for name, losses in bare.items() if losses.saturated.tensor}
    if lost:
        name = max(lost, key=lambda n: lost[n].worst)
        cost, share = lost[name].worst
        where = tensor_title(lost[name].tensor or {})
        more = ", ".join(f"{n} in {counted(lost[n].tensors, 'tensor')}" for n in lost)
        text = (
            f"Cast without a scale, values saturate, worst in {where}: {percent(share)} "
            f"of its values in {name}, {percent(cost)} of its squared error; {more}."
        )
        yield Finding("warn", text, math.inf)
        return
    names = ", ".join(n for n, edges in analysis["formats"].items() if not edges["scaled"])
    tensors = analysis["tensors"]
    if tensors and not any(map(nonfinite, tensors)):
        cast = f", and cast to {names} none saturates" if bare else ""
        text = f"Nothing overflows: all values of {counted(len(tensors), 'tensor')} are finite"
        yield Finding("info", f"{text}{cast}.")
    elif bare:
        yield Finding("info", f"Cast without a scale, no finite values saturate in {names}.")


def _flush(bare: Mapping[str, FormatLosses]) -> Findings:
    flushes = {name: lost.flushed for name, lost in bare.items() if lost.flushed.tensor}
    if not flushes:
        return
    name = max(flushes, key=lambda n: flushes[n].most)
    most = flushes[name]
    assert most.tensor is not None
    gradient = is_gradient(most.tensor)
    noun, lost = ("gradients", bare[name].gradients) if gradient else ("values", most)
    yield Finding(
        "warn" if most.most > MUCH_FLUSHED else "info",
        f"Cast without a scale, {percent(lost.of_all)} of all {noun} become zero in {name}; worst "
        f"{percent(most.most)} in {tensor_title(most.tensor)}.",
        lost.of_all,
    )


def _losses(formats: Sequence[FormatSummary]) -> Findings:
    if not formats:
        return
    first = formats[0]
    whole, calm = first.worst_db
    text = f"{first.label} loses most: in {tensor_title(first.worst)} its SQNR is "
    if calm < whole and decibels(calm) != decibels(whole):
        text += f"{decibels(calm)} without a few massive elements, which alone lift it to "
        text += decibels(whole)
    else:
        text += two_ratios(whole, calm)
    text += f"; {decibels(first.median_db[1])} in the median of all tensors"
    if len(formats) > 1:
        last = max(formats, key=lambda row: row.median_db[1])
        text += f". {last.label} loses least: {decibels(last.median_db[1])} in the median"
    yield Finding("warn" if first.least_db < FEW_DB else "info", f"{text}.")


def _hidden(analysis: DumpAnalysis, losses: Mapping[str, FormatLosses]) -> Findings:
    """Name formats that look good in a layer only because of a few massive elements."""
    for name, lost in losses.items():
        hidden = lost.hidden
        if hidden.worst is None:
            continue
        whole, calm = hidden.ratios
        text = (
            f"{format_label(analysis, name)} looks good only because of massive elements in "
            f"{counted(hidden.tensors, 'tensor')} ({layers_named(hidden.layers)}): "
            f"{tensor_title(hidden.worst)} has {decibels(whole)} with them and {decibels(calm)} "
            "without."
        )
        yield Finding("warn" if calm < FEW_DB else "info", text, hidden.tensors / 1e9)


def _loss_scales(analysis: DumpAnalysis) -> Findings:
    for row in analysis["loss_scales"]:
        before, after = percent(figure_of(row, "flush")), percent(figure_of(row, "at_best"))
        if row["least"] > row["largest"]:
            text = (
                f"{row['format']}: no loss scale saves all gradients; at 2^{row['advised']} "
                f"{after} become zero ({before} without)."
            )
            yield Finding("warn", text, figure_of(row, "at_best"))
        elif row["least"] > 0:
            text = (
                f"{row['format']}: a loss scale of 2^{row['advised']} (or any from "
                f"2^{row['least']} to 2^{row['largest']}) lowers the share of gradients that "
                f"become zero from {before} to {after}."
            )
            yield Finding("info", text)


def _channels(analysis: DumpAnalysis) -> Findings:
    widest = worst([t for t in analysis["tensors"] if t.get("channels")], outliers)
    if widest and widest[0][1] >= OUTLIER:
        tensor, factor = widest[0]
        channel = tensor["channels"]["largest"][0][0]
        times = f"{brief(factor)} times the median channel"
        yield Finding("info", f"Channel {channel} of {tensor_title(tensor)} is {times}.")


def _pairs(analysis: DumpAnalysis) -> Findings:
    comparison = analysis["comparison"]
    pairs = comparison["pairs"] if comparison else []
    if comparison and (least := worst(pairs, lambda pair: -figure_of(pair, "correlation"))):
        pair, value = least[0]
        yield Finding(
            "warn" if -value < CORRELATION else "info",
            f"{comparison['second']} against {comparison['first']}: least correlation "
            f"{-value:.4f} of {counted(len(pairs), 'pair')}, at {tensor_title(pair)}.",
        )


# Ranks and samples -------------------------------------------------------------------------------


def rank_findings(analysis: DumpAnalysis) -> list[Finding]:
    """Say which rank stands out, in which layers; or that none does."""
    ranks = analysis["ranks"]
    if not ranks or len(ranks["rows"]) < 2:
        return []
    out, count = ranks["stands_out"], len(ranks["rows"])
    cells = ranks.get("cells") or []
    in_layers = [*_peers_apart([cell for cell in cells if cell["member"] != out], "rank", count)]
    if out is None:
        if in_layers or (ranks["unequal_weights"] and count > 2):
            return in_layers
        return [Finding("info", f"{none_stands_out(count)}.")]
    mine = [tensor for tensor in ranks["tensors"] if tensor["farthest"] == out]
    text = f"Rank {out} of {count} stands out{layers_apart(cells, out)}"
    if far := worst(mine, lambda tensor: figure_of(tensor, "factor")):
        times = brief(far[0][1]) if far[0][1] < _HUGE else "more than 2^60, or all zeros,"
        text += f": a factor of {times} at {tensor_title(far[0][0])}"
    return [Finding("warn", f"{text}."), *in_layers]


def sample_findings(analysis: DumpAnalysis) -> list[Finding]:
    """Say which sample stands out, in which layers; or, of three or more, that none does."""
    cells = analysis.get("samples") or []
    count = len({cell["member"] for cell in cells})
    in_layers = [*_peers_apart(cells, "sample", count)]
    if in_layers or count < 3:
        return in_layers
    return [Finding("info", f"No sample of {count} stands out.")]


def _peers_apart(cells: Sequence[PeerCell], word: str, count: int) -> Findings:
    """Name ranks or samples that stand out in some layer; of two, either may be the wrong one."""
    for member, mine in apart_by_member(cells).items():
        first = mine[0]
        who = f"{word.capitalize()} {member} of {count} stands out"
        if count == 2:
            members = " and ".join(map(str, sorted({cell["member"] for cell in cells})))
            who = f"{word.capitalize()}s {members} differ"
        text = (
            f"{who} in {layers_named({cell['layer'] for cell in mine})}: "
            f"{brief(first['ratio'])} times as far from the other {word}s as is usual for such "
            f"tensors, worst at {tensor_title(first)}{_factor_text(first['log2'])}."
        )
        yield Finding("warn", text, first["ratio"] / 1e6)
        if count == 2:
            return


def _factor_text(log2: float) -> str:
    """Say how much larger a tensor is than its peers, up to 2^60 times."""
    factor = 2.0**log2
    if 2.0 ** abs(log2) > _HUGE:
        return f", {'all zeros or next to it' if log2 < 0 else 'more than 2^60 times their size'}"
    return f", {brief(factor)} times their root mean square" if abs(factor - 1) > 0.01 else ""


# Tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorstTensor:
    """A tensor with the worst thing about it."""

    tensor: TensorSummary
    reason: str
    rank: tuple[float, ...]


def worst_tensors(analysis: DumpAnalysis, count: int) -> list[WorstTensor]:
    """Rank tensors: not finite; saturated by a cast, by the part of the squared error that comes
    from it; flushed by a cast; lossy in any format; with far outliers."""
    reasons = ((tensor, _worst_reason(tensor, analysis)) for tensor in analysis["tensors"])
    bad = (WorstTensor(tensor, *reason) for tensor, reason in reasons if reason)
    return heapq.nsmallest(
        count, bad, key=lambda item: (*(-part for part in item.rank), item.tensor["order"])
    )


def _worst_reason(
    tensor: TensorSummary, analysis: DumpAnalysis
) -> tuple[str, tuple[float, ...]] | None:
    if broken := nonfinite(tensor):
        return f"{counted(broken, 'value')} not finite", (3, float(broken), 0.0)
    outcomes = tensor.get("formats") or {}
    casts = {n: f for n, f in outcomes.items()
             if n in analysis["formats"] and not _is_scaled(analysis, n)}  # fmt: skip
    over = [(saturation_cost(f), saturated(f), n) for n, f in casts.items() if saturated(f) > 0]
    if over:
        cost, share, name = max((0.0 if math.isnan(c) else c, s, n) for c, s, n in over)
        reason = f"{percent(share)} saturate in {name}, {percent(cost)} of its error"
        return reason, (2, cost, share)
    share, name = max(((flushed(outcome), n) for n, outcome in casts.items()), default=(0.0, ""))
    if share > MUCH_FLUSHED:
        return f"{percent(share)} become zero in {name}", (1, share, 0.0)
    ratios = [(min(pair := ratios_db(outcome)), pair, name) for name, outcome in outcomes.items()]
    if finite := [item for item in ratios if math.isfinite(item[0])]:
        least, pair, name = min(finite)
        return f"{two_ratios(*pair)} in {format_label(analysis, name)}", (0, -least, 0.0)
    factor = outliers(tensor)
    if factor > OUTLIER:
        return f"largest channel {brief(factor)} times the median", (-1, factor, 0.0)
    return None


def summary_line(analysis: DumpAnalysis) -> str:
    """Say how many tensors, values, layers and ranks the analysis is of."""
    tensors = analysis["tensors"]
    elements = sum(int(tensor.get("elements") or 0) for tensor in tensors)
    of = figure_of(analysis["settings"], "of_tensors")
    some = f"{len(tensors):,} of {of:,.0f} tensors, evenly spaced"
    parts = [some if of > 0 else counted(len(tensors), "tensor"), f"{elements:,} values"]
    for count, word in (
        (len(by_kind(tensors)), "kind"),
        (len({layer_of(tensor) for tensor in tensors} - {None}), "layer"),
        (len(set(map(quant_type_of, tensors))), "quant type"),
        (len({tensor["rank"] for tensor in tensors}), "rank"),
    ):
        parts.append(counted(count, word))
    return ", ".join(parts)
