"""Resolve a mode on a model: which rule decides which site, with which quantizer.

Static scales are made from the largest inputs of layers on the calibration samples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qgate.errors import CopyableError, QgateError, unknown
from qgate.formats import FORMATS
from qgate.formats.quantizer import Quantizer
from qgate.hooks.tapping import tap_sites
from qgate.loading import LateModule
from qgate.models.model import Model
from qgate.models.sites import KINDS, Site
from qgate.modes.mode import Mode, Rule
from qgate.modes.plan import Plan, PlanEntry, numbers_of
from qgate.modes.selection import names, select, select_fitting
from qgate.modes.simulated.planning import mamba_entries
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.modes.attention import planning as planning
    from qgate.modes.calibration import Calibration
    from qgate.modes.states import planning as states_planning
else:
    planning = LateModule("qgate.modes.attention.planning")
    states_planning = LateModule("qgate.modes.states.planning")

_LONG = 2**30
_OF = ("product", "any")

_Reaches = dict[str, float]
_MEASURED: WeakKeyDictionary[Model, tuple[str, _Reaches]] = WeakKeyDictionary()


def family_of(model: Model) -> str:
    """Return the family of modes that fit a model: "mamba" or "other"."""
    return "mamba" if "rotated" in (model.basis, *model.bases) else "other"


def modes_of(
    model: Model, query: str | Sequence[str] = "all", also: Mapping[str, Mode] | None = None
) -> list[Mode]:
    """Return the modes that fit a model, by names, groups and patterns.

    `also` are modes beside qgate's and the model's own.
    """
    return select(query, family_of(model), _own_modes(model, also), model.name)


def fitting_modes(
    model: Model, query: str | Sequence[str] = "all", also: Mapping[str, Mode] | None = None
) -> tuple[list[Mode], dict[str, str]]:
    """Return `modes_of`, and for each part of the query that fits another kind of model why."""
    return select_fitting(query, family_of(model), _own_modes(model, also), model.name)


def _own_modes(model: Model, also: Mapping[str, Mode] | None) -> dict[str, object]:
    family = family_of(model)
    fit = {name: mode for name, mode in (also or {}).items() if mode.fits in ("any", family)}
    return {**fit, **model.modes}


def make_plan(mode: Mode, model: Model, calibration: Calibration | None = None) -> Plan:
    """Resolve a mode on a model; `calibration` for modes with static scales."""
    family = family_of(model)
    if mode.fits not in ("any", family):
        kind = "Mamba models" if mode.fits == "mamba" else "models other than Mamba"
        raise QgateError(f"mode {mode.name!r} does not fit {model.name}: it is for {kind}.")
    if mode.choices is not None:
        if calibration is None:
            raise _uncalibrated(mode)
        entries = mamba_entries(mode.choices, model, calibration)
    elif mode.attention is not None:
        if mode.calibrated and calibration is None:
            raise _uncalibrated(mode)
        entries = planning.attention_entries(mode.attention, model, *_ranges_of(calibration))
    elif mode.states is not None:
        entries = states_planning.state_entries(mode.states, model)
    elif mode.dtype is not None:
        entries = [PlanEntry("*", f"runs in {mode.dtype}", None, "the whole model")]
    elif mode.own:
        entries = [PlanEntry("*", "quantized by the model's own callable", None, "not known")]
    else:
        entries = _decide(mode.rules, model, mode.name)
    missed = _out_of_reach(model) if mode.rules else ()
    basis = model.basis if mode.own else mode.basis
    return Plan(mode.name, mode.about, model.name, basis, tuple(entries), missed)


def _ranges_of(calibration: Calibration | None) -> tuple[dict[str, float], int]:
    return ({}, 0) if calibration is None else (calibration.ranges(), calibration.samples)


def _uncalibrated(mode: Mode) -> QgateError:
    return QgateError(
        f"mode {mode.name!r} has static scales: give it a calibration "
        "(qgate.modes.calibrated(model, settings), or `qgate layers calibrate`)."
    )


def _out_of_reach(model: Model) -> tuple[str, ...]:
    """List matrices that no rule can name: fused experts, and modules that a fused path skips."""
    owners = {site.module for site in model.sites() if site.port == "weight"}
    inside = re.compile(model.part)
    return tuple(
        name
        for name, p in model.module.named_parameters()
        if p.dim() >= 2
        and inside.search(name.rpartition(".")[0])
        and name.rpartition(".")[0] not in owners
        and not name.endswith("A_log")
    )


def misfit_of(mode: Mode, model: Model) -> str:
    """Say why a mode of qgate that is asked for by name cannot quantize a model; empty if it can.

    A rule without a site is an error in a mode of a user's own, where it may be misspelled.
    """
    if not (mode.by_name and mode.name in names()):
        return ""
    try:
        if mode.states is not None:
            states_planning.stored_sides(mode.states, model)
        if mode.attention is not None:
            planning.check_fit(mode.attention, model)
    except QgateError as error:
        return f"mode {mode.name!r} does not fit: {error}"
    if not mode.rules:
        return ""
    start = f"mode {mode.name!r} does not fit {model.name}"
    try:
        _, decided = _decided_sites(mode.rules, model, mode.name)
    except UndecidedError as error:
        return f"{start}, where no module matches {error.rule.sites!r}."
    for site in model.sites():
        rule = decided.get(site.name)
        if rule is None or rule.format is None or site.kind != "linear" or not site.width:
            continue
        rotation = Quantizer(rule.format, **rule.options).rotation
        if rotation and site.port in ("input", "weight") and site.width % len(rotation):
            return (
                f"{start}: it rotates groups of {len(rotation)} features, and "
                f"{site.name} has {site.width}."
            )
    return ""


class UndecidedError(CopyableError, QgateError):
    """A rule that decides no site of a model."""

    def __init__(self, text: str, rule: Rule) -> None:
        super().__init__(text)
        self.rule = rule


def _decide(rules: Sequence[Rule], model: Model, mode: str) -> list[PlanEntry]:
    """Decide what becomes of each site."""
    sites, decided = _decided_sites(rules, model, mode)
    static = [site for site in sites if site.name in decided and decided[site.name].per == "static"]
    reaches = calibrated_reaches(model, static)
    return [
        entry
        for site in sites
        if site.name in decided
        and (entry := _entry_of(site, decided[site.name], reaches.get(site.name))) is not None
    ]


def _decided_sites(
    rules: Sequence[Rule], model: Model, mode: str
) -> tuple[list[Site], dict[str, Rule]]:
    """Return the first rule that matches each site; a rule without a site is an error."""
    sites = [
        site
        for site in model.sites()
        if site.module not in (model.head or ()) or site.kind != "linear"
    ]
    decided: dict[str, Rule] = {}
    for rule in rules:
        if rule.of not in (*KINDS, *_OF):
            raise unknown(f"kind of site in a rule of mode {mode}", rule.of, [*KINDS, *_OF])
        matching = [site for site in sites if _is_of(rule, site) and _finds(rule, site, mode)]
        new = [site for site in matching if site.name not in decided]
        if not new:
            raise UndecidedError(_undecided(rule, mode, model.name, sites, bool(matching)), rule)
        decided.update({site.name: rule for site in new})
    return sites, decided


def _is_of(rule: Rule, site: Site) -> bool:
    if rule.of == "product":
        return site.is_product and not site.is_depthwise
    return rule.of in ("any", site.kind)


def _finds(rule: Rule, site: Site, mode: str) -> bool:
    try:
        return re.search(rule.sites, site.name) is not None
    except re.error as error:
        raise QgateError(
            f"{rule.sites!r} in a rule of mode {mode} is not a regular expression: {error}."
        ) from None


def _undecided(rule: Rule, mode: str, model: str, sites: list[Site], shadowed: bool) -> str:
    kind = [str(site) for site in sites if _is_of(rule, site)]
    if rule.of == "product" and not kind:
        return (
            f"mode {mode} quantizes nothing of {model}: it has no linear layer and no convolution "
            "that a sample passes, but for its head and depthwise ones. A mode of your own can "
            "name other modules: qgate.Rule(of=…), or a callable in modes= of its qgate.Model."
        )
    named = f"rule {rule.sites!r} (of {rule.of} sites) of mode {mode}"
    if shadowed:
        return f"{named} decides no site of {model}: rules before it decided all that it finds."
    return (
        f"{named} decides no site of {model}. Sites: {listed(kind, 24) or 'none of that kind'}. "
        "Linear layers of the head, and modules that nothing passes, are not among them."
    )


def _entry_of(site: Site, rule: Rule, reach: float | None = None) -> PlanEntry | None:
    if rule.format is None:
        return None
    weight, is_conv = site.port == "weight", site.kind == "conv" and site.is_product
    # Weights are (out, in, …), those of transposed modules (in, out, …).
    along = (0 if site.transposed else 1 if is_conv else -1) if weight else site.channels
    # Where the width is unknown a block that is too long stands for all of it.
    width = site.width if site.port in ("input", "weight") and site.width else _LONG
    sharing: dict[str, object] = {}
    if rule.per == "row" and weight:
        sharing = {"granularity": "channel", "axis": 1 if site.transposed else 0}
        origin = "amax of the channel"
    elif rule.per == "row" and is_conv:
        sharing = {"granularity": "channel", "axis": 0}
        origin = "amax of the sample"
    elif rule.per == "row":
        sharing = {"granularity": "block", "block": width, "axis": -1}
        origin = "amax of the token"
    elif reach is not None:
        largest = FORMATS.get(rule.format).element.bounds(narrow=True)[1]
        sharing = {"granularity": "tensor", "scale": reach / float(largest)}
        origin = "amax of the calibration samples"
    elif rule.per == "group":
        sharing = {"granularity": "block", "block": min(rule.group, width), "axis": along}
        origin = "amax of the group"
    else:
        plain = Quantizer(rule.format, **rule.options)
        follows = plain.granularity is not None and plain.scale is None
        sharing = {"axis": along} if plain.granularity == "block" and plain.tile is None else {}
        if sharing and "axis" not in plain.format.options:
            if along != -1:
                raise QgateError(
                    f"{rule.format} has blocks along the last axis, and the channels of "
                    f"{site.name} lie along axis {along}: leave it out by a rule before, "
                    f"Rule({site.module!r}, None)."
                )
            sharing = {}
        origin = "no scale" if plain.scale is None else "given"
        if follows and plain.granularity in ("block", "tensor"):
            origin = f"amax of the {plain.granularity}"
    if rule.per != "format" or follows:
        # A scale made from its elements clips only in rounding, which stops no gradient.
        sharing["saturated_grad"] = "pass"
    quantizer = Quantizer(rule.format, **{**sharing, **rule.options})
    shared_by = {"channel": "per output channel", "tensor": "per tensor", None: ""}.get(
        quantizer.granularity, f"per {quantizer.block_words}"
    )
    if quantizer.zero_point is not None:
        origin = origin.replace("amax", "ends")
    if rule.per == "row" and not weight:
        shared_by = "per sample" if is_conv else "per token"
    scale = float(quantizer.scale) if isinstance(quantizer.scale, float) else None
    does = f"{quantizer.format.name} {shared_by}".strip()
    does += f", rotated by {len(quantizer.rotation)}" if quantizer.rotation else ""
    calibrated = () if reach is None else numbers_of(scale)
    return PlanEntry(site.name, does, scale, origin, quantizer, calibrated)


def calibrated_reaches(model: Model, sites: Sequence[Site]) -> _Reaches:
    """Return the largest magnitude at each site over the calibration samples, by name.

    A site that they never reach, such as that of an expert without a token, is an error.
    """
    if not sites:
        return {}
    weights, measured = _MEASURED.get(model, ("", {}))
    if weights != model.weights_hash() or {site.name for site in sites} - measured.keys():
        measured = _measure(model, sites)
        _MEASURED[model] = (model.weights_hash(), measured)
    if unreached := [site.module for site in sites if not measured[site.name]]:
        raise QgateError(
            f"calibration reached {listed(unreached, 4)} with no token: their input scales would "
            f"be 0 or NaN. {model.name} was calibrated on {len(model.calibration_samples())} "
            "samples: give more or longer ones (calib_samples, calib_seqlen), or take a mode "
            "whose scales are those of each token, such as experts-fp8."
        )
    return {site.name: measured[site.name] for site in sites}


def _measure(model: Model, sites: Sequence[Site]) -> _Reaches:
    largest = dict.fromkeys((site.name for site in sites), 0.0)

    def take(site: Site, tensor: Tensor) -> None:
        largest[site.name] = max(largest[site.name], float(tensor.detach().abs().amax()))

    with torch.no_grad(), tap_sites(model.module, sites, take):
        for sample in model.calibration_samples():
            model.outputs(sample)
    return largest
