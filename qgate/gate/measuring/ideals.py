"""Tensors that ideal quantizers of the declared formats make at each site.

The ideal comes from the readable definitions, not from the code under test: of a tensor by the
definition of its format, of a linear layer's output by multiplying ideally quantized weight and
input, and of a Mamba block by the plain model of that block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.expected.conventions import MSE, Convention, conventions
from qgate.expected.distances import relative_error
from qgate.expected.modules import exact_product
from qgate.expected.searched_scales import least_searched, search_scales
from qgate.formats import Quantizer
from qgate.formats.definition import quantize as define
from qgate.gate.measuring.passes import errors_of_torch, float64_array
from qgate.models import Model, Site
from qgate.models.mamba.hadamard import matrix
from qgate.models.mamba.network import MambaMixer
from qgate.modes import Calibration, Mode, Plan, Quantized
from qgate.modes import definition as mamba_block
from qgate.modes.applying import stays_in_float32
from qgate.modes.simulated.planning import mixer_parameters

Array = npt.NDArray[Any]

# Sites of a mixer, and what the plain model of the block calls them.
TAPS = {
    "in_proj:input": "n",
    "conv1d:input": "x",
    "x_proj:input": "a",
    "scan:u": "u",
    "scan:dt": "delta",
    "scan:B": "B",
    "scan:C": "C",
    "scan:z": "z",
    "scan:output": "scan",
    "out_proj:input": "h",
    "out_proj:output": "out",
}
_SCALES = {
    "s_n": "in_proj:input",
    "s_z": "in_proj:output",
    "s_u": "x_proj:input",
    "s_x": "x_proj:output",
    "s_d": "dt_proj:output",
    "s_h": "scan:state",
    "s_o": "out_proj:input",
}


WEIGHTS = {
    "in_proj:weight": "in_proj", "conv1d:weight": "conv_weight", "conv1d:bias": "conv_bias",
    "x_proj:weight": "x_proj", "dt_proj:weight": "dt_proj", "dt_proj:bias": "dt_bias",
    "A_log": "A_log", "D": "D", "out_proj:weight": "out_proj",
}  # fmt: skip
"""Parameters of a mixer by site, and what the plain model calls them."""


def ideal_tensors(
    mode: Mode,
    plan: Plan,
    reference: Model,
    flowing: Mapping[str, Tensor],
    calibration: Calibration | None,
) -> dict[str, Array]:
    """Return what an ideal quantizer makes of the reference's tensor, by site."""
    if mode.choices is not None and calibration is not None:
        return _mamba(mode.name, reference, flowing, calibration)
    quantizers, dtype = plan.quantizers(), torch.float64
    if mode.dtype is not None:
        cast, dtype = Quantizer(*mode.formats), getattr(torch, mode.dtype)
        head = set(reference.head or ())
        quantizers = {
            s.name: cast
            for s in reference.sites()
            if s.is_product and s.module not in head
            and not stays_in_float32(reference.module, f"{s.module}.weight", dtype)
        }  # fmt: skip
    return _linears(reference, quantizers, flowing, dtype)


def _linears(
    reference: Model,
    quantizers: Mapping[str, Quantizer],
    flowing: Mapping[str, Tensor],
    bias_dtype: torch.dtype,
) -> dict[str, Array]:
    by_site: dict[str, Array] = {}
    by_content: dict[tuple[str, tuple[int, ...], int], Array] = {}

    def stored(site: Site, values: Array) -> Array:
        # A model whose own tensors are in 16 bits rounds what a mode in no dtype gives it.
        own = flowing[site.name].dtype if site.name in flowing else None
        if own not in (torch.bfloat16, torch.float16) or bias_dtype != torch.float64:
            return values
        return torch.from_numpy(values).to(own).double().numpy()

    for site in reference.sites():
        if (
            site.name in quantizers
            and site.port not in ("output", "state")
            and site.name in flowing
        ):
            # Query, key and value read one tensor, and the definition is slow.
            quantizer, values = quantizers[site.name], float64_array(flowing[site.name])
            key = (repr(quantizer), values.shape, hash(values.tobytes()))
            if key not in by_content:
                by_content[key] = stored(site, define(values, quantizer))
            by_site[site.name] = by_content[key]
    for site in reference.sites():
        if site.is_product and site.port == "output":
            product = _product(reference, site, by_site, flowing, bias_dtype=bias_dtype)
            if product is not None:
                own = quantizers.get(site.name)
                by_site[site.name] = stored(site, product if own is None else _cast(product, own))
    return by_site


@dataclass(frozen=True)
class KernelFit:
    """The convention nearest to what a kernel returned at one site.

    error     relative MSE of that convention, or of the definition if none explains the tensor
    explains  True if the kernel's tensor is what the convention gives
    """

    convention: str
    is_definition: bool
    error: float
    explains: bool

    def name(self, mode: str) -> str:
        return mode if self.is_definition else f"{mode} ({self.convention})"

    def reason(self, mode: str) -> str:
        return (
            f"the error is within 0.5 dB of that of {mode}, but no convention of {mode} gives "
            f"these values: the nearest is {self.convention}"
        )


UNEXPLAINED = 1e-4
"""Share of an ideal quantizer's squared error that may lie between a kernel and its convention.

Right kernels in float32 have 1e-9; groups that begin one element late have more than 0.005.
"""


def fit_kernels(
    reference: Model,
    quantizers: Mapping[str, Quantizer],
    flowing: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    convention: str,
) -> dict[str, KernelFit]:
    """Find for each product the convention that a kernel follows; "mse" has no exact one."""
    fits = {}
    for site in reference.sites():
        ports = [f"{site.module}:{port}" for port in ("input", "weight")]
        quantized = {port: quantizers[port] for port in ports if port in quantizers}
        quantized = {port: q for port, q in quantized.items() if port in flowing}
        is_product = site.is_product and site.port == "output" and site.name in actual
        if is_product and quantized and site.name not in quantizers:
            product = KernelProduct(reference, site, quantized, flowing)
            search = product.searched if convention == MSE else product.nearest
            fit = search(actual[site.name])
            if fit is not None:
                fits[site.name] = fit
    return fits


@dataclass(frozen=True)
class KernelProduct:
    """A product of the reference, some of whose arguments a kernel quantizes."""

    reference: Model
    site: Site
    quantizers: Mapping[str, Quantizer]
    flowing: Mapping[str, Tensor]

    def of(self, ideal: Mapping[str, Array], *, biased: bool = True) -> Array | None:
        return _product(self.reference, self.site, ideal, self.flowing, biased=biased)

    @property
    def true(self) -> Tensor:
        return self.flowing[self.site.name]

    @cached_property
    def values(self) -> dict[str, Array]:
        return {port: float64_array(self.flowing[port]) for port in self.quantizers}

    def by_convention(self) -> Iterator[tuple[str, Array, dict[str, Convention]]]:
        """Yield the product of each convention, and the convention of each argument."""
        listed = {port: conventions(quantizer) for port, quantizer in self.quantizers.items()}
        for convention in next(iter(listed.values())):
            choices = {
                port: next((c for c in of_port if c.name == convention.name), of_port[0])
                for port, of_port in listed.items()
            }
            product = self.of({port: choice(self.values[port]) for port, choice in choices.items()})
            if product is not None:
                yield convention.name, product, choices

    def undecided(self, choices: Mapping[str, Convention]) -> float:
        """Return the squared error of codes that noise decides, near a boundary."""
        energies = {
            port: np.square(float64_array(self.flowing[port]))
            for port in (f"{self.site.module}:input", f"{self.site.module}:weight")
        }
        error = 0.0
        for port, choice in choices.items():
            if not choice.is_exact:
                lower, upper = choice.alternatives(self.values[port])
                product = self.of({**energies, port: np.square(upper - lower)}, biased=False)
                error += 0.0 if product is None else float(product.sum())
        return error

    def searched(self, actual: Tensor) -> KernelFit | None:
        """Return the error nearest to a kernel's that a right search for scales may leave."""
        errors = []
        for cast in (search_scales, least_searched):
            ideal = {port: cast(self.values[port], q) for port, q in self.quantizers.items()}
            product = self.of(ideal)
            if product is None:
                return None
            errors.append(relative_error(product, self.true))
        error = min(max(relative_error(actual, self.true), min(errors)), max(errors))
        return KernelFit("searched scales", is_definition=False, error=error, explains=True)

    def nearest(self, actual: Tensor) -> KernelFit | None:
        """Return the convention that explains a tensor, or the nearest of them."""
        rounding, energy = _rounding(actual), float(np.square(float64_array(self.true)).sum())
        candidates: list[tuple[float, float, dict[str, Convention], KernelFit]] = []
        for name, product, choices in self.by_convention():
            distance, error = _distances(product, actual, self.true)
            excess = distance - (UNEXPLAINED * error + rounding)
            relative = error / energy if energy else 0.0
            fit = KernelFit(name, not candidates, relative, explains=True)
            if excess <= 0:
                return fit
            candidates.append((distance, excess, choices, fit))
        if not candidates:
            return None
        # Codes near a boundary take two more casts to find: the nearest convention first.
        by_distance = sorted(candidates, key=lambda candidate: candidate[0])
        for _, excess, choices, fit in by_distance:
            if excess <= self.undecided(choices):
                return fit
        return KernelFit(by_distance[0][3].convention, True, candidates[0][3].error, explains=False)


def _distances(product: Array, actual: Tensor, true: Tensor) -> tuple[float, float]:
    """Return the squared distances of a product from the kernel's and from the true values."""
    values = float64_array(true)
    shaped = product.reshape(values.shape)
    return (
        float(np.square(float64_array(actual).reshape(values.shape) - shaped).sum()),
        float(np.square(shaped - values).sum()),
    )


def _rounding(actual: Tensor) -> float:
    """Return the squared error of rounding to the narrowest dtype that holds all values."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(actual.to(dtype).to(actual.dtype), actual):
            step = torch.finfo(dtype).eps / 2
            return float(actual.double().square().sum()) * step * step
    return 0.0


def _product(
    reference: Model,
    site: Site,
    ideal: Mapping[str, Array],
    flowing: Mapping[str, Tensor],
    *,
    biased: bool = True,
    bias_dtype: torch.dtype = torch.float64,
) -> Array | None:
    """Multiply a module's ideal input and weight; None where neither is quantized, or no product.

    A convolution that computes in a way of its own has no product.
    """
    names = [f"{site.module}:{port}" for port in ("input", "weight")]
    if not any(name in ideal for name in names) or any(name not in flowing for name in names):
        return None
    x, w = (
        torch.from_numpy(ideal[n]) if n in ideal else flowing[n].detach().double().cpu()
        for n in names
    )
    module = reference.module.get_submodule(site.module)
    product = exact_product(module, x, w, biased=biased, bias_dtype=bias_dtype)
    return None if product is None else product.numpy()


def _cast(values: Array, quantizer: Quantizer) -> Array:
    return define(values.astype(np.float32).astype(np.float64), quantizer)


def _mamba(
    mode: str, reference: Model, flowing: Mapping[str, Tensor], calibration: Calibration
) -> dict[str, Array]:
    by_site: dict[str, Array] = {}
    for layer in reference.layers:
        mixer = reference.module.get_submodule(f"{layer}.mixer")
        if not isinstance(mixer, MambaMixer):
            raise TypeError(f"{layer}.mixer is {type(mixer).__name__}")
        at = f"{layer}.mixer"
        scales = mixer_scales(at, calibration)
        hidden = flowing[f"{layer}:input"].detach().float().cpu().numpy()
        h = matrix(mixer.D.numel()).float().numpy()
        taps = mamba_block.block(mode, mixer_weights(mixer), scales, hidden, h)
        by_site |= {f"{at}.{site}": taps[tap] for site, tap in TAPS.items()}
    return by_site


def mixer_scales(at: str, calibration: Calibration) -> dict[str, float]:
    """Return the static scales of a mixer as the plain model of the block names them."""
    scales = {name: calibration[f"{at}.{site}"].scale for name, site in _SCALES.items()}
    return {**scales, "s_u1": calibration[f"{at}.x_proj:input"].wide or scales["s_u"]}


def mixer_weights(mixer: MambaMixer) -> dict[str, Array]:
    """Return the weights of a rotated mixer as the plain model of the block names them."""
    weights = {
        WEIGHTS[site]: parameter.detach().float().cpu().numpy()
        for site, parameter in mixer_parameters(mixer)
    }
    weights["conv_weight"] = weights["conv_weight"][:, 0]
    weights.setdefault("conv_bias", np.zeros(mixer.D.numel(), np.float32))
    return weights


@dataclass
class IdealErrors:
    """Relative MSE of an ideal quantizer by site, its name, and what it does not explain."""

    errors: dict[str, float] = field(default_factory=dict)
    quantizers: dict[str, str] = field(default_factory=dict)
    unexplained: dict[str, str] = field(default_factory=dict)


def ideal_errors(
    quantized: Quantized,
    meant: Quantized,
    base: Model,
    flowing: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
) -> IdealErrors:
    """Return the errors of ideal quantizers of `meant` on the tensors that the reference makes."""
    tensors = ideal_tensors(meant.mode, meant.plan, base, flowing, meant.scales)
    ideal = IdealErrors(
        {site: relative_error(tensors[site], flowing[site]) for site in tensors if site in flowing},
        {entry.site: entry.does for entry in quantized.plan.entries},
    )
    if meant.mode.dtype is not None:
        dtype = getattr(torch, meant.mode.dtype)
        for site, errors in errors_of_torch(base, dtype, flowing).items():
            if site in ideal.errors and site in actual:
                own = relative_error(actual[site], flowing[site])
                errors.append(ideal.errors[site])
                ideal.errors[site] = min(errors, key=lambda e: abs(e - own))
    if meant is quantized or not quantized.mode.own:
        return ideal
    # A kernel quantizes inside: only what it returns can be looked at.
    ideal.errors = {site: e for site, e in ideal.errors.items() if site.endswith(":output")}
    ideal.quantizers = dict.fromkeys(ideal.errors, meant.mode.name)
    if meant.mode.choices is None:
        quantizers, convention = meant.plan.quantizers(), quantized.mode.convention
        fits = fit_kernels(base, quantizers, flowing, actual, convention)
        ideal.errors |= {site: fit.error for site, fit in fits.items()}
        ideal.quantizers |= {site: fit.name(meant.mode.name) for site, fit in fits.items()}
        ideal.unexplained = {
            site: fit.reason(meant.mode.name) for site, fit in fits.items() if not fit.explains
        }
    return ideal
