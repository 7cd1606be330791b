"""Extent of a run: how many gates were held, what they compared, and which were not, and why.

A gate is one test. Gates count within the modes, models and formats asked for; a mode that fits no
model and a suite on dumps in a run without a dump are not asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from qgate.results.coverage import (
    NOT_COMPARED,
    UNHELD,
    ModeCoverage,
    OmittedGate,
    OmittedGates,
    RunExtent,
    add_coverage,
    coverage_texts,
    gaps_of,
)
from qgate.results.met_shapes import mode_shapes_texts
from qgate.results.schema import Record
from qgate.text import listed

# Groups that a header lists; the gates of the others are in one more group.
_MOST_GROUPS = 200
_MOST_PLACES = 100
# Parts of a sentence: causes, modes of a cause, places of a mode.
_CAUSES, _MODES, _PLACES = 4, 3, 3
# Texts of what was compared, each of modes that were compared to the same extent.
_EXTENTS = 6
_WORDS = {
    "layers": "left out by --layers",
    "deselected": "deselected by",
    "skipped": "skipped",
    "xfailed": "expected to fail (xfail)",
    "not run": "not run",
    "not counted": "not counted",
    "shard": "of a missing shard",
    "baseline": "not run, as the baseline is of something else",
}


def in_ci() -> bool:
    """Return True if the environment says that a CI service runs this."""
    return bool(os.environ.get("CI"))


def new_extent(
    gates: int,
    judged: int,
    omitted: Iterable[OmittedGate],
    coverage: Sequence[ModeCoverage],
    *,
    allowed: bool,
    ci: bool,
    is_shard: bool = False,
) -> RunExtent:
    """Return the extent of a run; a partial one fails in CI unless it was allowed.

    What no gate of a shard compares can be compared in another one.
    """
    by_gate = [
        _omitted(*gate[:4], [gate.layer] if gate.layer else [], int(gate.counted))
        for gate in omitted
    ]
    groups = _grouped([*by_gate, *([] if is_shard else _gaps(coverage))])
    return RunExtent(
        gates=gates, judged=judged, omitted=groups, allowed=allowed,
        fails=_are_missed(groups) and ci and not allowed, coverage=[*coverage],
    )  # fmt: skip


def _omitted(
    cause: str, reason: str, model: str, mode: str, places: Sequence[str] = (), gates: int = 0
) -> OmittedGates:
    return OmittedGates(
        cause=cause, reason=reason, model=model, mode=mode, places=[*places], gates=gates
    )


def _are_missed(groups: Iterable[OmittedGates]) -> bool:
    """Tell if gates are left out that nothing says of: a baseline of something else is an error."""
    return any(group["cause"] != "baseline" for group in groups)


def _gaps(coverage: Iterable[ModeCoverage]) -> list[OmittedGates]:
    """Return what no gate compares, as groups of no gates."""
    return [_omitted(*gap) for gap in gaps_of(coverage)]


def _grouped(omitted: Iterable[OmittedGates]) -> list[OmittedGates]:
    """Join gates of one cause, reason, model and mode."""
    groups: dict[tuple[str, str, str, str], OmittedGates] = {}
    for part in omitted:
        key = (part["cause"], part["reason"], part["model"], part["mode"])
        if key not in groups and len(groups) >= _MOST_GROUPS:
            key = ("not counted", "more places than a header lists", "", "")
        group = groups.setdefault(key, _omitted(*key))
        places = dict.fromkeys([*group["places"], *part["places"]])
        group["places"] = [*places][:_MOST_PLACES]
        group["gates"] += part["gates"]
    return [*groups.values()]


def add_extents(one: RunExtent, other: RunExtent) -> RunExtent:
    """Add the extents of two parts of a run; it fails if one of them does."""
    return RunExtent(
        gates=one["gates"] + other["gates"],
        judged=one["judged"] + other["judged"],
        omitted=_grouped([*one["omitted"], *other["omitted"]]),
        allowed=one["allowed"] and other["allowed"],
        fails=one["fails"] or other["fails"],
        coverage=add_coverage(one.get("coverage") or [], other.get("coverage") or []),
    )


def merged_extent(
    extent: RunExtent, missing: Sequence[int], total: int, *, allowed: bool
) -> RunExtent:
    """Return the extent of shards put together, judged anew, without those that are missing."""
    absent = [_omitted("shard", f"shard {number} of {total}", "", "") for number in missing]
    gates = [group for group in extent["omitted"] if group["cause"] != NOT_COMPARED]
    gaps = [] if absent else _gaps(extent.get("coverage") or [])
    omitted = _grouped([*gates, *absent, *gaps])
    allowed = allowed or (extent["allowed"] and not absent)
    fails = _are_missed(omitted) and in_ci() and not allowed
    return {**extent, "omitted": omitted, "allowed": allowed, "fails": fails}


def extent_of(header: Mapping[str, object] | Record) -> RunExtent | None:
    """Return the extent in a header; None in headers of earlier versions and of killed runs."""
    extent = header.get("extent")
    return extent or None  # type: ignore[return-value]


def is_partial(extent: RunExtent | None) -> bool:
    """Tell if gates that were asked for were not held, or not all was compared."""
    return extent is not None and bool(extent["omitted"])


def lacks_gates(extent: RunExtent | None) -> bool:
    """Tell if gates that were asked for were not held, other than by a failed set-up."""
    groups = [] if extent is None else extent["omitted"]
    return any(group["cause"] not in (NOT_COMPARED, UNHELD) for group in groups)


def extent_text(header: Mapping[str, object] | Record, *, names: bool = True) -> str:
    """Write `gates held: 6 of 12; 6 left out by --layers first (int8 at layers.1, layers.2)`."""
    extent = extent_of(header)
    if extent is None:
        return ""
    held = f"gates held: {extent['judged']:,} of {extent['gates']:,}"
    head = held if extent["gates"] else "this run has no gates"
    return "; ".join([head, *omitted_texts(extent, names=names)])


def partial_head(header: Mapping[str, object] | Record) -> str:
    """Write `only 6 of 12 gates were held` for a run that fails as it is partial, else nothing."""
    extent = extent_of(header)
    if extent is None or not extent["fails"]:
        return ""
    if not lacks_gates(extent):
        if any(group["cause"] == UNHELD for group in extent["omitted"]):
            return "not all that was accepted was held"
        return "not all that the modes compute was compared"
    if extent["judged"] == extent["gates"]:
        return "not all gates were held"
    return f"only {extent['judged']:,} of {extent['gates']:,} gates were held"


def partial_text(header: Mapping[str, object] | Record) -> str:
    """Write the sentence of a run that fails as it is partial; empty for any other run."""
    extent, head = extent_of(header), partial_head(header)
    if extent is None or not head:
        return ""
    why = "; ".join(omitted_texts(extent))
    advice = "Run all of them, or pass --allow-partial if this is intended"
    return f"partial run, {head}: {why}. {advice}"


def covered_texts(header: Mapping[str, object] | Record) -> list[str]:
    """Write what held gates compared, modes of the same extent together; nothing for a shard."""
    extent = extent_of(header)
    if extent is None or header.get("shard"):
        return []
    coverage = extent.get("coverage") or []
    texts = coverage_texts(coverage)
    more = [f"{len(texts) - _EXTENTS:,} other extents of modes in the report"]
    return [f"compared in {text}" for text in texts[:_EXTENTS]] + more * (len(texts) > _EXTENTS)


def coverage_in(header: Mapping[str, object] | Record) -> list[ModeCoverage]:
    """Return what a header says of the modes that held gates compared; nothing of a shard."""
    extent = extent_of(header)
    return [] if extent is None or header.get("shard") else extent.get("coverage") or []


def shapes_texts(header: Mapping[str, object] | Record) -> list[str]:
    """Write the shapes that modules met in each mode, those of few modes."""
    return mode_shapes_texts(coverage_in(header))[:_EXTENTS]


def undeclared_texts(header: Mapping[str, object] | Record) -> list[str]:
    """Name kernels of one's own that do not say what they stand for: nothing judges them."""
    extent = extent_of(header)
    coverage = [] if extent is None else extent.get("coverage") or []
    modes = list(dict.fromkeys(of["mode"] for of in coverage if of.get("undeclared")))
    if not modes:
        return []
    says = "does not say what it stands" if len(modes) == 1 else "do not say what they stand"
    return [
        f"{listed(modes, _MODES)} {says} for: what was recorded first is taken for right "
        '(Kernel(build, stands_for="int8"))'
    ]


def omitted_texts(extent: RunExtent, *, names: bool = True) -> list[str]:
    """Write one text per cause and reason: how many gates, and some of the modes and layers."""
    by_reason: dict[tuple[str, str], list[OmittedGates]] = {}
    for group in extent["omitted"]:
        by_reason.setdefault((group["cause"], group["reason"]), []).append(group)
    several = len({group["model"] for group in extent["omitted"] if group["model"]}) > 1
    texts = [
        _cause_text(cause, reason, groups, several, names=names)
        for (cause, reason), groups in by_reason.items()
    ]
    hidden = sum(group["gates"] for groups in [*by_reason.values()][_CAUSES:] for group in groups)
    more = [f"{hidden:,} for {len(texts) - _CAUSES:,} other reasons"] * (len(texts) > _CAUSES)
    return [*texts[:_CAUSES], *more]


def cause_text(cause: str, reason: str) -> str:
    """Write `skipped: needs a GPU`, or `deselected by -k 'int8'`."""
    words = _WORDS.get(cause, cause)
    if not reason:
        return words
    return f"{words} {reason}" if cause in ("layers", "deselected") else f"{words}: {reason}"


def _cause_text(
    cause: str, reason: str, groups: Sequence[OmittedGates], several_models: bool, *, names: bool
) -> str:
    count = sum(group["gates"] for group in groups)
    if cause in (NOT_COMPARED, UNHELD):
        return _gap_text(reason, groups, several_models)
    if not count:
        places = [name for group in groups for name in group["places"]]
        files = f"all of {listed(places, _PLACES)} " if places else ""
        return f"{files}{cause_text(cause, reason)}"
    wheres = []
    for group in groups if names else ():
        subject = f"{group['model']} {group['mode']}" if several_models else group["mode"]
        layers = listed(group["places"], _PLACES)
        wheres.append(" at ".join(filter(None, [subject.strip(), layers])))
    named = listed(list(filter(None, wheres)), _MODES)
    return f"{count:,} {cause_text(cause, reason)}{f' ({named})' if named else ''}"


def _gap_text(reason: str, groups: Sequence[OmittedGates], several_models: bool) -> str:
    """Write `quantized modules that no gate of this run compares: lm_head (int8, mxfp4)`."""
    modes: dict[tuple[str, ...], list[str]] = {}
    for group in groups:
        mode = f"{group['model']} {group['mode']}" if several_models else group["mode"]
        modes.setdefault(tuple(group["places"]), []).append(mode)
    named = [f"{listed(names, _PLACES)} ({listed(of, _MODES)})" for names, of in modes.items()]
    return f"{reason}: {'; '.join(named[:_MODES])}{' and more' * (len(named) > _MODES)}"
