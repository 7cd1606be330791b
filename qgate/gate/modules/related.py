"""The modules of a mode that must agree with themselves, and what each of them promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import nn

from qgate.expected.noise import ARITHMETICS
from qgate.formats import Quantizer
from qgate.gate.modules.relations import RelatedModule
from qgate.models import Model, Site
from qgate.models.mamba.network import CausalConv1d
from qgate.modes import Quantized
from qgate.modes.simulated.casts import Cast
from qgate.modes.simulated.mixer import SimulatedMixer

_ALONE = ("linear", "norm", "activation", "embedding")
_TENSOR = Quantizer("int8", granularity="tensor")
# Parts of a quantized mixer: the site of what they return, how tokens depend on each other, and
# whether they compute integers times scales.
_PARTS = (
    ("in_cast", "in_proj:input", "alone", True),
    ("in_proj", "in_proj:output", "alone", True),
    ("conv_cast", "conv1d:input", "alone", True),
    ("conv1d", "conv1d:output", "causal", True),
    ("act", "act:output", "alone", False),
    ("u_cast", "x_proj:input", "alone", True),
    ("path_b", "scan:u", "alone", True),
    ("x_proj", "x_proj:output", "alone", True),
    ("x_cast", "scan:B", "alone", True),
    ("dt_proj", "dt_proj:output", "alone", True),
    ("dt_cast", "scan:dt", "alone", True),
    ("scan", "scan:output", "causal", False),
    ("hadamard", "out_proj:input", "alone", True),
    ("out_proj", "out_proj:output", "alone", True),
)
_NOT_DECLARED = "samples and tokens (the mode does not say what it stands for)"


def related_modules(
    quantized: Quantized, base: Model, meant: Mapping[str, Quantizer] | None
) -> Iterator[RelatedModule]:
    """List modules that a mode quantizes; `meant` are the quantizers that a kernel stands for."""
    if quantized.mode.choices is not None:
        yield from _parts_of_mixers(quantized, base)
        return
    mode, network = quantized.mode, quantized.model.module
    quantizers = quantized.plan.quantizers() if meant is None else meant
    names = {site.rpartition(":")[0] for site in quantizers}
    unit = ARITHMETICS[mode.dtype or ("tf32" if mode.own else "float32")]
    alike: set[tuple[object, ...]] = set()
    for site in base.sites():
        if site.port != "output":
            continue
        is_whole = mode.own or mode.dtype is not None
        if not (site.kind in ("linear", "conv") if is_whole else site.module in names):
            continue
        try:
            module = network.get_submodule(site.module)
        except AttributeError:
            continue
        ports = {name: q for name, q in quantizers.items() if name.startswith(f"{site.module}:")}
        flowing = [q for name, q in ports.items() if not name.endswith(":weight")]
        kernel = _own_kernel(module, flowing) if mode.own else _kernel(site, flowing)
        few: Literal["none", "few"] = "none" if mode.own else "few"
        yield RelatedModule(
            site.name, module, flowing, tokens=_tokens(site, module), unit=unit,
            left_out=_NOT_DECLARED if mode.own and not meant else "",
            shapes=few if kernel in alike else "all",
        )  # fmt: skip
        alike.add(kernel)


def _own_kernel(module: nn.Module, flowing: Sequence[Quantizer]) -> tuple[object, ...]:
    """Return what tells one kernel of the user's from another: it may depend on the sizes."""
    weight = getattr(module, "weight", None)
    return type(module), getattr(weight, "shape", None), *map(repr, flowing)


def _kernel(site: Site, flowing: Sequence[Quantizer]) -> tuple[object, ...]:
    """Return what tells one product of qgate's own from another, whatever its scales are."""
    casts = ((q.format.name, q.granularity, q.scale is None) for q in flowing)
    return site.kind, *casts


def _tokens(site: Site, module: nn.Module) -> str:
    if site.kind == "scan" or isinstance(module, CausalConv1d):
        return "causal"
    return "alone" if site.kind in _ALONE else "unknown"


def _parts_of_mixers(quantized: Quantized, base: Model) -> Iterator[RelatedModule]:
    choices = quantized.mode.choices
    assert choices is not None
    for layer in base.layers:
        mixer = quantized.model.module.get_submodule(f"{layer}.mixer")
        if not isinstance(mixer, SimulatedMixer):
            continue
        for name, site, tokens, is_exact in _PARTS:
            module = getattr(mixer, name)
            if module is None or isinstance(module, nn.Identity):
                continue
            is_dynamic = name == "conv_cast" or (
                name == "path_b" and choices.path_b == "second_grid"
            )
            is_exact = (
                is_exact
                and not (choices.float_products and name in ("x_proj", "dt_proj"))
                and (name != "path_b" or isinstance(module, Cast))
            )
            yield RelatedModule(
                f"{layer}.mixer.{site}", module, [_TENSOR] if is_dynamic else [],
                is_exact=is_exact, tokens=tokens,
            )  # fmt: skip


def mixers_of(quantized: Quantized, base: Model) -> list[RelatedModule]:
    """List the quantized Mamba mixers of a mode, each as one module."""
    names = [f"{layer}.mixer" for layer in base.layers]
    if quantized.mode.choices is None:
        return []
    return [RelatedModule(name, quantized.model.module.get_submodule(name)) for name in names]
