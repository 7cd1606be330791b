"""What the page of a run of sweeps keeps of each, and what they say together."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NotRequired, TypedDict

from qgate.summaries.record import HIDDEN_DB
from qgate.sweeps.record import (
    USUAL,
    Record,
    decibel_text,
    exponent_text,
    metric,
    mse_cost,
    number,
    offset_text,
    recommended,
    rest_db,
    share_text,
    usual_gap,
    usual_kind,
    usual_level,
)
from qgate.text import counted

KINDS = {"tensor": "one scale", "block": "block offset"}
EQUAL_DB = 0.005
_MOST_NAMED = 20


class SweptFormat(TypedDict):
    """What the page keeps of one sweep: plain data, which an unfinished run writes down."""

    tensor: str
    folder: str
    format: str
    kind: str
    failed: str
    level: str
    exponent: float
    sqnr_db: float
    rest_db: float
    production_db: float
    """SQNR at the usual scale, whatever it is."""
    gap_db: float
    usual: NotRequired[str]
    mse_cost: NotRequired[str]
    overflow: float
    overflow_energy: float
    flush: float
    severe: bool
    metrics: dict[str, float]
    files: list[str]
    pictures: list[tuple[str, int, int]]


def entry_of(
    record: Record, folder: str, files: Sequence[str], pictures: Mapping[str, bytes]
) -> SweptFormat:
    best, used = recommended(record), usual_level(record)
    offset = record["kind"] == "block"
    return {
        "tensor": str(record["tensor"].get("source") or record["tensor"]["name"]),
        "folder": folder,
        "format": str(record["format"]["name"]),
        "kind": str(record["kind"]),
        "failed": str(record.get("failed") or ""),
        "level": "" if best is None else _level(best["exponent"], offset),
        "exponent": math.nan if best is None else number(best["exponent"]),
        "sqnr_db": math.nan if best is None else metric(best, "sqnr_db"),
        "rest_db": math.nan if best is None else rest_db(best),
        "production_db": math.nan if used is None else metric(used, "sqnr_db"),
        "gap_db": usual_gap(record),
        "usual": USUAL[usual_kind(record)],
        "mse_cost": mse_cost(record),
        "overflow": math.nan if best is None else number(best["overflow_share"]),
        "overflow_energy": math.nan if best is None else number(best["overflow_energy"]),
        "flush": math.nan if best is None else number(best["flush_share"]),
        "severe": best is not None and best["severity"]["overflow"] == "high",
        "metrics": {} if best is None else {name: metric(best, name) for name in best["metrics"]},
        "files": list(files),
        "pictures": [(name, *_size(data)) for name, data in pictures.items()],
    }


def _level(exponent: object, offset: bool) -> str:
    return offset_text(exponent) if offset else f"2^{exponent_text(exponent)}"


def _size(data: bytes) -> tuple[int, int]:
    """Of a PNG, from its head."""
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def findings(
    entries: Sequence[SweptFormat], results: Sequence[tuple[str, str | None]]
) -> list[tuple[str, str]]:
    bad = [(name, reason) for name, reason in results if reason]
    rows = [("fail", f"{name}: {reason}") for name, reason in bad[:_MOST_NAMED]]
    if len(bad) > _MOST_NAMED:
        rows.append(("fail", f"and {len(bad) - _MOST_NAMED} more tensors that failed"))
    groups: dict[tuple[str, str, str], list[SweptFormat]] = {}
    for each in entries:
        key = (each["format"], each["kind"], each.get("usual", ""))
        groups.setdefault(key, []).append(each)
    for (name, kind, _), mine in groups.items():
        rows += _about(f"{name}, {KINDS.get(kind, kind)}", mine)
    if not rows:
        rows.append(("info", "nothing was swept"))
    return sorted(rows, key=lambda row: ("fail", "warn", "info").index(row[0]))


def _about(what: str, mine: Sequence[SweptFormat]) -> list[tuple[str, str]]:
    rows = []
    severe = [each for each in mine if each["severe"]]
    if severe:
        worst = max(severe, key=lambda each: each["overflow"])
        rows.append(
            (
                "warn",
                f"{what}: even the recommended level saturates more than 1% of "
                f"{counted(len(severe), 'tensor')} of {len(mine)}, most of {worst['tensor']}: "
                f"{share_text(worst['overflow'])}",
            )
        )
    hidden = [each for each in mine if each["sqnr_db"] - each["rest_db"] > HIDDEN_DB]
    if hidden:
        worst = min(hidden, key=lambda each: each["rest_db"])
        rows.append(
            (
                "warn",
                f"{what}: massive elements make SQNR look more than {HIDDEN_DB:g} dB better than "
                f"it is in {len(hidden)} of {len(mine)}, {worst['tensor']} among them: "
                f"{decibel_text(worst['sqnr_db'])}, {decibel_text(worst['rest_db'])} without them",
            )
        )
    usual = mine[0].get("usual", USUAL["production"])
    gaps = [each for each in mine if math.isfinite(each["gap_db"])]
    lower = [each for each in gaps if each["gap_db"] <= -EQUAL_DB]
    if lower:
        worst = min(lower, key=lambda each: each["gap_db"])
        rows.append(
            (
                "warn",
                f"{what}: the recommended level costs SQNR against {usual} in {len(lower)} of "
                f"{len(mine)}, most in {worst['tensor']}: {worst['level']}, "
                f"{worst['gap_db']:+.2f} dB",
            )
        )
    higher = [each for each in gaps if each["gap_db"] >= EQUAL_DB]
    if higher:
        best = max(higher, key=lambda each: each["gap_db"])
        rows.append(
            (
                "info",
                f"{what}: the recommended level is better than {usual} in {len(higher)} of "
                f"{len(mine)}, most in {best['tensor']}: {best['level']}, {best['gap_db']:+.2f} dB",
            )
        )
    ratios = [each for each in mine if not math.isnan(each["sqnr_db"])]
    if ratios:
        least = min(ratios, key=lambda each: each["sqnr_db"])
        middle = median(each["sqnr_db"] for each in ratios)
        rows.append(
            (
                "info",
                f"{what}: SQNR at the recommended level is {decibel_text(middle)} in the median, "
                f"least {decibel_text(least['sqnr_db'])} of {least['tensor']}",
            )
        )
    return rows
