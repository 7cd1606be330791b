"""Coverage of a run: how much of what a mode computes was compared by gates that were held.

A mode quantizes modules of a model, which has outputs and layers and runs on samples. Each of them
counts as compared if a record of a held gate is about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

from qgate.records import Meta
from qgate.results.met_shapes import MetShapes, alike
from qgate.results.pictures import Count
from qgate.results.scopes import scope_of
from qgate.text import listed

NOT_COMPARED = "not compared"
UNHELD = "not held"
_NO_GATE = "no gate of this run compares"
_IDLE = "the first sample does not pass"
_MODES = 3

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
    shapes     module -> tokens, samples and more that it met (qgate.results.met_shapes)
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
        coverage["shapes"] = alike(scope.shapes)
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
