"""What an analysis found, as sentences: what is broken first, then what is lost, then the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qgate.drawing.losses import FormatLosses, Share, losses_in, median
from qgate.summaries.reading import (
    apart_by_member,
    by_kind,
    figure_of,
    figures_of,
    format_label,
    is_gradient,
    layer_of,
    layers_apart,
    layers_named,
    none_stands_out,
    nonfinite,
    outliers,
    quant_type_of,
    tensor_title,
    two_ratios,
    worst,
)
from qgate.summaries.record import DumpAnalysis, PeerCell, TensorPortrait
from qgate.text import brief, counted, decibels, percent

Level = Literal["fail", "warn", "info"]
FEW_DB, OUTLIER, CORRELATION = 20.0, 20.0, 0.99
MUCH_FLUSHED = 0.01
_BARE = {"scaled": False}
_HUGE = 2.0**60


@dataclass(frozen=True)
class DumpFinding:
    """One sentence; `fail` breaks a run, `warn` costs accuracy, `info` is good to know. `cost` is
    the share that is lost, and of findings of one level the costly ones come first."""

    level: Level
    text: str
    cost: float = 0.0


@dataclass(frozen=True)
class Said:
    """What page, text and terminal say of an analysis, found once; `formats` are `format_rows`."""

    findings: list[DumpFinding]
    formats: list[dict[str, Any]]


def said_of(analysis: DumpAnalysis) -> Said:
    losses = losses_in(analysis)
    rows = format_rows(analysis, losses)
    return Said(_sorted_findings(analysis, losses, rows), rows)


def findings(analysis: DumpAnalysis) -> list[DumpFinding]:
    """All of them, the broken ones first."""
    return said_of(analysis).findings


def _sorted_findings(
    analysis: DumpAnalysis, losses: Mapping[str, FormatLosses], rows: list[dict[str, Any]]
) -> list[DumpFinding]:
    bare = {
        n: lost for n, lost in losses.items() if not analysis["formats"].get(n, _BARE)["scaled"]
    }
    found = [
        *_nonfinite(analysis),
        *_weights(analysis),
        *_overflow(analysis, bare),
        *_flush(bare),
        *_losses(rows),
        *_hidden(analysis, losses),
        *_loss_scales(analysis),
        *rank_findings(analysis),
        *sample_findings(analysis),
        *_channels(analysis),
        *_pairs(analysis),
    ]
    order = {"fail": 0, "warn": 1, "info": 2}
    return sorted(found, key=lambda finding: (order[finding.level], -finding.cost))


def _nonfinite(analysis: DumpAnalysis) -> list[DumpFinding]:
    broken = [tensor for tensor in analysis["tensors"] if nonfinite(tensor)]
    if not analysis["tensors"]:
        return [DumpFinding("fail", "The dump holds no tensors to analyze.")]
    if not broken:
        return []
    kinds = {
        name: int(figures_of(broken, key).sum())
        for name, key in (("NaN", "nan"), ("+Inf", "posinf"), ("−Inf", "neginf"))
    }
    told = ", ".join(f"{count:,} {name}" for name, count in kinds.items() if count)
    first = min(broken, key=lambda tensor: (tensor["order"], tensor["rank"]))
    holds = "holds" if len(broken) == 1 else "hold"
    return [
        DumpFinding(
            "fail",
            f"{counted(len(broken), 'tensor')} {holds} values that are not finite ({told}); "
            f"the first in order of execution is {tensor_title(first)}.",
        )
    ]


def _weights(analysis: DumpAnalysis) -> list[DumpFinding]:
    ranks = analysis["ranks"]
    if not ranks or not ranks["unequal_weights"]:
        return []
    names = ranks["unequal_weights"]
    text = f"{counted(len(names), 'weight')} not equal on all ranks, such as "
    return [DumpFinding("warn", f"{text}{tensor_title({'title': names[0]})}.")]


def _overflow(analysis: DumpAnalysis, bare: Mapping[str, FormatLosses]) -> list[DumpFinding]:
    """What casts saturate; formats with scales of their own saturate by design."""
    told = {name: lost.saturated for name, lost in bare.items() if lost.saturated.tensor}
    names = [n for n, edges in analysis["formats"].items() if not edges["scaled"]]
    finite = analysis["tensors"] and not any(nonfinite(t) for t in analysis["tensors"])
    if not told:
        if finite:
            total = counted(len(analysis["tensors"]), "tensor")
            cast = f", and cast to {', '.join(names)} none saturates" if bare else ""
            text = f"Nothing overflows: all values of {total} are finite{cast}."
        elif bare:
            text = f"Cast as they are, no finite values saturate in {', '.join(names)}."
        else:
            return []
        return [DumpFinding("info", text)]
    name = max(told, key=lambda n: told[n].worst)
    worst = told[name]
    assert worst.tensor is not None
    cost, share = worst.worst
    where = tensor_title(worst.tensor)
    more = ", ".join(f"{n} in {counted(told[n].tensors, 'tensor')}" for n in told)
    text = (
        f"Cast as they are, values saturate, worst in {where}: {percent(share)} "
        f"of its values in {name}, {percent(cost)} of its squared error; {more}."
    )
    return [DumpFinding("warn", text, math.inf)]


def _most(shares: Mapping[str, Share]) -> tuple[str, TensorPortrait, float] | None:
    """The format and the tensor where a share is largest."""
    found = [
        (n, share.tensor, share.most) for n, share in shares.items() if share.tensor is not None
    ]
    return max(found, key=lambda each: each[2], default=None)


def _flush(bare: Mapping[str, FormatLosses]) -> list[DumpFinding]:
    most = _most({name: lost.flushed for name, lost in bare.items()})
    if most is None:
        return []
    name, tensor, share = most
    whose, lost = (
        ("gradients", bare[name].gradients)
        if is_gradient(tensor)
        else ("values", bare[name].flushed)
    )
    of_all = lost.of_all
    level: Level = "warn" if share > MUCH_FLUSHED else "info"
    return [
        DumpFinding(
            level,
            f"Cast as they are, {percent(of_all)} of all {whose} become zero in {name}; worst "
            f"{percent(share)} in {tensor_title(tensor)}.",
            of_all,
        )
    ]


def format_rows(analysis: DumpAnalysis, losses: Mapping[str, FormatLosses]) -> list[dict[str, Any]]:
    """One row per format, the worst format first.

    worst, worst_db, worst_rest_db    the worst tensor, its SQNR and that without massive elements
    median_db, median_rest_db         of all tensors
    saturated, saturation, by_design  the share of all values, the mean part of the squared error
                                      that it has, and whether the format saturates by design
    """
    rows = [
        {
            "format": name,
            "label": format_label(analysis, name),
            "tensors": len(lost.ratios),
            "worst_db": lost.worst_ratios[0],
            "worst_rest_db": lost.worst_ratios[1],
            "median_db": median(lost.ratios),
            "median_rest_db": median(lost.rests),
            "worst": lost.worst,
            "saturated": lost.saturated.values.of_all,
            "saturation": lost.saturated.mean_cost,
            "by_design": bool(analysis["formats"].get(name, _BARE)["scaled"]),
            "flushed": lost.flushed.of_all,
        }
        for name, lost in losses.items()
        if lost.worst is not None
    ]
    return sorted(rows, key=lambda row: min(row["worst_db"], row["worst_rest_db"]))


def _losses(rows: list[dict[str, Any]]) -> list[DumpFinding]:
    if not rows:
        return []
    first = rows[0]
    least = min(first["worst_db"], first["worst_rest_db"])
    level: Level = "warn" if least < FEW_DB else "info"
    worst_ratios = two_ratios(first["worst_db"], first["worst_rest_db"])
    text = (
        f"{first['label']} loses most: worst {worst_ratios} at {tensor_title(first['worst'])}, "
        f"median {decibels(first['median_rest_db'])}"
    )
    if len(rows) > 1:
        last = max(rows, key=lambda row: row["median_rest_db"])
        text += f"; {last['label']} loses least: median {decibels(last['median_rest_db'])}"
    return [DumpFinding(level, f"{text}.")]


def _hidden(analysis: DumpAnalysis, losses: Mapping[str, FormatLosses]) -> list[DumpFinding]:
    """Formats that look good in a layer only because of a few massive elements."""
    found = []
    for name, lost in losses.items():
        hidden = lost.hidden
        if hidden.worst is None:
            continue
        whole, rest = hidden.ratios
        text = (
            f"{format_label(analysis, name)} looks good only because of massive elements in "
            f"{counted(hidden.tensors, 'tensor')} ({layers_named(hidden.layers)}): "
            f"{tensor_title(hidden.worst)} has {decibels(whole)} with them and {decibels(rest)} "
            "without."
        )
        found.append(DumpFinding("warn" if rest < FEW_DB else "info", text, hidden.tensors / 1e9))
    return found


def _loss_scales(analysis: DumpAnalysis) -> list[DumpFinding]:
    found: list[DumpFinding] = []
    for row in analysis["loss_scales"]:
        before, after = percent(figure_of(row, "flush")), percent(figure_of(row, "at_best"))
        if row["least"] > row["largest"]:
            text = (
                f"{row['format']}: no loss scale saves all gradients; at 2^{row['advised']} "
                f"{after} become zero ({before} without)."
            )
            found.append(DumpFinding("warn", text, figure_of(row, "at_best")))
        elif row["least"] > 0:
            text = (
                f"{row['format']}: a loss scale of 2^{row['advised']} (2^{row['least']} to "
                f"2^{row['largest']} will do) lowers the gradients that become zero from {before} "
                f"to {after}."
            )
            found.append(DumpFinding("info", text))
    return found


def rank_findings(analysis: DumpAnalysis) -> list[DumpFinding]:
    """Which rank stands out, in which layers; or that none does."""
    ranks = analysis["ranks"]
    if not ranks or len(ranks["rows"]) < 2:
        return []
    out = ranks["stands_out"]
    cells = ranks.get("cells") or []
    apart = _apart([cell for cell in cells if cell["member"] != out], "rank", len(ranks["rows"]))
    if out is None:
        if apart or (ranks["unequal_weights"] and len(ranks["rows"]) > 2):
            return apart
        return [DumpFinding("info", f"{none_stands_out(len(ranks['rows']))}.")]
    mine = [tensor for tensor in ranks["tensors"] if tensor["farthest"] == out]
    text = f"Rank {out} of {len(ranks['rows'])} stands out{layers_apart(cells, out)}"
    far = worst(mine, lambda tensor: figure_of(tensor, "factor"))
    if far:
        times = brief(far[0][1]) if far[0][1] < _HUGE else "more than 2^60, or all zeros,"
        text += f": a factor of {times} at {tensor_title(far[0][0])}"
    return [DumpFinding("warn", f"{text}."), *apart]


def sample_findings(analysis: DumpAnalysis) -> list[DumpFinding]:
    """Which sample stands out, in which layers; of three or more, or that none does."""
    cells = analysis.get("samples") or []
    count = len({cell["member"] for cell in cells})
    found = _apart(cells, "sample", count)
    if found or count < 3:
        return found
    return [DumpFinding("info", f"No sample of {count} stands out.")]


def _factor_text(log2: float) -> str:
    """Say how much larger a tensor is than its peers; 2^60 and more is any size."""
    if 2.0 ** abs(log2) > _HUGE:
        size = "all zeros or next to it" if log2 < 0 else "more than 2^60 times their size"
        return f", {size}"
    factor = 2.0**log2
    return f", {brief(factor)} times their root mean square" if abs(factor - 1) > 0.01 else ""


def _apart(cells: Sequence[PeerCell], word: str, count: int) -> list[DumpFinding]:
    """Ranks or samples that stand out in some layer; of two, which one of them cannot be told."""
    found: list[DumpFinding] = []
    for member, mine in apart_by_member(cells).items():
        if count == 2 and found:
            break
        first = mine[0]
        who = f"{word.capitalize()} {member} of {count} stands out"
        if count == 2:
            who = " and ".join(map(str, sorted({cell["member"] for cell in cells})))
            who = f"{word.capitalize()}s {who} differ"
        text = (
            f"{who} in {layers_named({cell['layer'] for cell in mine})}: "
            f"{brief(first['ratio'])} times as far from the other {word}s as is usual for such "
            f"tensors, worst at {tensor_title(first)}"
        )
        text += _factor_text(first["log2"])
        found.append(DumpFinding("warn", f"{text}.", first["ratio"] / 1e6))
    return found


def _channels(analysis: DumpAnalysis) -> list[DumpFinding]:
    found = worst([t for t in analysis["tensors"] if t.get("channels")], outliers)
    if not found or found[0][1] < OUTLIER:
        return []
    tensor, factor = found[0]
    channel = tensor["channels"]["largest"][0][0]
    text = (
        f"Channel {channel} of {tensor_title(tensor)} is {brief(factor)} times the median channel."
    )
    return [DumpFinding("info", text)]


def _pairs(analysis: DumpAnalysis) -> list[DumpFinding]:
    told = analysis["comparison"]
    found = worst(told["pairs"] if told else [], lambda pair: -figure_of(pair, "correlation"))
    if not told or not found:
        return []
    pair, value = found[0]
    level: Level = "warn" if -value < CORRELATION else "info"
    text = (
        f"{told['second']} against {told['first']}: least correlation {-value:.4f} of "
        f"{counted(len(told['pairs']), 'pair')}, at {tensor_title(pair)}."
    )
    return [DumpFinding(level, text)]


def summary_line(analysis: DumpAnalysis) -> str:
    """How much was looked at."""
    tensors = analysis["tensors"]
    elements = sum(int(tensor.get("elements") or 0) for tensor in tensors)
    of = figure_of(analysis["settings"], "of_tensors")
    some = f"{len(tensors):,} of {of:,.0f} tensors, evenly spaced"
    parts = [some if of > 0 else counted(len(tensors), "tensor"), f"{elements:,} values"]
    for count, word in (
        (len(by_kind(tensors)), "kind"),
        (len({layer_of(t) for t in tensors if layer_of(t) is not None}), "layer"),
        (len({quant_type_of(t) for t in tensors}), "quant type"),
        (len({t["rank"] for t in tensors}), "rank"),
    ):
        parts.append(counted(count, word))
    return ", ".join(parts)
