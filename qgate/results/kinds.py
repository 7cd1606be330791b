"""Kinds of checks: scopes, what is compared with what; and kinds of limits, what each needs.

A new scope or kind of limit is one literal here. Checks, verdicts, updates, rankings, limits, texts
and pages read its fields; files and rules of limits name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

from qgate.metrics import METRICS
from qgate.registry import Registry

TENSOR_METRICS = ("relative_mse", "one_minus_correlation")


class Tier(IntEnum):
    """Nearness of a failure to its place: the most direct evidence comes first."""

    LOCAL = 0
    LOCAL_ACCEPTED = 1
    NONFINITE = 2
    CARRIED = 3
    BACKWARD = 4
    TASK = 5
    WHOLE = 6
    ABSENT = 7


@dataclass(frozen=True, kw_only=True)
class Scope:
    """One way to measure an error: what it is compared with, and how it is judged.

    name               as results, accepted errors and rules of limits have it
    gated              metrics that need an accepted value
    limits             defaults of limits that differ from those of other scopes
    sources            where metrics come from whose bounds are about it, unless a rule names scopes
    tier               how directly a failure points at its place
    is_local           the error is made at its site: what goes in is right
    enters             the first failure in the order of the model is where the error enters
    spreads            what is wrong at one site may be the cause of errors at others
    has_budget         it is held against the error of an ideal quantizer
    against_noise      it is held against float noise: the expected tensor has the same quantization
    over_tokens        it is a mean over the tokens that blocks carry along
    is_two_sided       an error far below the accepted one fails, too
    is_steady          the tensors stay the same: a smaller error than accepted is another quantizer
    has_grades         its figures are graded in words, and drawn along the blocks
    is_covering        a site that is compared counts as covered
    of_whole_model     it is measured while the whole model runs quantized
    pairs_samples      samples are judged by their mean change, not each by itself
    own_bounds         a row has only the bounds of metrics that it has
    better_words       what a smaller error than accepted means, where that is not "far better"
    """

    name: str
    gated: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    tier: Tier = Tier.CARRIED
    is_local: bool = False
    enters: bool = False
    spreads: bool = True
    has_budget: bool = False
    against_noise: bool = False
    over_tokens: bool = False
    is_two_sided: bool = False
    is_steady: bool = False
    has_grades: bool = False
    is_covering: bool = False
    of_whole_model: bool = False
    pairs_samples: bool = True
    own_bounds: bool = False
    better_words: str = ""

    @property
    def is_task(self) -> bool:
        return self.tier is Tier.TASK

    @property
    def is_gradient(self) -> bool:
        return self.tier is Tier.BACKWARD


SCOPES: Registry[Scope] = Registry("scope")
"""All scopes: the one that tells most of a layer comes first."""


def scope_of(name: str) -> Scope:
    """Return a scope by its name in files; one of another version or suite is a plain one."""
    return SCOPES.entries.get(name) or Scope(name=name)


# How far other weights moved errors is in docs/limits.md: each is the next round share above it.
# The smallest divergence of a task is mostly noise, and gradients are of two samples: other
# instructions moved them by up to 7 %.
for _scope in (
    Scope(
        name="carried", gated=TENSOR_METRICS, over_tokens=True, is_two_sided=True, has_grades=True,
        is_covering=True, of_whole_model=True,
    ),
    Scope(
        name="local", gated=TENSOR_METRICS, tier=Tier.LOCAL, is_local=True, enters=True,
        has_budget=True, is_two_sided=True, has_grades=True, is_covering=True,
        limits={"regression_across_weights": 0.5},
    ),
    Scope(
        name="sweep", gated=("relative_mse",), is_steady=True,
        limits={"regression_across_weights": 4.0},
    ),
    Scope(name="forward", gated=TENSOR_METRICS, sources=("experts",)),
    Scope(
        name="backward", gated=TENSOR_METRICS, tier=Tier.BACKWARD,
        limits={"regression_other_device": 0.1, "regression_across_weights": 9.0},
    ),
    Scope(
        name="task", gated=tuple(metric.name for metric in METRICS.of("task")), tier=Tier.TASK,
        sources=("task", "metric", "long_text"), is_covering=True, of_whole_model=True,
        limits={"regression_other_device": 0.15, "regression_across_weights": 1.0},
    ),
    Scope(
        name="checkpoint", sources=("checkpoint",), tier=Tier.LOCAL, spreads=False, is_steady=True,
        better_words="is not what was accepted",
    ),
    Scope(
        name="engines", sources=("engines",), enters=True, pairs_samples=False, own_bounds=True,
    ),
    Scope(
        name="static", gated=("static_scale",), tier=Tier.LOCAL, is_local=True, enters=True,
        better_words="has another calibrated scale than accepted",
    ),
    Scope(name="isolated", tier=Tier.LOCAL, is_local=True, enters=True, against_noise=True),
):  # fmt: skip
    SCOPES.add(_scope)


# Kinds of limits: what each needs, how bad it is to break one, and its words ----------------------


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
    reasoned_advice  the same for a check that fails by its reason, whatever the limit; else advice
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
    reasoned_advice: str = ""
    usual_source: str = ""
    page_words: str = ""

    def advice_for(self, reason: str, source: str) -> str:
        """Say what to do about a failed check with this reason, if any, and source of its limit."""
        if reason and self.reasoned_advice:
            return self.reasoned_advice
        return self.advice.format(source=source or self.usual_source)


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
    return kind.advice_for(str(check.get("reason") or ""), str(check.get("source") or ""))


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
        reasoned_advice="fix the quantizer, or correct what the mode stands for",
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
