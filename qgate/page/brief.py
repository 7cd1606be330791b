"""The end of a run on a terminal in a few lines: what -v and the page say at length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qgate.page.terminal import (
    NARROWEST,
    TerminalLine,
    hidden_cause_lines,
    improved_text,
    partial_lines,
    unknown_lines,
    wrapped_lines,
    wrong_lines,
)
from qgate.results.extent import (
    coverage_in,
    covered_texts,
    extent_of,
    lacks_gates,
    partial_head,
)
from qgate.results.failure_causes import FailureCause
from qgate.results.headlines import verdict_texts
from qgate.results.met_shapes import unmet_text
from qgate.results.power import least_power_text
from qgate.results.run_facts import RUN_FACTS
from qgate.results.summary import Tally
from qgate.text import beginning

_CAUSES = 10
_REST = " (-v says all)"


def green_lines(
    tally: Tally, width: int, header: Mapping[str, Any], unasked: Sequence[str]
) -> list[TerminalLine]:
    """Return the end of a run in which every gate that was asked for passed, in a few lines."""
    power_words = least_power_text(header)
    details = [f"  {text}" for text in filter(None, (power_words, improved_text(tally)))]
    details += _unasked_texts(unasked)
    unmet = unmet_text(coverage_in(header))
    noted = [f"  {words}" for words in (*_fact_texts(header, 2 * width - 2), unmet) if words]
    return [
        *wrapped_lines([verdict_texts(tally, header)[0]], width, "green"),
        *wrapped_lines(noted, width, "yellow"),
        *wrapped_lines(details, width),
    ]


def _fact_texts(header: Mapping[str, Any], room: int) -> list[str]:
    """Return warnings and notes, those that are longer than the room in brief."""
    texts = []
    for fact in RUN_FACTS:
        # How much was compared stands in the verdict.
        if not fact.tone_of(header) or fact.lines is covered_texts:
            continue
        lines = fact.lines(header)
        if fact.brief is not None and max(map(len, lines), default=0) > room:
            lines = [line + _REST for line in fact.brief(header)]
        texts += [
            beginning(line, room - len(_REST)) + _REST if len(line) > room else line
            for line in lines
        ]
    return texts


def red_lines(
    tally: Tally, width: int, header: Mapping[str, Any], folder: str
) -> list[TerminalLine]:
    """Return the end of a run in which gates failed: causes, counts, where else all is right.

    folder   of the scripts that compare tensors again, from where the run was started
    """
    causes = tally.causes
    blocks = [
        line
        for number, cause in enumerate(causes[:_CAUSES])
        for line in _block("failed" if number else "cause", cause, width, folder)
    ]
    return [
        *blocks,
        *hidden_cause_lines(len(causes) - _CAUSES),
        *wrapped_lines(_unmeasured_texts(causes, header), width, "yellow"),
        *_refusal_lines(causes, width),
        *unknown_lines(tally, width),
        *partial_lines(header),
        *wrapped_lines([verdict_texts(tally, header)[0]], width, "red"),
        *wrong_lines(tally, width, header),
        *wrapped_lines(_fact_texts(header, max(width, NARROWEST)), width, "yellow"),
    ]


def _block(word: str, cause: FailureCause, width: int, folder: str) -> list[TerminalLine]:
    """Return what is wrong, the gates that follow, the code, and what compares it again."""
    suspect = cause.suspect
    see = f"  see {suspect.code}" if suspect.code else ""
    script = (
        f"  again: python {folder}/{suspect.script}/run.py" if suspect.script and folder else ""
    )
    steps = [f"{see}{script}"] if see and len(see) + len(script) <= width else [see, script]
    followers = f"  {cause.followers_text}" if cause.followers_text else ""
    return [
        *wrapped_lines([f"{word}: {cause.sentence()}"], width, "red"),
        *wrapped_lines([followers] if followers else [], width),
        *map(TerminalLine, filter(None, steps)),  # whole, to be copied
    ]


def _unmeasured_texts(causes: Sequence[FailureCause], header: Mapping[str, Any]) -> list[str]:
    """Say that a gate which was left out may name the cause, where no local error was found."""
    is_sought = causes and not any(cause.suspect.is_local or cause.plan for cause in causes)
    if not is_sought or not lacks_gates(extent_of(header)):
        return []
    return ["a gate that this run left out may name the cause: run all of the mode"]


def _refusal_lines(causes: Sequence[FailureCause], width: int) -> list[TerminalLine]:
    """Say what to do about causes that no update accepts."""
    advice = [cause.suspect.advice for cause in causes if not cause.is_acceptable]
    texts = "; ".join(dict.fromkeys(filter(None, advice)))
    return wrapped_lines([f"cannot be accepted: {texts}"] if texts else [], width, "red")


def _unasked_texts(unasked: Sequence[str]) -> list[str]:
    return [f"  not asked for: {', '.join(unasked)} (-v says how)"] if unasked else []


def is_green(tally: Tally, header: Mapping[str, Any]) -> bool:
    """Tell if all that a run held passed, and it came to its end; of a shard another tells."""
    return bool(
        tally.counts.passed
        and not (tally.counts.failed or tally.unknown)
        and not wrong_lines(tally, NARROWEST, header)
        and not (header.get("shard") or partial_head(header))
    )
