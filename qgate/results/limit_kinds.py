"""Kinds of limits: what each needs, how bad it is to break one, and its words.

A new kind is one literal here. Verdicts, updates, rankings, texts and pages read its fields; files
name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from qgate.registry import Registry
from qgate.results.scopes import Tier

NO_ACCEPTED = "no accepted value"


class CheckWords(Protocol):
    """The part of a failed check that a sentence about it reads."""

    @property
    def metric(self) -> str: ...
    @property
    def times(self) -> float | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def accepted_on(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class LimitKind:
    """A kind of limit, by what is compared with what.

    name             as results have it
    needs_accepted   it needs an accepted value or a chosen limit; others say what is right
    is_acceptable    an update of the accepted errors can cure it
    bars_mode        of a mode with such a failure nothing else is accepted: it says what is right
    is_accepted      a value is compared with its accepted one
    is_ideal         a value is compared with the error of an ideal quantizer
    is_new           nothing is known to be wrong: there is nothing accepted to compare with
    is_absent        what was accepted was not measured
    is_nonfinite     values are NaN or infinite
    has_number       there is a value to compare
    has_room         a value may grow up to a bound, so the distance says what the limit would see
    severity         of a failure without a number: 0, or 2 where it is wrong without doubt
    tier             how directly a failure points at its place, where the scope does not decide it
    separator        ends the fault in a reason that says it, before the figures
    says_fault       the fault stands before the figures where nothing names it better
    sentence         writes a failed check and its place, where no figures do
    fault            what a failed check means, after the name of its place
    why              what limit it is, after the figures; `{reason}` is that of the check
    advice           what to do where no update helps; `{source}` is where the limit was set
    usual_source     what stands for that where no check says it
    page_words       what limit it is, in a table, with `{allowed}`, `{percent}` and `{quantizer}`
    """

    name: str
    needs_accepted: bool = False
    is_acceptable: bool = False
    bars_mode: bool = False
    is_accepted: bool = False
    is_ideal: bool = False
    is_new: bool = False
    is_absent: bool = False
    is_nonfinite: bool = False
    has_number: bool = True
    has_room: bool = False
    severity: int = 0
    tier: Tier | None = None
    separator: str = ""
    says_fault: bool = False
    sentence: Callable[[CheckWords, str], str] | None = None
    fault: str = "is wrong"
    why: str = ""
    advice: str = ""
    usual_source: str = ""
    page_words: str = ""


LIMIT_KINDS: Registry[LimitKind] = Registry("kind of limit")
"""All kinds of limits, in the order of their advice."""


def limit_kind_of(name: str) -> LimitKind:
    """Return a kind of limit by its name in files; one of another version is a plain one."""
    return LIMIT_KINDS.entries.get(name) or LimitKind(name=name)


def barred_modes(rows: Iterable[Mapping[str, Any]], model: str) -> dict[str, str]:
    """Return the modes of a model of which nothing is accepted, each with a site that bars it."""
    barred: dict[str, str] = {}
    for row in rows:
        if row["model"] != model or row["passed"]:
            continue
        if any(limit_kind_of(c["kind"]).bars_mode for c in row["checks"] if not c["passed"]):
            barred.setdefault(str(row["mode"]), str(row["site"]))
    return barred


def advice_on(check: Mapping[str, Any]) -> str:
    """Say what to do about a failed check that no update accepts; nothing where one can."""
    kind = limit_kind_of(check["kind"])
    return kind.advice.format(source=check.get("source") or kind.usual_source)


def _reason_after(words: str) -> Callable[[CheckWords, str], str]:
    """Return what writes words, the place, and the reason of a check."""

    def sentence(check: CheckWords, where: str) -> str:
        return f"{words}{f' {where}:' if where else ','} {check.reason}"

    return sentence


def _missing(check: CheckWords, where: str) -> str:
    lacking = f", {check.reason}" if check.reason not in ("", NO_ACCEPTED) else ""
    at = f" {where}" if where else ""
    return f"no accepted {check.metric}{at}{lacking}: record it with --update-baselines"


def _absent(check: CheckWords, where: str) -> str:
    reason = "it has accepted errors, the set of sites changed"
    if check.accepted_on:
        reason += f" (only an update on {check.accepted_on} removes them)"
    return f"not measured {where}: {reason}" if where else reason


def _nothing(check: CheckWords, where: str) -> str:
    if check.times is None:
        colon = f" {where}:" if where else ","
        return f"nothing compared{colon} a gate that compared nothing does not pass"
    return f"not in effect {where}: {check.reason}" if where else check.reason


for _kind in (
    LimitKind(
        name="nonfinite", is_nonfinite=True, tier=Tier.NONFINITE, fault="is not finite",
        advice="find what overflows or divides by zero",
    ),
    LimitKind(
        name="conformance", bars_mode=True, separator="; ", sentence=_reason_after("wrong values"),
        advice="fix the quantizer or the module: it gives other values than it has to",
    ),
    LimitKind(
        name="finding", tier=Tier.LOCAL, separator=": ", sentence=_reason_after("not as declared"),
        advice="mend what it names, or allow it by a rule of limits that says why",
    ),
    LimitKind(
        name="isolated", bars_mode=True, has_room=True, says_fault=True,
        fault="is not what FP32 code makes of the same tensors",
        why="only float noise is allowed",
        advice="find what differs from FP32 code there",
        page_words="float noise of FP32 code fed with the same tensors",
    ),
    LimitKind(
        name="absolute", needs_accepted=True, has_room=True, why="absolute limit{reason}",
        fault="is beyond a limit of its suite",
        advice="fix the mode or change the limit ({source})", usual_source="its suite",
        page_words="an absolute limit",
    ),
    LimitKind(
        name="budget", bars_mode=True, is_ideal=True, has_room=True,
        advice="fix the quantizer or raise budget_db ({source})", usual_source="default",
        page_words="more than {allowed:g} dB over an ideal {quantizer} quantizer",
    ),
    LimitKind(
        name="nothing", has_number=False, severity=2, sentence=_nothing, fault="is not in effect",
        advice="put the mode into effect, or give the site something to compare",
    ),
    LimitKind(
        name="regression", needs_accepted=True, is_acceptable=True, is_accepted=True,
        has_room=True, fault="is worse than accepted",
        page_words="at most {percent:.3g} % from what was accepted",
    ),
    LimitKind(
        name="missing", needs_accepted=True, is_acceptable=True, is_new=True, has_number=False,
        sentence=_missing, fault="has no accepted value", page_words="no error was accepted yet",
    ),
    LimitKind(
        name="absent", needs_accepted=True, is_acceptable=True, is_absent=True, has_number=False,
        tier=Tier.ABSENT, sentence=_absent, fault="was not measured",
    ),
):  # fmt: skip
    LIMIT_KINDS.add(_kind)
