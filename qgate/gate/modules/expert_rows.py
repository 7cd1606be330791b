"""Rows of mixtures of experts: tokens per expert, router flips, errors of each expert's tokens.

Free-running, the choices of the routers are compared with the reference's. Each mixture is also
given the reference's input: what it computes of that is its own doing, and names its fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qgate.expected.mixtures import MixtureOutputs, routing_changes
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.site_rows import ModelSites
from qgate.hooks.module_hooks import ModuleHooks
from qgate.hooks.tapping import tap_sites
from qgate.models import Model, Site
from qgate.models.experts import mixtures_of
from qgate.modes import Quantized

_FITTED_TOKENS, _READ_TOKENS = 1024, 128
_ABOUT = "tokens whose weights at each expert were recovered from the output"

Factors = tuple[float, ...]
"""Factors of equal parts of the channels of a layer's output."""


@dataclass
class MixtureTensors:
    """Tensors of one mixture, sample after sample; `hidden` is the input of its experts."""

    inputs: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    routing: list[Tensor] = field(default_factory=list)


def expert_rows(
    quantized: Quantized, base: Model, meant: Quantized, sites: ModelSites
) -> list[Measured]:
    """Measure all mixtures of a mode."""
    names = mixtures_of(base.module)
    reference = _passed(base, names)
    free = _passed(quantized.model, names)
    forced = _passed(quantized.model, names, reference)
    expected = meant.model if set(names) <= set(mixtures_of(meant.model.module)) else base
    expected_tensors = (
        forced if expected is quantized.model else _passed(expected, names, reference)
    )
    rows: list[Measured] = []
    # A mode of the model's own may have no module there: its blocks are compared all the same.
    for name in (name for name in names if forced[name].outputs):
        mixture = _Mixture(name, sites, reference[name])
        rows += mixture.routing_row("forward", free[name])
        rows += mixture.routing_row("local", forced[name])
        rows += mixture.share_rows(free[name])
        conformance = _conformance(expected, base, name, expected_tensors[name], forced[name])
        rows += mixture.error_rows(forced[name], conformance)
    return rows


@dataclass
class _Mixture:
    name: str
    sites: ModelSites
    reference: MixtureTensors

    def _row(self, site: str, scope: Any, near: str, **details: Any) -> Measured:
        order = self.sites.place(f"{self.name}.experts.{near}")
        values: Mapping[str, float] = details["values"]
        name = f"{self.name}.{site}" if site else f"{self.name}:output"
        why = dict.fromkeys(values, "")
        return self.sites.row(name, scope, order, why=why, gated=tuple(values), **details)

    def routing_row(self, scope: str, actual: MixtureTensors) -> list[Measured]:
        """Measure how many tokens choose other experts, and how far weights move."""
        if not actual.routing:
            return []
        pairs = zip(actual.routing, self.reference.routing, strict=True)
        changes = [routing_changes(_rows(a), _rows(r)) for a, r in pairs]
        flips, shifts = (torch.cat(column) for column in zip(*changes, strict=True))
        values = {
            "router_flips": float(flips.double().mean()),
            "weight_shift": float(shifts.mean()),
        }
        return [
            self._row(
                "experts.routing:output", scope, "routing:output", values=values,
                grain=1 / len(flips), nonfinite=_nonfinite(actual.routing),
            )
        ]  # fmt: skip

    def share_rows(self, actual: MixtureTensors) -> list[Measured]:
        """Measure which share of all choices each expert got."""
        if not actual.routing:
            return []
        chosen = torch.cat([_rows(routing) != 0 for routing in actual.routing]).double()
        shares = (chosen.sum(0) / chosen.sum()).tolist()
        return [
            self._row(
                f"experts.{expert}:output", "forward", f"{expert}.down_proj:output",
                values={"token_share": share}, grain=1 / float(chosen.sum()),
            )
            for expert, share in enumerate(shares)
        ]  # fmt: skip

    def error_rows(self, actual: MixtureTensors, held: Conformance) -> list[Measured]:
        """Measure the error of the output on the tokens of each expert, given the same input."""
        routing = torch.cat([_rows(tensor) for tensor in self.reference.routing])
        y, r = (torch.cat([_rows(t) for t in of.outputs]) for of in (actual, self.reference))
        error, energy = (y - r).double().square().sum(-1), r.double().square().sum(-1)
        rows = [
            self._row(
                "", "local", f"{routing.shape[-1] - 1}.down_proj:output", values={},
                conformance=(held,), nonfinite=_nonfinite(actual.outputs),
            )
        ]  # fmt: skip
        for expert, own in enumerate((routing != 0).unbind(-1)):
            if not bool(own.any()):
                continue
            mse = float(error[own].sum() / energy[own].sum().clamp_min(1e-300))
            near = f"{expert}.down_proj:output"
            rows.append(
                self._row(f"experts.{expert}:output", "local", near, values={"relative_mse": mse})
            )
        return rows


def _conformance(
    expected: Model, base: Model, name: str, given: MixtureTensors, forced: MixtureTensors
) -> Conformance:
    """Hold the output of a mixture at what its experts give for the reference's input."""
    mixture = expected.module.get_submodule(name)
    x, y, weights = (
        torch.cat([_rows(tensor) for tensor in tensors])[:_FITTED_TOKENS]
        for tensors in (given.hidden, forced.outputs, given.routing)
    )
    parts = [f"experts.{number}" for number in range(weights.shape[-1])]
    experts = [mixture.get_submodule(part) for part in parts]
    plain = [base.module.get_submodule(f"{name}.{part}") for part in parts]
    router = next((m for m in mixture.children() if isinstance(m, nn.Linear)), None)
    device, dtype = expected.device, next(experts[0].parameters()).dtype
    with torch.no_grad():
        x = x.to(device, dtype)
        outputs = torch.stack([expert(x).float().cpu() for expert in experts], 1)
        shares = None if router is None else torch.softmax(router(x).float().cpu(), -1)
    # What a mixture adds to its experts, such as a shared one, is no business of theirs.
    added = torch.cat([_rows(tensor) for tensor in given.outputs])[: len(y)]
    added = added - torch.einsum("te,ted->td", weights, outputs)
    readings = functools.partial(wrong_readings, experts, plain, x[:_READ_TOKENS])
    is_exact = expected is not base
    compared = MixtureOutputs(y - added, outputs, weights, shares, readings, is_exact)
    fault = compared.fault()
    if fault is None:
        return Conformance("differing_share", len(x), 0, _ABOUT)
    return Conformance("differing_share", fault.of, fault.tokens, fault.words)


def _passed(
    model: Model, names: Sequence[str], given: Mapping[str, MixtureTensors] | None = None
) -> dict[str, MixtureTensors]:
    """Run all samples and keep what flows through mixtures, each `given` another run's input."""
    mixtures = {name: MixtureTensors() for name in names}
    modules = dict(model.module.named_modules())
    into: dict[tuple[str, str], list[Tensor]] = {}
    for name, of in mixtures.items():
        into[name, "input"], into[name, "output"] = of.inputs, of.outputs
        into[f"{name}.experts", "input"] = of.hidden
        into[f"{name}.experts.routing", "output"] = of.routing
    sites = [Site(module, port, "other") for module, port in into if module in modules]
    sample_number = 0

    def take(site: Site, tensor: Tensor) -> Tensor | None:
        replaced = None
        if given is not None and site.port == "input" and site.module in given:
            replaced = given[site.module].inputs[sample_number].to(tensor.dtype)
        passed = tensor if replaced is None else replaced
        into[site.module, site.port].append(passed.detach().float())
        return replaced

    with torch.no_grad(), tap_sites(model.module, sites, take):
        for sample_number, sample in enumerate(model.inputs):  # noqa: B007
            model.outputs(sample)
    return mixtures


def _rows(tensor: Tensor) -> Tensor:
    """Return a row of channels for each token, on the CPU."""
    return tensor.reshape(-1, tensor.shape[-1]).cpu()


def _nonfinite(tensors: Sequence[Tensor]) -> int:
    return sum(int((~tensor.isfinite()).sum()) for tensor in tensors)


def wrong_readings(
    experts: Sequence[nn.Module], plain: Sequence[nn.Module], x: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield words and outputs (tokens, experts, width) of experts with scales of something else.

    A scale follows the largest weight before quantization, those of the `plain` experts, so that
    the output of a layer is off by the ratio of two of those.
    """
    sizes = [{name: _largest(weight) for name, weight in _weights(expert)} for expert in plain]
    for number, own in enumerate(sizes):
        words = f"all weights are decoded with the scales of expert {number}"
        factors: list[dict[str, Factors]] = [
            {name: (own[name] / of[name],) for name in of} for of in sizes
        ]
        yield words, _outputs(experts, factors, x)
    halves = [_halves(expert) for expert in plain]
    if not all(halves):
        return
    ratio = max(max(gate / up, up / gate) for gate, up in halves)
    for half, other, number in (("gate", "up", 0), ("up", "gate", 1)):
        factors = []
        for scales in halves:
            factor = scales[1 - number] / scales[number]
            pair = (factor, 1.0) if number == 0 else (1.0, factor)
            factors.append({"gate_up_proj": pair, f"{half}_proj": (factor,)})
        words = (
            f"the {half} half is decoded with the tensor scale of the {other} half, which differ "
            f"by up to {ratio:.2f} times"
        )
        yield words, _outputs(experts, factors, x)


def _weights(expert: nn.Module) -> list[tuple[str, Tensor]]:
    named = ((name.removesuffix(".weight"), p) for name, p in expert.named_parameters())
    return [(name, parameter) for name, parameter in named if parameter.dim() > 1]


def _largest(weight: Tensor) -> float:
    return float(weight.detach().abs().amax().clamp_min(1e-30))


def _halves(expert: nn.Module) -> tuple[float, ...]:
    """Return the largest weight of gate and up, of one weight its first half and its second."""
    weights = dict(_weights(expert))
    if "gate_up_proj" in weights:
        return tuple(_largest(half) for half in weights["gate_up_proj"].chunk(2))
    if "gate_proj" in weights and "up_proj" in weights:
        return _largest(weights["gate_proj"]), _largest(weights["up_proj"])
    return ()


def _outputs(
    experts: Sequence[nn.Module], factors: Sequence[dict[str, Factors]], x: Tensor
) -> Tensor:
    """Return the outputs of experts whose layers are off by factors, by the name of the layer."""
    outputs = []
    with torch.no_grad():
        for expert, by_layer in zip(experts, factors, strict=True):
            with ModuleHooks() as hooks:
                for name, layer in expert.named_children():
                    if name in by_layer:
                        hooks.add(layer, after=_multiplied(by_layer[name]))
                outputs.append(expert(x).float().cpu())
    return torch.stack(outputs, 1)


def _multiplied(factors: Factors) -> Callable[..., Tensor]:
    def multiply(_module: nn.Module, _args: object, result: Tensor) -> Tensor:
        parts = result.chunk(len(factors), -1)
        return torch.cat([part * f for part, f in zip(parts, factors, strict=True)], -1)

    return multiply
