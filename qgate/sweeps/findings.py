"""Entries of a page of sweeps, and findings over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NotRequired, TypedDict

from qgate.summaries.record import HIDDEN_DB
from qgate.sweeps.record import (
    USUAL,
    FormatChoice,
    SweepRecord,
    SweepView,
    metric,
    number,
    share_text,
    short,
    sqnr_without_massive,
)
from qgate.text import counted, decibels
from qgate.text.findings import Finding, Level, worst_first

KINDS = {"tensor": "one scale", "block": "block offset"}
EQUAL_DB = 0.005
_MOST_NAMED = 20


class SweptFormat(TypedDict):
    """Entry of one sweep on the page: plain data, which an unfinished run stores."""

    tensor: str
    folder: str
    format: str
    kind: str
    about: str
    """Shape, dtype and largest magnitude of the tensor."""
    failed: str
    level: str
    exponent: float
    sqnr_db: float
    rest_db: float
    production_db: float
    """SQNR at the usual scale, of whichever kind."""
    gap_db: float
    usual: str
    mse_cost: str
    overflow: float
    overflow_energy: float
    flush: float
    severe: bool
    metrics: dict[str, float]
    files: list[str]
    curve: NotRequired[list[tuple[float, float]]]
    """The exponent and the relative MSE of every level that has one."""
    used: NotRequired[float | None]
    """The exponent of the usual scale, if a level has it."""
    choices: NotRequired[list[FormatChoice]]


def entry_of(record: SweepRecord, folder: str, files: Sequence[str]) -> SweptFormat:
    view = SweepView(record)
    best = view.best
    shape = " x ".join(map(str, view.tensor["shape"] or ())) or "one value"
    return {
        "tensor": str(view.tensor.get("source") or view.tensor["name"]),
        "folder": folder,
        "format": str(view.format["name"]),
        "kind": record["kind"],
        "about": f"{shape} {view.tensor['dtype']}, largest magnitude {short(view.tensor['amax'])}",
        "failed": record["failed"] or "",
        "level": view.power(best),
        "exponent": number(best["exponent"]),
        "sqnr_db": metric(best, "sqnr_db"),
        "rest_db": sqnr_without_massive(best),
        "production_db": metric(view.usual, "sqnr_db") if view.usual else math.nan,
        "gap_db": view.gap_db,
        "usual": USUAL[view.usual_kind],
        "mse_cost": view.mse_cost,
        "overflow": number(best["overflow_share"]),
        "overflow_energy": number(best["overflow_energy"]),
        "flush": number(best["flush_share"]),
        "severe": best["severity"]["overflow"] == "high",
        "metrics": {name: metric(best, name) for name in best["metrics"]},
        "files": list(files),
        "curve": [
            (number(level["exponent"]), error)
            for level in view.levels
            if 0 <= (error := metric(level, "relative_mse")) < math.inf
        ],
        "used": number(view.usual["exponent"]) if view.usual else None,
        "choices": record.get("choices", []),
    }


def findings(
    entries: Sequence[SweptFormat], results: Sequence[tuple[str, str | None]]
) -> list[Finding]:
    bad = [(name, reason) for name, reason in results if reason]
    rows = [Finding("fail", f"{name}: {reason}") for name, reason in bad[:_MOST_NAMED]]
    if len(bad) > _MOST_NAMED:
        rows.append(Finding("fail", f"and {len(bad) - _MOST_NAMED} more tensors that failed"))
    groups: dict[tuple[str, str, str], list[SweptFormat]] = {}
    for entry in entries:
        # What a tensor with NaN or infinities says of its other values is no advice.
        if not entry["failed"]:
            groups.setdefault((entry["format"], entry["kind"], entry["usual"]), []).append(entry)
    for (name, kind, usual), group in groups.items():
        rows += [
            Finding(level, f"{name}, {KINDS[kind]}: {text}") for level, text in _group(group, usual)
        ]
    return worst_first(rows or [Finding("info", "nothing was swept")])


def _group(group: Sequence[SweptFormat], usual: str) -> Iterator[tuple[Level, str]]:
    """Yield findings over the sweeps of one format, each with the worst or best tensor."""
    count = len(group)
    severe = [entry for entry in group if entry["severe"]]
    if severe:
        worst = max(severe, key=lambda entry: entry["overflow"])
        yield (
            "warn",
            f"even the recommended level saturates more than 1 % of the values in "
            f"{len(severe)} of {counted(count, 'tensor')}, most in {worst['tensor']}: "
            f"{share_text(worst['overflow'])}",
        )
    hidden = [entry for entry in group if entry["sqnr_db"] - entry["rest_db"] > HIDDEN_DB]
    if hidden:
        worst = min(hidden, key=lambda entry: entry["rest_db"])
        yield (
            "warn",
            f"massive elements make SQNR look more than {HIDDEN_DB:g} dB better than it is in "
            f"{len(hidden)} of {counted(count, 'tensor')}, {worst['tensor']} among them: "
            f"{decibels(worst['sqnr_db'], 2)}, {decibels(worst['rest_db'], 2)} without them",
        )
    gaps = [entry for entry in group if math.isfinite(entry["gap_db"])]
    scale = "offset" if group[0]["kind"] == "block" else "scale"
    for sign, text in ((-1, "less"), (1, "more")):
        beyond = [entry for entry in gaps if sign * entry["gap_db"] >= EQUAL_DB]
        if beyond:
            most = max(beyond, key=lambda entry: sign * entry["gap_db"])
            gain = f"{most['level']} has {abs(most['gap_db']):.2f} dB {text}"
            if count == 1:
                yield "info", f"the {scale} {gain} SQNR than {usual} in {most['tensor']}"
                continue
            yield (
                "info",
                f"the recommended {scale} has {text} SQNR than {usual} in {len(beyond)} of "
                f"{counted(count, 'tensor')}, most in {most['tensor']}: {gain}",
            )
    ratios = [entry for entry in group if not math.isnan(entry["sqnr_db"])]
    if ratios:
        least = min(ratios, key=lambda entry: entry["sqnr_db"])
        middle = decibels(median(entry["sqnr_db"] for entry in ratios), 2)
        of_tensors = f" in the median, lowest {decibels(least['sqnr_db'], 2)} of {least['tensor']}"
        if count == 1:
            of_tensors = f" in {least['tensor']}"
        yield "info", f"SQNR at the recommended {scale} is {middle}{of_tensors}"
