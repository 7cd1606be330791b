"""Causes of a failed run: the places where it went wrong, and the gates that follow from each.

A local error is measured with the reference's tensors as inputs, so it is made at its place. An
error that is carried along comes from the first place before it, in the order of the model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from qgate.metrics import METRICS
from qgate.metrics.plan_changes import PlanChange
from qgate.results.checks import severity, view_of
from qgate.results.kinds import Tier, advice_on, limit_kind_of, scope_of
from qgate.text import counted, listed, one_line, shortened

# Suspects kept per test and mode, the most likely first.
MOST_SUSPECTS = 40
REFERENCE = "fp32"
_QUANTIZED_PORTS = ("input", "weight")
Relation = Literal["same", "follows", ""]
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_OF_ONE_TENSOR = re.compile(r" \([^()]* differ\)|\d+ of \d+ (?=\(the last one\))")
_ALIKE = 0.05
"""Distance of two figures that may be one, as a share of the larger."""
_KINDS = ("layer", "gradient", "gate", "the logits", "the task")
_MODES, _LONGEST_NAME, _LONGEST_WORDS = 3, 120, 400
_SUBJECTS = (
    "its ", "the ", "all ", "each ", "every ", "no ", "a ", "an ", "one ", "row ", "rows ",
    "this ", "it ",
)  # fmt: skip
"""Words that a fault begins with which has a subject of its own, and stands behind a colon."""


class Suspect(NamedTuple):
    """A failed comparison that may be the cause of others; the likeliest sorts first."""

    tier: Tier
    order: int
    site: str
    scope: str
    layer: str
    model: str
    mode: str
    node: str
    fault: str
    figures: str
    quantizer: str
    is_diagnosed: bool
    advice: str = ""
    code: str = ""
    script: str = ""

    @property
    def is_local(self) -> bool:
        return self.tier <= Tier.LOCAL_ACCEPTED

    @property
    def gate_kind(self) -> str:
        """Return the kind of gate that failed, with an article where a mode has one such gate."""
        scope = scope_of(self.scope)
        if scope.is_task:
            return "the task"
        if self.site == "logits":
            return "the logits"
        if self.tier in (Tier.WHOLE, Tier.ABSENT) or not self.layer:
            return "gate"
        return "gradient" if scope.is_gradient else "layer"

    @property
    def cast(self) -> str:
        """Return the format of a tensor that a quantizer makes, nothing for a module's output."""
        is_made = self.site.rpartition(":")[2] in _QUANTIZED_PORTS
        return self.quantizer.partition(" ")[0] if is_made else ""


def said_of(place: str, fault: str) -> str:
    """Write a place and its fault, which is said of the place, or a sentence by itself."""
    is_sentence = fault.startswith(_SUBJECTS) or fault[:1].isdigit()
    return f"{place}{':' * is_sentence} {fault}"


@dataclass
class FailureCause:
    """One cause: where it is, in which modes, and which gates fail because of it.

    places   the modes of models that it is in
    same     other sites with the same fault, in the mode that has most of them
    gates    tests that fail because of it, its own among them, with the kind of each
    alike    those of them that do not follow: they have the same fault, or one of their own
    plan     the change of the plan that it is, None for an error
    """

    suspect: Suspect
    places: list[tuple[str, str]]
    same: int = 0
    gates: dict[str, str] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)
    plan: PlanChange | None = None
    _layers: dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return shortened(self.suspect.site, _LONGEST_NAME)

    @property
    def followers(self) -> int:
        """Number of other gates that follow from it."""
        return len(self.gates.keys() - {self.suspect.node})

    @property
    def is_acceptable(self) -> bool:
        """Tell if an update could accept it: the limit needs an accepted value."""
        return self.suspect.tier not in (Tier.LOCAL, Tier.NONFINITE)

    def title(self) -> str:
        """Write place and fault, for a headline with the figures below it."""
        if self.plan is not None:
            return one_line(f"the plan changed: {self.plan.text(f' of {self._modes()}')}")
        where = f"{self.place} ({self._modes()})"
        return one_line(said_of(where, shortened(self.suspect.fault, _LONGEST_NAME)))

    @property
    def followers_text(self) -> str:
        """Write `follow from it: 3 gradients, the logits, the task`, or nothing."""
        counts = Counter(kind for node, kind in self.gates.items() if node not in self.alike)
        kinds = ", ".join(
            counted(counts[kind], kind)
            if not kind.startswith("the ")
            else f"{kind} {counts[kind]} times"
            if counts[kind] > 1
            else kind
            for kind in _KINDS
            if counts[kind]
        )
        return f"follow{'s' * (counts.total() == 1)} from it: {kinds}" if kinds else ""

    def figures(self) -> str:
        """Write figures, other sites and the gates that follow; what a title leaves out."""
        same = f"the same at {counted(self.same, 'other site')}" if self.same else ""
        words = "" if self.plan is not None else shortened(self.suspect.figures, _LONGEST_WORDS)
        parts = filter(None, [one_line(words), same, self.following().removeprefix("; ")])
        return "; ".join(parts)

    def sentence(self) -> str:
        """Write place, fault, figures and limit, without the gates that follow."""
        if self.plan is not None:
            return self.title()
        also = f"; the same at {counted(self.same, 'other site')}" if self.same else ""
        words = ": ".join(filter(None, [self.suspect.fault, self.suspect.figures]))
        where = f"{self.place} ({self._modes()})"
        return one_line(f"{said_of(where, shortened(words, _LONGEST_WORDS))}{also}")

    def text(self) -> str:
        """Write the sentence, and how many other gates follow from it."""
        return f"{self.sentence()}{self.following()}"

    def following(self) -> str:
        """Write `; follow from it: 3 gradients, the logits`, or nothing."""
        return f"; {self.followers_text}" if self.followers_text else ""

    def explains(self, other: Suspect) -> Relation:
        """Say how another failure of the mode comes from this one: same, follows or neither."""
        first = self.suspect
        if not scope_of(first.scope).spreads:
            # Weights are stored one by one: what is wrong with one is no cause of another.
            return "same" if other.fault == first.fault else ""
        if Tier.ABSENT in (other.tier, first.tier):
            return "same" if other.tier == first.tier else ""
        if other.is_local and first.is_local:
            if other.is_diagnosed:
                is_same = is_one_fault(other.fault, first.fault)
            else:
                is_same = bool(other.cast) and other.cast == first.cast
            below: Relation = "follows" if self._is_below(other) else ""
            return "same" if is_same else below
        if other.is_local:
            return ""
        if scope_of(other.scope).is_gradient:
            in_layer = other.layer in self._layers or scope_of(first.scope).is_gradient
            return "follows" if in_layer else ""
        is_later = other.order >= first.order or other.tier in (Tier.TASK, Tier.WHOLE)
        return "follows" if is_later else ""

    def _is_below(self, other: Suspect) -> bool:
        return bool(other.layer) and other.order >= self._layers.get(other.layer, other.order + 1)

    def note_layer(self, suspect: Suspect) -> None:
        """Note that the fault is in the layer of a suspect from its place on."""
        order = self._layers.get(suspect.layer, suspect.order)
        self._layers[suspect.layer] = min(order, suspect.order)

    def _modes(self) -> str:
        """Write `tiny-llama, modes int8, mxfp4 and 2 more`."""
        models, modes = (
            [shortened(name, _LONGEST_NAME) for name in dict.fromkeys(names)]
            for names in zip(*self.places, strict=True)
        )
        word = "mode" if len(modes) == 1 else "modes"
        return f"{listed(models, _MODES)}, {word} {listed(modes, _MODES)}"


def is_one_fault(one: str, other: str) -> bool:
    """Tell if two faults have the same words, and figures that may be of one fault.

    How many values differ is of one tensor, and a figure that was measured has noise.
    """
    sides = [_OF_ONE_TENSOR.sub("", words) for words in (one, other)]
    texts = [_NUMBER.sub("#", words) for words in sides]
    numbers = [[float(number) for number in _NUMBER.findall(words)] for words in sides]
    return texts[0] == texts[1] and all(
        math.isclose(a, b, rel_tol=_ALIKE) for a, b in zip(*numbers, strict=True)
    )


def suspect_of(record: Mapping[str, Any]) -> Suspect | None:
    """Return a failed comparison as a suspect; None if it passed or only lacks accepted errors."""
    if record["passed"]:
        return None
    failed = [check for check in record["checks"] if not check["passed"]]
    check = max(failed, key=severity, default=None)
    if check is not None and limit_kind_of(check["kind"]).is_new:
        return None
    finding = record.get("finding") or {}
    tier, order = _tier(record, check), int(record.get("order", 0))
    return Suspect(
        tier=tier,
        # A wrong gradient flows back: the last site that has one is the first it was made at.
        order=-order if tier is Tier.BACKWARD else order,
        site=str(record["site"]),
        scope=str(record["scope"]),
        layer=str(record["layer"]),
        model=str(record["model"]),
        mode=str(record["mode"]),
        node=str(record.get("node", "")),
        fault=str(record.get("failure") or finding.get("fault") or "is out of its limit"),
        figures=str(finding.get("figures") or (view_of(check).text() if not finding else "")),
        quantizer=next((c["quantizer"] for c in failed if c.get("quantizer")), ""),
        advice="" if check is None else advice_on(check),
        code=str(record.get("code", "")),
        script=str(record.get("reproduction", "")),
        is_diagnosed=bool(finding.get("diagnosed")),
    )


def _tier(record: Mapping[str, Any], check: Mapping[str, Any] | None) -> Tier:
    """Return how directly a failure points at its place."""
    if check is None:
        return Tier.WHOLE
    kind, scope = limit_kind_of(check["kind"]), scope_of(record["scope"])
    if kind.tier is Tier.ABSENT or scope.is_task:
        return Tier.ABSENT if kind.tier is Tier.ABSENT else Tier.TASK
    if Tier.LOCAL in (scope.tier, kind.tier):
        return Tier.LOCAL_ACCEPTED if kind.needs_accepted else Tier.LOCAL
    if kind.tier is not None:
        return kind.tier
    is_magnitude = scope.is_gradient and not is_wrong_gradient({**check, "scope": scope.name})
    return Tier.CARRIED if is_magnitude else scope.tier


def is_wrong_gradient(check: Mapping[str, Any]) -> bool:
    """Tell if a check compares a gradient with the reference's, and not only its magnitudes."""
    return (
        scope_of(check["scope"]).is_gradient and METRICS.find(check["metric"]).direction != "steady"
    )


def causes_of_mode(
    suspects: Iterable[Suspect], plan: Sequence[PlanChange] = ()
) -> list[FailureCause]:
    """Return the causes of one mode of one model, the likeliest first; gates follow from each."""
    causes: list[FailureCause] = []
    for suspect in sorted(suspects):
        explaining, relation = _explained(causes, suspect)
        if not explaining and plan and causes:
            explaining, relation = causes[:1], "follows"
        if not explaining:
            cause = FailureCause(suspect, [(suspect.model, suspect.mode)])
            cause.plan = plan[0] if plan else None
            causes.append(cause)
            explaining = [cause]
        for cause in explaining:
            cause.gates.setdefault(suspect.node, suspect.gate_kind)
            if relation != "follows":
                cause.alike.add(suspect.node)
        explaining[0].same += relation == "same"
        if suspect.is_local and relation != "follows":
            explaining[0].note_layer(suspect)
        for cause in explaining:
            first = cause.suspect
            if suspect.script and not first.script and suspect.node == first.node:
                cause.suspect = first._replace(script=suspect.script)
    own = {cause.suspect.node for cause in causes}
    for cause in causes:
        cause.alike |= own
    return causes


def _explained(
    causes: Sequence[FailureCause], suspect: Suspect
) -> tuple[list[FailureCause], Relation]:
    """Return the causes that a failure comes from, and in which way.

    A local error has one; what is carried along comes from all that are before it.
    """
    relations = ((cause, cause.explains(suspect)) for cause in causes)
    explaining = [(cause, relation) for cause, relation in relations if relation]
    if not explaining:
        return [], ""
    first = explaining[0][1]
    if first == "same" or suspect.is_local:
        return [explaining[0][0]], first
    return [cause for cause, relation in explaining if relation == first], first


def joined_causes(by_mode: Iterable[Sequence[FailureCause]]) -> list[FailureCause]:
    """Join causes of several modes that are one fault at one place, the likeliest first.

    Whatever is compared with a wrong reference fails for that.
    """
    joined: dict[tuple[Any, ...], FailureCause] = {}
    for cause in (cause for causes in by_mode for cause in causes):
        suspect = cause.suspect
        key: tuple[Any, ...] = (suspect.model, suspect.site, suspect.is_local, suspect.fault)
        key = (suspect.model, *cause.plan[:2]) if cause.plan else key
        one = joined.setdefault(key, cause)
        if one is not cause:
            one.places += [pair for pair in cause.places if pair not in one.places]
            one.same = max(one.same, cause.same)
            one.gates |= cause.gates
            one.alike |= cause.alike
    # Of modes the one that most gates fail in comes first, of its causes the one that explains
    # most sites, then the earliest.
    in_mode: dict[tuple[str, str], set[str]] = {}
    for cause in joined.values():
        for model_and_mode in cause.places:
            in_mode.setdefault(model_and_mode, set()).update(cause.gates)
    likeliest = sorted(joined.values(), key=lambda cause: _likeliest_first(cause, in_mode))
    broken: dict[str, FailureCause] = {}
    remaining = []
    for cause in likeliest:
        if cause.suspect.mode == REFERENCE:
            broken.setdefault(cause.suspect.model, cause)
        reference = broken.get(cause.suspect.model, cause)
        if reference is cause:
            remaining.append(cause)
        else:
            reference.gates |= cause.gates
    return remaining


def cause_of(causes: Sequence[FailureCause], node: str) -> FailureCause | None:
    """Return the cause of a failed gate: one of its own comes before one that it follows from."""
    own = (cause for cause in causes if cause.suspect.node == node)
    return next(own, next((cause for cause in causes if node in cause.gates), None))


def origin_of(causes: Sequence[FailureCause], node: str) -> str:
    """Write `follows from PLACE and PLACE` of a failed gate, or `the same as at PLACE`."""
    of_gate = [cause for cause in causes if node in cause.gates]
    if one := next((cause for cause in of_gate if node in cause.alike), None):
        return f"the same as at {one.place}"
    return f"follows from {_places(of_gate)}" if of_gate else ""


def _places(causes: Sequence[FailureCause]) -> str:
    names = [cause.place for cause in causes]
    return " and ".join(names) if len(names) == 2 else listed(names, _MODES)


def _likeliest_first(
    cause: FailureCause, in_mode: Mapping[tuple[str, str], Collection[str]]
) -> tuple[Any, ...]:
    is_reference = cause.suspect.mode == REFERENCE
    failed = max(len(in_mode[model_and_mode]) for model_and_mode in cause.places)
    of_cause = cause.suspect.tier, -failed, -cause.same, cause.suspect
    return not is_reference, cause.plan is None, *of_cause


class EarlierCause(NamedTuple):
    """Words that say what a test follows from, or none; `is_acceptable` as of its cause."""

    words: str = ""
    is_acceptable: bool = True


class KnownCauses:
    """The causes that tests of a session have shown so far, by model and mode."""

    def __init__(self) -> None:
        self._suspects: dict[tuple[str, str], list[Suspect]] = {}

    def add(self, records: Iterable[Mapping[str, Any]]) -> EarlierCause:
        """Note the failures of a test; return what it follows from, if anything."""
        suspects = sorted(filter(None, map(suspect_of, records)))
        if not suspects:
            return EarlierCause()
        first = suspects[0]
        earlier = self._suspects.setdefault((first.model, first.mode), [])
        causes = causes_of_mode(suspect for suspect in earlier if suspect < first)
        earlier += suspects[:MOST_SUSPECTS]
        explaining, relation = _explained(causes, first)
        if not explaining:
            return EarlierCause()
        words = "follows from" if relation == "follows" else "the same as at"
        is_acceptable = all(cause.is_acceptable for cause in explaining)
        return EarlierCause(f"{words} {_places(explaining)}", is_acceptable)
