"""From a mode and a model to the plan: which rule decides which site, with which quantizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError, unknown
from qgate.formats.quantizer import Quantizer
from qgate.models.sites import KINDS
from qgate.modes.mode import Mode, Rule
from qgate.modes.plan import Entry, Plan
from qgate.modes.selection import select, select_fitting
from qgate.modes.simulated.planning import mamba_entries

if TYPE_CHECKING:
    from qgate.models.model import Model
    from qgate.models.sites import Site
    from qgate.modes.calibration import Calibration

_LONG = 2**30


def family_of(model: Model) -> str:
    """Which modes fit: those of a Mamba, or the others."""
    return "mamba" if "rotated" in (model.basis, *model.bases) else "other"


def modes_of(
    model: Model, wanted: str | Sequence[str] = "all", also: Mapping[str, Mode] | None = None
) -> list[Mode]:
    """The modes meant by names, groups and patterns, of those that fit a model.

    `also` are modes beside qgate's and the model's own.
    """
    return select(wanted, family_of(model), _brought(model, also), model.name)


def fitting_modes(
    model: Model, wanted: str | Sequence[str] = "all", also: Mapping[str, Mode] | None = None
) -> tuple[list[Mode], dict[str, str]]:
    """As `modes_of`; what is for another kind of model is returned: part asked for → why."""
    return select_fitting(wanted, family_of(model), _brought(model, also), model.name)


def _brought(model: Model, also: Mapping[str, Mode] | None) -> dict[str, Any]:
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
        entries = mamba_entries(mode.choices, model, _needed(mode, calibration))
    elif mode.dtype is not None:
        entries = [Entry("*", f"runs in {mode.dtype}", None, "the whole model")]
    elif mode.own:
        entries = [Entry("*", "quantized by the model's own callable", None, "not known")]
    else:
        entries = _decided(mode.rules, model, mode.name)
    missed = _out_of_reach(model) if mode.rules else ()
    return Plan(mode.name, mode.about, model.name, _basis(mode, model), tuple(entries), missed)


def _out_of_reach(model: Model) -> tuple[str, ...]:
    """Matrices that no rule can name: fused experts, and modules that a fused path goes around."""
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


def _basis(mode: Mode, model: Model) -> str:
    return model.basis if mode.own else mode.basis


def _needed(mode: Mode, calibration: Calibration | None) -> Calibration:
    if calibration is None:
        raise QgateError(
            f"mode {mode.name!r} has static scales: give it a calibration "
            "(qgate.modes.calibrated(model, settings), or `qgate calibrate`)."
        )
    return calibration


def _decided(rules: Sequence[Rule], model: Model, mode: str) -> list[Entry]:
    """Each site by the first rule that finds it; a rule that decides none is an error."""
    sites = [
        site
        for site in model.sites()
        if site.module not in (model.head or ()) or site.kind != "linear"
    ]
    decided: dict[str, Rule] = {}
    for rule in rules:
        if rule.of not in (*KINDS, "any"):
            raise unknown(f"kind of site in a rule of mode {mode}", rule.of, [*KINDS, "any"])
        found = [s for s in sites if rule.of in ("any", s.kind) and _finds(rule, s, mode)]
        new = [site for site in found if site.name not in decided]
        if not new:
            raise QgateError(_undecided(rule, mode, model.name, sites, bool(found)))
        decided.update({site.name: rule for site in new})
    return [
        entry
        for site in sites
        if site.name in decided and (entry := _entry(site, decided[site.name])) is not None
    ]


def _finds(rule: Rule, site: Site, mode: str) -> bool:
    try:
        return re.search(rule.sites, site.name) is not None
    except re.error as error:
        raise QgateError(
            f"{rule.sites!r} in a rule of mode {mode} is not a regular expression: {error}."
        ) from None


def _undecided(rule: Rule, mode: str, model: str, sites: list[Site], shadowed: bool) -> str:
    kind = [str(site) for site in sites if rule.of in ("any", site.kind)]
    named = f"rule {rule.sites!r} (of {rule.of} sites) of mode {mode}"
    if shadowed:
        return f"{named} decides no site of {model}: rules before it decided all that it finds."
    listed = ", ".join(kind[:24]) + (f" and {len(kind) - 24} more" if len(kind) > 24 else "")
    return (
        f"{named} decides no site of {model}. Sites: {listed or 'none of that kind'}. Linear "
        "layers of the head, and modules that nothing passes, are not among them."
    )


def _entry(site: Site, rule: Rule) -> Entry | None:
    if rule.format is None:
        return None
    quantizer, origin = _quantizer(site, rule)
    return Entry(site.name, _does(quantizer, rule, site), _static(quantizer), origin, quantizer)


def _quantizer(site: Site, rule: Rule) -> tuple[Quantizer, str]:
    options = dict(rule.options)
    if rule.per != "format" or _follows(rule.format, options):
        # A scale that follows its elements clips only to round: no reason to stop a gradient.
        options = {"saturated_grad": "pass", **options}
    if rule.format is None:
        raise ValueError("a rule without a format makes no quantizer")
    weight = site.port == "weight"
    along = 0 if weight and site.transposed else -1
    # Where the width is not known a block that is too long stands for all of it.
    width = site.width if site.port in ("input", "weight") and site.width else _LONG
    if rule.per == "row" and weight:
        axis = 1 if site.transposed else 0
        return Quantizer(
            rule.format, granularity="channel", axis=axis, **options
        ), "amax of the channel"
    if rule.per == "row":
        made = Quantizer(rule.format, granularity="block", block=width, axis=-1, **options)
        return made, "amax of the token"
    if rule.per == "group":
        made = Quantizer(
            rule.format,
            granularity="block",
            block=min(rule.group, width),
            axis=along,
            **options,
        )
        return made, "amax of the group"
    plain = Quantizer(rule.format, **options)
    if plain.granularity == "block":
        return Quantizer(rule.format, axis=along, **options), "amax of the block"
    if plain.granularity == "tensor" and plain.scale is None:
        return plain, "amax of the tensor"
    return plain, "no scale" if plain.scale is None else "given"


def _follows(fmt: str | None, options: dict[str, Any]) -> bool:
    """Whether a quantizer makes its scale from what it scales."""
    if fmt is None:
        return False
    made = Quantizer(fmt, **options)
    return made.granularity is not None and made.scale is None


def _does(quantizer: Quantizer, rule: Rule, site: Site) -> str:
    where = {"channel": "per output channel", "tensor": "per tensor", None: ""}.get(
        quantizer.granularity, f"per {quantizer.block}"
    )
    if rule.per == "row" and site.port != "weight":
        where = "per token"
    return f"{quantizer.format.name} {where}".strip()


def _static(quantizer: Quantizer) -> float | None:
    return float(quantizer.scale) if isinstance(quantizer.scale, float) else None
