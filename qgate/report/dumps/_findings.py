"""What an analysis found, as sentences: what is broken first, then what is lost, then the rest."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qgate.report.dumps._losses import Losses, Share, losses_in
from qgate.report.dumps._reading import (
    brief,
    by_kind,
    counted,
    decibels,
    figure_of,
    figures_of,
    flushed,
    is_gradient,
    layer_of,
    none_stands_out,
    nonfinite,
    outliers,
    percent,
    quant_type_of,
    saturated,
    sqnr_db,
    tensor_title,
    worst,
)
from qgate.results.portraits import DumpAnalysis, TensorPortrait

Level = Literal["fail", "warn", "info"]
_FEW_DB, _OUTLIER, _CORRELATION = 20.0, 20.0, 0.99
_MUCH_FLUSHED, _MUCH_SATURATED = 0.01, 1e-4
_BARE = {"scaled": False}


@dataclass(frozen=True)
class Finding:
    """One sentence; `fail` breaks a run, `warn` costs accuracy, `info` is good to know. `cost` is
    the share that is lost, and of findings of one level the costly ones come first."""

    level: Level
    text: str
    cost: float = 0.0


@dataclass(frozen=True)
class Bad:
    """A tensor with what is worst about it."""

    tensor: TensorPortrait
    reason: str
    rank: tuple[int, float]


@dataclass(frozen=True)
class Said:
    """What page, text and terminal say of an analysis, found once; `formats` are `format_rows`."""

    findings: list[Finding]
    formats: list[dict[str, Any]]


def said_of(analysis: DumpAnalysis) -> Said:
    losses = losses_in(analysis)
    rows = format_rows(losses)
    return Said(_sorted_findings(analysis, losses, rows), rows)


def findings(analysis: DumpAnalysis) -> list[Finding]:
    """All of them, the broken ones first."""
    return said_of(analysis).findings


def _sorted_findings(
    analysis: DumpAnalysis, losses: Mapping[str, Losses], rows: list[dict[str, Any]]
) -> list[Finding]:
    bare = {
        n: lost for n, lost in losses.items() if not analysis["formats"].get(n, _BARE)["scaled"]
    }
    found = [
        *_nonfinite(analysis),
        *_weights(analysis),
        *_overflow(analysis, bare),
        *_flush(bare),
        *_losses(rows),
        *_loss_scales(analysis),
        *_ranks(analysis),
        *_channels(analysis),
        *_pairs(analysis),
    ]
    order = {"fail": 0, "warn": 1, "info": 2}
    return sorted(found, key=lambda finding: (order[finding.level], -finding.cost))


def _nonfinite(analysis: DumpAnalysis) -> list[Finding]:
    broken = [tensor for tensor in analysis["tensors"] if nonfinite(tensor)]
    if not analysis["tensors"]:
        return [Finding("fail", "The dump holds no tensors to analyze.")]
    if not broken:
        total = counted(len(analysis["tensors"]), "tensor")
        return [Finding("info", f"All values of {total} are finite.")]
    kinds = {
        name: int(figures_of(broken, key).sum())
        for name, key in (("NaN", "nan"), ("+Inf", "posinf"), ("−Inf", "neginf"))
    }
    told = ", ".join(f"{count:,} {name}" for name, count in kinds.items() if count)
    first = min(broken, key=lambda tensor: (tensor["order"], tensor["rank"]))
    holds = "holds" if len(broken) == 1 else "hold"
    return [
        Finding(
            "fail",
            f"{counted(len(broken), 'tensor')} {holds} values that are not finite ({told}); "
            f"the first in order of execution is {tensor_title(first)}.",
        )
    ]


def _weights(analysis: DumpAnalysis) -> list[Finding]:
    ranks = analysis["ranks"]
    if not ranks or not ranks["unequal_weights"]:
        return []
    names = ranks["unequal_weights"]
    text = f"{counted(len(names), 'weight')} not equal on all ranks, such as "
    return [Finding("warn", f"{text}{tensor_title({'title': names[0]})}.")]


def _most(shares: Mapping[str, Share]) -> tuple[str, TensorPortrait, float] | None:
    """The format and the tensor where a share is largest."""
    found = [
        (n, share.tensor, share.most) for n, share in shares.items() if share.tensor is not None
    ]
    return max(found, key=lambda each: each[2], default=None)


def _overflow(analysis: DumpAnalysis, bare: Mapping[str, Losses]) -> list[Finding]:
    most = _most({name: lost.saturated for name, lost in bare.items()})
    if most is None:
        names = [n for n, edges in analysis["formats"].items() if not edges["scaled"]]
        told = f"Cast as they are, no values saturate in {', '.join(names)}."
        return [Finding("info", told)] if names else []
    name, tensor, share = most
    of_all = bare[name].saturated.of_all
    level: Level = "warn" if share > _MUCH_SATURATED else "info"
    return [
        Finding(
            level,
            f"Cast as they are, {percent(of_all)} of all values saturate in {name}; worst "
            f"{percent(share)} in {tensor_title(tensor)}.",
            of_all,
        )
    ]


def _flush(bare: Mapping[str, Losses]) -> list[Finding]:
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
    level: Level = "warn" if share > _MUCH_FLUSHED else "info"
    return [
        Finding(
            level,
            f"Cast as they are, {percent(of_all)} of all {whose} become zero in {name}; worst "
            f"{percent(share)} in {tensor_title(tensor)}.",
            of_all,
        )
    ]


def format_rows(losses: Mapping[str, Losses]) -> list[dict[str, Any]]:
    """One row per format: its worst and median SQNR and its shares, the worst format first."""
    rows = [
        {
            "format": name,
            "tensors": len(lost.ratios),
            "worst_db": lost.worst_db,
            "median_db": lost.median_db,
            "worst": lost.worst,
            "saturated": lost.saturated.of_all,
            "flushed": lost.flushed.of_all,
        }
        for name, lost in losses.items()
        if lost.worst is not None
    ]
    return sorted(rows, key=lambda row: row["worst_db"])


def _losses(rows: list[dict[str, Any]]) -> list[Finding]:
    if not rows:
        return []
    first = rows[0]
    level: Level = "warn" if first["worst_db"] < _FEW_DB else "info"
    text = (
        f"{first['format']} loses most: worst {decibels(first['worst_db'])} at "
        f"{tensor_title(first['worst'])}, median {decibels(first['median_db'])}"
    )
    if len(rows) > 1:
        last = max(rows, key=lambda row: row["median_db"])
        text += f"; {last['format']} loses least: median {decibels(last['median_db'])}"
    return [Finding(level, f"{text}.")]


def _loss_scales(analysis: DumpAnalysis) -> list[Finding]:
    found = []
    for row in analysis["loss_scales"]:
        before, after = percent(figure_of(row, "flush")), percent(figure_of(row, "at_best"))
        if row["least"] > row["largest"]:
            text = (
                f"{row['format']}: no loss scale saves all gradients; at 2^{row['advised']} "
                f"{after} become zero ({before} without)."
            )
            found.append(Finding("warn", text, figure_of(row, "at_best")))
        elif row["least"] > 0:
            text = (
                f"{row['format']}: a loss scale of 2^{row['advised']} (2^{row['least']} to "
                f"2^{row['largest']} will do) lowers the gradients that become zero from {before} "
                f"to {after}."
            )
            found.append(Finding("info", text))
    return found


def _ranks(analysis: DumpAnalysis) -> list[Finding]:
    ranks = analysis["ranks"]
    if not ranks or len(ranks["rows"]) < 2:
        return []
    out = ranks["stands_out"]
    if out is None:
        return [Finding("info", f"{none_stands_out(len(ranks['rows']))}.")]
    mine = [tensor for tensor in ranks["tensors"] if tensor["farthest"] == out]
    text = f"Rank {out} stands out of {len(ranks['rows'])}"
    far = worst(mine, lambda tensor: figure_of(tensor, "factor"))
    if far:
        text += f": a factor of {brief(far[0][1])} at {tensor_title(far[0][0])}"
    return [Finding("warn", f"{text}.")]


def _channels(analysis: DumpAnalysis) -> list[Finding]:
    found = worst([t for t in analysis["tensors"] if t.get("channels")], outliers)
    if not found or found[0][1] < _OUTLIER:
        return []
    tensor, factor = found[0]
    channel = tensor["channels"]["largest"][0][0]
    text = (
        f"Channel {channel} of {tensor_title(tensor)} is {brief(factor)} times the median channel."
    )
    return [Finding("info", text)]


def _pairs(analysis: DumpAnalysis) -> list[Finding]:
    told = analysis["comparison"]
    found = worst(told["pairs"] if told else [], lambda pair: -figure_of(pair, "correlation"))
    if not told or not found:
        return []
    pair, value = found[0]
    level: Level = "warn" if -value < _CORRELATION else "info"
    text = (
        f"{told['second']} against {told['first']}: least correlation {-value:.4f} of "
        f"{counted(len(told['pairs']), 'pair')}, at {tensor_title(pair)}."
    )
    return [Finding(level, text)]


def worst_tensors(analysis: DumpAnalysis, count: int) -> list[Bad]:
    """Tensors by what is worst about them: not finite, saturated or zeroed in a format that brings
    no scales, lossy in one that does, of far outliers."""
    bare = [n for n, edges in analysis["formats"].items() if not edges["scaled"]]
    found = (bad for tensor in analysis["tensors"] if (bad := _bad(tensor, bare)) is not None)
    return heapq.nsmallest(
        count, found, key=lambda bad: (*(-part for part in bad.rank), bad.tensor["order"])
    )


def _bad(tensor: TensorPortrait, bare: list[str]) -> Bad | None:
    broken = nonfinite(tensor)
    if broken:
        return Bad(tensor, f"{broken:,} values not finite", (3, float(broken)))
    told = tensor.get("formats") or {}
    for level, what, verb in ((2, saturated, "saturate"), (1, flushed, "become zero")):
        shares = [(what(told[name]), name) for name in bare if name in told]
        share, name = max(shares, default=(0.0, ""))
        if share > (_MUCH_SATURATED if level == 2 else _MUCH_FLUSHED):
            return Bad(tensor, f"{percent(share)} {verb} in {name}", (level, share))
    ratios = [(sqnr_db(fate), name) for name, fate in told.items()]
    ratio, name = min(((r, n) for r, n in ratios if math.isfinite(r)), default=(math.nan, ""))
    if math.isfinite(ratio):
        return Bad(tensor, f"{decibels(ratio)} in {name}", (0, -ratio))
    factor = outliers(tensor)
    if factor > _OUTLIER:
        return Bad(tensor, f"largest channel {brief(factor)} times the median", (-1, factor))
    return None


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
