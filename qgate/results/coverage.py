"""Coverage of a run: how many gates were held, what they compared, and which were not, and why.

A gate is one test. Gates count within the modes, models and formats asked for; a mode that fits no
model and a suite on dumps in a run without a dump are not asked for. A mode quantizes modules of a
model, which has outputs and layers and runs on samples. Each of them counts as compared if a record
of a held gate is about it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

from qgate.records import Meta
from qgate.results.kinds import scope_of
from qgate.results.pictures import Count
from qgate.text import counted, listed

MOST_NAMES = 100
# Items of a list in a sentence.
_CAUSES, _MODES, _NAMES, _PLACES = 4, 3, 3, 3


class MetShapes(TypedDict):
    """Shapes that some modules of a mode met, the same ones.

    modules   their names, of up to 100; count says how many they are
    tokens    numbers of tokens, or of positions of an image; of samples where there are no tokens
    samples   numbers of samples of a batch; empty without a batch axis
    unbatched true if one was left out
    strided   true if memory was not contiguous
    never     in words, what they never met
    """

    modules: Annotated[list[str], Meta(max_length=MOST_NAMES)]
    count: Count
    tokens: list[Count]
    samples: list[Count]
    unbatched: bool
    strided: bool
    never: list[str]


@dataclass
class ModuleShapes:
    """Shapes that one module met: each as samples (0 without that axis), tokens, is strided.

    channels   the axis of the channels, from the end
    """

    channels: int = -1
    met: set[tuple[int, int, bool]] = field(default_factory=set)

    def add(self, shape: Sequence[int], *, is_strided: bool) -> None:
        """Add the shape of an input."""
        if shape:
            axis = self.channels % len(shape) if len(shape) >= -self.channels else len(shape) - 1
            rows = [*shape[:axis], *shape[axis + 1 :]]
            samples = rows.pop(0) if len(shape) > 2 else 0
            self.met.add((samples, math.prod(rows), is_strided))

    def statement(self) -> tuple[Any, ...]:
        """Return tokens, samples, whether a batch axis was left out and memory strided."""
        return (
            tuple(sorted({tokens for _, tokens, _ in self.met})),
            tuple(sorted({samples for samples, _, _ in self.met} - {0})),
            any(not samples for samples, _, _ in self.met),
            any(is_strided for _, _, is_strided in self.met),
            self.channels == -1,
        )


def shape_groups(shapes: Mapping[str, Sequence[Any]]) -> list[MetShapes]:
    """Put modules together that met the same; those that met least come first."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, statement in shapes.items():
        groups.setdefault(tuple(map(_frozen, statement)), []).append(name)
    listed_groups = [
        MetShapes(
            modules=names[:MOST_NAMES], count=len(names), tokens=[*tokens], samples=[*samples],
            unbatched=unbatched, strided=strided,
            never=_never(tokens, samples, unbatched, strided, is_linear),
        )
        for (tokens, samples, unbatched, strided, is_linear), names in groups.items()
    ]  # fmt: skip
    return sorted(listed_groups, key=lambda group: (-len(group["never"]), len(group["tokens"])))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _never(
    tokens: Sequence[int], samples: Sequence[int], unbatched: bool, strided: bool, is_linear: bool
) -> list[str]:
    beside = [
        ("other numbers of tokens", len(tokens) == 1),
        ("other numbers of samples", len(samples) < 2 and not (unbatched and len(tokens) > 1)),
        ("inputs without a batch axis", is_linear and not unbatched),
        ("strided memory", not strided),
    ]
    return [words for words, is_lacking in beside if is_lacking]


def shapes_text(group: MetShapes) -> str:
    """Write `1 to 1,029 tokens (14 numbers), batches of 1 to 64, without a batch axis`."""
    tokens = group["tokens"]
    count = f" ({len(tokens)} numbers)" * (len(tokens) > 1)
    parts = [f"{_range(tokens)} {'token' if tokens == [1] else 'tokens'}{count}"]
    if group["samples"]:
        parts.append(f"batches of {_range(group['samples'])}")
    parts += ["without a batch axis"] * group["unbatched"] + ["strided memory"] * group["strided"]
    return ", ".join(parts)


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))


def mode_shapes_texts(coverage: Iterable[Mapping[str, Any]]) -> list[str]:
    """Write what the modules of each mode met, and what they never met."""
    texts: dict[str, list[str]] = {}
    for of in coverage:
        words = []
        for group in of.get("shapes") or []:
            never = f"; never {' or '.join(group['never'])}" if group["never"] else ""
            words.append(f"{counted(group['count'], 'module')} {shapes_text(group)}{never}")
        if words:
            texts.setdefault(". ".join(words), []).append(of["mode"])
    return [f"shapes met in {listed(modes, _NAMES)}: {text}" for text, modes in texts.items()]


def unmet_text(coverage: Iterable[Mapping[str, Any]]) -> str:
    """Name the modules that met one shape alone, that of the samples; empty for none."""
    names: dict[str, None] = {}
    for of in coverage:
        for group in of.get("shapes") or []:
            if {"other numbers of tokens", "other numbers of samples"} <= {*group["never"]}:
                names |= dict.fromkeys(group["modules"])
    if not names:
        return ""
    return f"one shape alone was met by {counted(len(names), 'module')}: {listed([*names], _NAMES)}"


NOT_COMPARED = "not compared"
UNHELD = "not held"
_NO_GATE = "no gate of this run compares"
_IDLE = "the first sample does not pass"

PartKind = Literal["module", "output", "layer"]


class PartWords(NamedTuple):
    """The name of several parts of one kind, and where they are."""

    noun: str
    is_layer: bool = False
    is_in_layer: bool = False


_PARTS: Mapping[PartKind, PartWords] = {
    "module": PartWords("quantized modules", is_in_layer=True),
    "output": PartWords("outputs"),
    "layer": PartWords("layers", is_layer=True),
}


class CoveredShare(TypedDict):
    """Parts of a model that are of one kind, and how many of them were compared."""

    held: Count
    of: Count


class UncoveredPart(TypedDict):
    """A quantized module, an output or a layer that no held gate compared.

    layer   the layer of a module; empty outside all layers
    cause   that of the gates that were not held, or "not compared" where no gate is about it
    """

    kind: PartKind
    name: str
    layer: str
    cause: str
    reason: str


class ModeCoverage(TypedDict):
    """Extent to which held gates compared one mode of one model.

    tokens  those of the samples; samples where they are no token ids, as `unit` says
    undeclared  true for a kernel of one's own that does not say what it stands for
    shapes  those that its quantized modules met
    """

    model: str
    mode: str
    modules: CoveredShare
    outputs: CoveredShare
    layers: CoveredShare
    tokens: CoveredShare
    unit: Literal["tokens", "samples"]
    uncovered: list[UncoveredPart]
    undeclared: NotRequired[bool]
    shapes: NotRequired[list[MetShapes]]


class OmittedGates(TypedDict):
    """Gates of one mode that were not held, for one reason, or what has no gate.

    cause   skipped, xfailed, deselected, layers, baseline, not run, not counted, shard, not
            compared, not held: accepted errors of the suites in `places` that have no gate
    reason  the reason of a skip, the options that deselect, what ended the run
    places  layers, or suites for gates without a layer; what no gate compares; at most 100
    gates   how many; 0 for files and shards whose gates are unknown, and for what has none
    """

    cause: str
    reason: str
    model: str
    mode: str
    places: Annotated[list[str], Meta(max_length=100)]
    gates: Count


class RunExtent(TypedDict):
    """Extent of a run: how much of what was asked for was held.

    gates    gates within the modes asked for
    judged   those with a verdict
    omitted  those that were skipped, deselected or left out, and what no gate compares; empty for
             a whole run
    allowed  true if the command had --allow-partial
    fails    true if the run failed for being partial: CI is set, and it was not allowed
    coverage what held gates compared, by mode; of a shard only its own part
    """

    gates: Count
    judged: Count
    omitted: list[OmittedGates]
    allowed: bool
    fails: bool
    coverage: NotRequired[list[ModeCoverage]]


@dataclass(frozen=True)
class ModeScope:
    """Everything to be compared of one mode of one model.

    modules    quantized modules: name -> the module whose local errors are about it, its layer
    idle       modules among them that the first sample does not pass
    layers     name of a layer -> the site of its output
    tokens     tokens of each sample; 1 each where the samples are no token ids
    positions  site -> for each sample, how many positions were compared; 0 without such an axis
    is_declared  it says what it quantizes, or stands for a mode that does
    shapes     module -> tokens, samples and more that it met (qgate.results.coverage)
    """

    model: str
    mode: str
    modules: Mapping[str, tuple[str, str]]
    idle: Collection[str]
    outputs: Sequence[str]
    layers: Mapping[str, str]
    tokens: Sequence[int]
    unit: Literal["tokens", "samples"]
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    is_declared: bool = True
    shapes: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def joined(self, other: ModeScope) -> ModeScope:
        """Return the scope with the positions that another process compared, too."""
        return ModeScope(**{**vars(self), "positions": {**other.positions, **self.positions}})


class OmittedGate(NamedTuple):
    """One gate that was not held; `counted` is False for a file whose gates are unknown."""

    cause: str
    reason: str
    model: str
    mode: str
    layer: str
    counted: bool = True


def coverage_of(
    scope: ModeScope, rows: Iterable[Mapping[str, Any]], omitted: Iterable[OmittedGate]
) -> ModeCoverage | None:
    """Count what the records of held gates are about; None where no gate of the mode compared.

    What no record is about is explained by an omitted gate of its layer, if there is one.
    """
    local: set[str] = set()
    compared: set[str] = set()
    has_records = False
    for row in rows:
        if (row["model"], row["mode"]) == (scope.model, scope.mode) and row["checks"]:
            about, site, has_records = scope_of(row["scope"]), row["site"], True
            if about.is_covering:
                compared.add(site)
            if about.has_budget:
                local.add(site.partition(":")[0])
    if not has_records:
        return None

    def is_held(module: str) -> bool:
        unit = scope.modules[module][0]
        return any(f"{name}.".startswith(f"{unit}.") for name in local)

    lacking: list[tuple[PartKind, str, str]] = [
        ("layer", name, name) for name, site in scope.layers.items() if site not in compared
    ]
    lacking += [("output", name, "") for name in scope.outputs if name not in compared]
    lacking += [
        ("module", name, layer)
        for name, (_, layer) in scope.modules.items()
        if not is_held(name) or (name in scope.idle and not layer)
    ]
    gates = [gate for gate in omitted if gate[2:4] in ((scope.model, scope.mode), ("", ""))]
    uncovered = [_explained(part, scope, gates) for part in lacking]
    coverage = ModeCoverage(
        model=scope.model,
        mode=scope.mode,
        modules=_share("module", len(scope.modules), uncovered),
        outputs=_share("output", len(scope.outputs), uncovered),
        layers=_share("layer", len(scope.layers), uncovered),
        tokens=CoveredShare(held=_tokens(scope, compared), of=sum(scope.tokens)),
        unit=scope.unit,
        uncovered=uncovered,
    )
    if not scope.is_declared:
        coverage["undeclared"] = True
    if scope.shapes:
        coverage["shapes"] = shape_groups(scope.shapes)
    return coverage


def _share(kind: PartKind, of: int, uncovered: Iterable[UncoveredPart]) -> CoveredShare:
    return CoveredShare(held=of - sum(part["kind"] == kind for part in uncovered), of=of)


def _explained(
    part: tuple[PartKind, str, str], scope: ModeScope, omitted: Iterable[OmittedGate]
) -> UncoveredPart:
    """Say why a part was not compared: its gate was not held, or there is none."""
    kind, name, layer = part
    cause, reason = NOT_COMPARED, _IDLE if name in scope.idle else _NO_GATE
    for gate in omitted:
        if gate.layer == layer or not (gate.model and (layer or gate.layer in scope.layers)):
            cause, reason = gate.cause, gate.reason
            break
    return UncoveredPart(kind=kind, name=name, layer=layer, cause=cause, reason=reason)


def _tokens(scope: ModeScope, compared: Collection[str]) -> int:
    """Count the tokens that both the outputs and the layers were compared on.

    A later layer may have fewer positions than there are tokens, so that the longest counts.
    """
    counts = []
    for names in (scope.outputs, [*scope.layers.values()]):
        at_sites = [scope.positions.get(name, ()) for name in names if name in compared]
        if at_sites:
            counts.append(max(sum(map(_covered, of, scope.tokens)) for of in at_sites))
    return min(counts, default=0)


def _covered(positions: int, tokens: int) -> int:
    return min(positions, tokens) if positions else tokens


def add_coverage(one: Sequence[ModeCoverage], other: Sequence[ModeCoverage]) -> list[ModeCoverage]:
    """Join the coverage of two parts of a run: what neither compared remains."""
    by_mode = {(of["model"], of["mode"]): of for of in one}
    for of in other:
        key = (of["model"], of["mode"])
        by_mode[key] = _joined(by_mode[key], of) if key in by_mode else of
    return [*by_mode.values()]


def _joined(one: ModeCoverage, other: ModeCoverage) -> ModeCoverage:
    def parts(of: ModeCoverage) -> dict[tuple[str, str], UncoveredPart]:
        return {(part["kind"], part["name"]): part for part in of["uncovered"]}

    first, second = parts(one), parts(other)
    uncovered = [
        second[key] if part["cause"] == NOT_COMPARED else part
        for key, part in first.items()
        if key in second
    ]
    tokens = [of["tokens"]["held"] for of in (one, other) if of["tokens"]["held"]]
    return {
        **one,
        "modules": _share("module", one["modules"]["of"], uncovered),
        "outputs": _share("output", one["outputs"]["of"], uncovered),
        "layers": _share("layer", one["layers"]["of"], uncovered),
        "tokens": CoveredShare(held=min(tokens, default=0), of=one["tokens"]["of"]),
        "uncovered": uncovered,
    }


def gaps_of(coverage: Iterable[ModeCoverage]) -> list[tuple[str, str, str, str, list[str]]]:
    """Return what no gate compares: cause, reason, model, mode and names.

    Modules of a layer that was not compared are not named beside it.
    """
    gaps: dict[tuple[str, str, str, str], list[str]] = {}
    for of in coverage:
        parts = [part for part in of["uncovered"] if part["cause"] == NOT_COMPARED]
        layers = {part["name"] for part in parts if _PARTS[part["kind"]].is_layer}
        for part in parts:
            words = _PARTS[part["kind"]]
            if words.is_in_layer and part["layer"] in layers:
                continue
            reason = f"{words.noun} that {part['reason']}"
            key = (NOT_COMPARED, reason, of["model"], of["mode"])
            gaps.setdefault(key, []).append(part["name"])
        if 0 < of["tokens"]["held"] < of["tokens"]["of"]:
            count = f"{of['tokens']['of'] - of['tokens']['held']:,} {of['unit']}"
            key = (NOT_COMPARED, "masked or cut", of["model"], of["mode"])
            gaps[key] = [count]
    return [(*key, names) for key, names in gaps.items()]


def coverage_texts(coverage: Sequence[ModeCoverage]) -> list[str]:
    """Write one text for all modes of a model that were compared to the same extent.

    `int8: 35 of 35 quantized modules, 1 of 1 outputs, 5 of 5 layers; tokens 5,120 of 5,120`
    """
    modes: dict[tuple[str, str], list[str]] = {}
    for of in coverage:
        modes.setdefault((of["model"], share_text(of)), []).append(of["mode"])
    several = len({model for model, _ in modes}) > 1
    return [
        f"{f'{model} ' if several else ''}{listed(names, _MODES)}: {text}"
        for (model, text), names in modes.items()
    ]


def total_text(coverage: Sequence[ModeCoverage]) -> str:
    """Write `30/30 modules, 5/5 layers, 1/1 outputs` of all modes together; empty for none."""
    parts = []
    for key in ("modules", "layers", "outputs"):
        shares: list[CoveredShare] = [of[key] for of in coverage]
        if total := sum(share["of"] for share in shares):
            parts.append(f"{sum(share['held'] for share in shares):,}/{total:,} {key}")
    return ", ".join(parts)


def share_text(of: ModeCoverage) -> str:
    """Write how much of one mode was compared."""
    if not of["modules"]["of"] and not of["layers"]["of"]:
        outputs, rows = of["outputs"], of["tokens"]
        text = f"outputs alone, {outputs['held']:,} of {outputs['of']:,}"
        return f"{text}; {of['unit']} {rows['held']:,} of {rows['of']:,}"
    names = ("modules", "quantized modules"), ("outputs", "outputs"), ("layers", "layers")
    shares: list[tuple[CoveredShare, str]] = [(of[key], words) for key, words in names]  # type: ignore[literal-required]
    parts = [f"{share['held']:,} of {share['of']:,} {words}" for share, words in shares]
    tokens = of["tokens"]
    return f"{', '.join(parts)}; {of['unit']} {tokens['held']:,} of {tokens['of']:,}"


# Extent: which gates were held, and which were not ------------------------------------------------

# Groups that a header lists; the gates of the others are in one more group.
_MOST_GROUPS = 200
_MOST_PLACES = 100
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


def extent_of(header: Mapping[str, Any]) -> RunExtent | None:
    """Return the extent in a header; None in headers of earlier versions and of killed runs."""
    extent = header.get("extent")
    return extent or None


def is_partial(extent: RunExtent | None) -> bool:
    """Tell if gates that were asked for were not held, or not all was compared."""
    return extent is not None and bool(extent["omitted"])


def lacks_gates(extent: RunExtent | None) -> bool:
    """Tell if gates that were asked for were not held, other than by a failed set-up."""
    groups = [] if extent is None else extent["omitted"]
    return any(group["cause"] not in (NOT_COMPARED, UNHELD) for group in groups)


def extent_text(header: Mapping[str, Any], *, names: bool = True) -> str:
    """Write `gates held: 6 of 12; 6 left out by --layers first (int8 at layers.1, layers.2)`."""
    extent = extent_of(header)
    if extent is None:
        return ""
    held = f"gates held: {extent['judged']:,} of {extent['gates']:,}"
    head = held if extent["gates"] else "this run has no gates"
    return "; ".join([head, *omitted_texts(extent, names=names)])


def partial_head(header: Mapping[str, Any]) -> str:
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


def partial_text(header: Mapping[str, Any]) -> str:
    """Write the sentence of a run that fails as it is partial; empty for any other run."""
    extent, head = extent_of(header), partial_head(header)
    if extent is None or not head:
        return ""
    why = "; ".join(omitted_texts(extent))
    advice = "Run all of them, or pass --allow-partial if this is intended"
    return f"partial run, {head}: {why}. {advice}"


def covered_texts(header: Mapping[str, Any]) -> list[str]:
    """Write what held gates compared, modes of the same extent together; nothing for a shard."""
    extent = extent_of(header)
    if extent is None or header.get("shard"):
        return []
    coverage = extent.get("coverage") or []
    texts = coverage_texts(coverage)
    more = [f"{len(texts) - _EXTENTS:,} other extents of modes in the report"]
    return [f"compared in {text}" for text in texts[:_EXTENTS]] + more * (len(texts) > _EXTENTS)


def coverage_in(header: Mapping[str, Any]) -> list[ModeCoverage]:
    """Return what a header says of the modes that held gates compared; nothing of a shard."""
    extent = extent_of(header)
    return [] if extent is None or header.get("shard") else extent.get("coverage") or []


def shapes_texts(header: Mapping[str, Any]) -> list[str]:
    """Write the shapes that modules met in each mode, those of few modes."""
    return mode_shapes_texts(coverage_in(header))[:_EXTENTS]


def undeclared_texts(header: Mapping[str, Any]) -> list[str]:
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
