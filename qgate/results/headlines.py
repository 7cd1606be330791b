"""The verdict of a run in words, the same in terminal, Markdown, comment and page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qgate.results.coverage import total_text
from qgate.results.extent import extent_of, partial_head
from qgate.results.other_tests import (
    ended_badly,
    is_finished,
    other_tests_of,
    other_tests_text,
)
from qgate.results.summary import Tally
from qgate.text import counted, listed, shortened

_LISTED, _GREEN, _LONGEST = 4, 2, 60


def verdict_texts(
    tally: Tally, header: Mapping[str, Any], errors: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return the verdict of a run, and what else is to be said of it, the worst first.

    errors   what failed beside gates, such as files that could not be written
    """
    gates, is_ended = counted(tally.gates, "gate"), is_finished(header)
    broken, partial = header.get("broken") or {}, partial_head(header)
    other = other_tests_text(other_tests_of(header))
    failed, new = tally.failed_gates - tally.new_gates, tally.new_gates
    passed = f"{gates} passed" if tally.gates else "nothing was compared"
    also = [
        other,
        "" if is_ended else "the run did not finish",
        f"partial run, {partial}" if partial else "",
    ]
    if broken:
        of_gates = f"{len(broken):,} gates, their" if len(broken) > 1 else "one gate, its"
        also.insert(0, f"no verdict for {of_gates} set-up failed")
    if failed:
        first = f"{failed:,} of {gates} failed{f', {new:,} new' * (new > 0)}{_faults_text(tally)}"
    elif new:
        verb = "has" if new == 1 else "have"
        first = f"{new:,} of {gates} {verb} nothing to be compared with yet"
    elif errors and not broken:
        first = "the run failed"
    elif any(also):
        first, also = next(filter(None, also)), [*also, "" if broken else passed]
    elif not tally.gates:
        first = "no gate ran, and nothing was compared"
    elif ended := ended_badly(header):
        first, also = "the run failed", [f"{passed}, and {ended}"]
    else:
        first = f"{passed}{_extent_text(header)}"
    return first, [text for text in also if text and text != first]


def verdict_text(tally: Tally, header: Mapping[str, Any], errors: Sequence[str] = ()) -> str:
    """Return the verdict of a run in one line."""
    first, also = verdict_texts(tally, header, errors)
    return "; ".join([first, *also])


def _faults_text(tally: Tally) -> str:
    """Write `, 1 fault in my_int8 (green: int8)`."""
    causes, modes = tally.causes, tally.modes
    failed = _names(mode for cause in causes for _, mode in cause.places)
    failed = failed or _names(mode.mode for mode in modes if mode.failed)
    green = _names(mode.mode for mode in modes if not mode.failed)
    faults = f", {counted(len(causes), 'fault')}" if causes else ""
    where = f" in {listed(failed, _LISTED)}" if failed else ""
    return f"{faults}{where}{f' (green: {listed(green, _GREEN)})' if green else ''}"


def _extent_text(header: Mapping[str, Any]) -> str:
    """Write ` of shard 1/2: mode 2-1 of tiny-mamba; 30/30 modules, 5/5 layers`."""
    shard = header.get("shard") or {}
    part = f" of shard {shard.get('number')}/{shard.get('of')}" if shard else ""
    extent = extent_of(header)
    coverage = [] if extent is None else extent.get("coverage") or []
    modes, models = (_names(of[name] for of in coverage) for name in ("mode", "model"))
    if not modes:
        return part
    word = "mode" if len(modes) == 1 else "modes"
    about = f"{word} {listed(modes, _LISTED)} of {listed(models, _LISTED)}"
    return f"{part}: {about}; {total_text(coverage)}"


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(shortened(name, _LONGEST) for name in names))
