"""Sites that are compared one by one, each given the reference's tensor."""

from __future__ import annotations

from qgate.gate.measuring.ideals import TAPS
from qgate.models import Model, Site
from qgate.modes import Quantized

_WITH_WEIGHTS = ("linear", "conv", "recurrent", "attention", "norm", "embedding")
_EVERYTHING = "*"


def quantized_sites(quantized: Quantized, base: Model) -> list[Site]:
    """List sites that a mode quantizes, and outputs of linear layers there."""
    planned = {entry.site for entry in quantized.plan.entries}

    def is_compared(site: Site) -> bool:
        if quantized.mode.choices is not None:
            leaf = f"{site.module.rpartition('.')[2]}:{site.port}"
            return leaf in TAPS and ".mixer." in site.module
        if site.name not in planned and (not site.is_product or site.port == "weight"):
            return False
        ports = ("input", "weight", site.port)
        return _EVERYTHING in planned or any(f"{site.module}:{port}" in planned for port in ports)

    return [site for site in base.sites() if is_compared(site)]


def untouched_sites(quantized: Quantized, base: Model) -> list[Site]:
    """List outputs of modules with weights that a mode leaves as they are.

    A module of the user's own may quantize anything, a plan for everything does, and what runs in
    the middle of a Mamba mixer depends on the rest of it.
    """
    planned = {entry.site.partition(":")[0] for entry in quantized.plan.entries}
    if quantized.mode.own or _EVERYTHING in planned:
        return []
    sites = [site for site in _weighted_outputs(base) if site.module not in planned]
    if quantized.mode.choices is None:
        return sites
    return [site for site in sites if not base.layer_of(site.module)]


def quantized_modules(quantized: Quantized, base: Model) -> dict[str, str]:
    """Return the modules that a mode quantizes, each with the one whose local error is about it.

    A Mamba mixer is compared as a whole. Where everything is quantized, or a module of the user's
    own may quantize anything, those are the modules with weights: linear layers and what is
    outside the blocks by themselves, others with their block.
    """
    planned = dict.fromkeys(_module_of(entry.site) for entry in quantized.plan.entries)
    if _EVERYTHING not in planned:
        return {name: _compared_with(name, quantized) for name in planned}
    sites = [site for site in (*base.sites(), *base.idle_sites()) if site.kind in _WITH_WEIGHTS]
    layers = {site: "" if site.is_product else base.layer_of(site.module) for site in sites}
    return {site.module: layer or site.module for site, layer in layers.items()}


def _module_of(site: str) -> str:
    """Return the module of a site, or of a parameter such as `mixer.A_log`."""
    module, port, _ = site.partition(":")
    return module if port or site == _EVERYTHING else module.rpartition(".")[0]


def _compared_with(module: str, quantized: Quantized) -> str:
    before, mixer, _ = f"{module}.".partition(".mixer.")
    is_in_mixer = quantized.mode.choices is not None and mixer
    return f"{before}.mixer" if is_in_mixer else module


def outputs_outside(base: Model) -> list[Site]:
    """List outputs of modules with weights that are in no block."""
    return [site for site in _weighted_outputs(base) if not base.layer_of(site.module)]


def backward_sites(base: Model, *, is_forced: bool) -> list[Site]:
    """List weights of products and outputs of blocks; with forced outputs inputs, too."""
    ports = ("input", "output") if is_forced else ("output",)
    return [
        site
        for site in base.sites()
        if base.layer_of(site.module)
        and ((site.is_block and site.port in ports) or (site.is_product and site.port == "weight"))
    ]


def _weighted_outputs(base: Model) -> list[Site]:
    return [site for site in base.sites() if site.kind in _WITH_WEIGHTS and site.port == "output"]
