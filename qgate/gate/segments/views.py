"""Tensors at the sites of a run: as code made them, and as quantizers handed them on.

A segment begins at tensors that were forwarded and ends at those that code made. Where nothing is
quantized both are one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qgate.hooks.tapping import tap_sites
from qgate.loading import LateModule
from qgate.models import Model
from qgate.models.sites import Site
from qgate.modes import Quantized
from qgate.modes.simulated.mixer import SimulatedMixer
from qgate.modes.simulated.products import FloatLinear, IntLinear, SplitLinear

if TYPE_CHECKING:
    from qgate.modes.states import mixers as mixers
else:
    mixers = LateModule("qgate.modes.states.mixers")

Tensors = Mapping[str, list[Tensor]]
_PARAMETERS = ("A_log", "D", "dt_bias")


@dataclass(frozen=True)
class Port:
    """A place where a hook takes a tensor; `first` ones are recorder before other hooks."""

    module: str
    port: str
    first: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}:{self.port}{'!' if self.first else ''}"


@dataclass
class Passed:
    """Tensors of one pass by site, in the order of calls.

    actual     tensors as the code before the site made them
    forwarded  tensors as the code behind the site reads them
    """

    actual: dict[str, list[Tensor]] = field(default_factory=dict)
    forwarded: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class SegmentView:
    """Places to take tensors of a run at, and how they compare with those of FP32 code.

    ports      places to take tensors at
    sites      sites of the reference that are compared, and replaced by the run's tensors
    silent     sites that are replaced and not compared
    weights    parameters that the run quantized, as the reference reads them: module → name → value
    half       sites whose tensors the mode rounds to float16 by design
    left_out   what cannot be held, with the reason
    """

    ports: tuple[Port, ...]
    sites: tuple[Site, ...]
    silent: frozenset[str]
    weights: Mapping[str, Mapping[str, Tensor]]
    half: frozenset[str]
    left_out: Mapping[str, str]
    read: Callable[[Tensors], Passed]


def view_of(quantized: Quantized, base: Model, meant: Quantized) -> SegmentView:
    """Return the view of a mode; `meant` is the one that a kernel of the model's own stands for."""
    if quantized.mode.choices is not None:
        return _mixers(quantized, base)
    return _rules(quantized, base, meant)


def free_products(
    view: SegmentView, run: nn.Module, reference: nn.Module, *, own: bool = False
) -> set[Site]:
    """Return the products of a run whose results may be any: nothing is computed there.

    Those of kernels of one's own are held elsewhere, and handed to the reference as they are.
    """
    port_names = {port.name for port in view.ports}
    listed = [site for site in view.sites if site.is_product and site.port == "output"]
    return {
        site
        for site in listed
        if site.name in port_names
        and (
            own
            if site.name in view.silent
            else isinstance(
                run.get_submodule(site.module), type(reference.get_submodule(site.module))
            )
        )
    }


def plain_view(base: Model) -> SegmentView:
    """Return the view of a run in which nothing is quantized."""
    sites = tuple(site for site in base.sites() if site.port not in ("weight", "state"))
    ports = tuple(Port(site.module, site.port) for site in sites)

    def read(tensors: Tensors) -> Passed:
        return Passed({**tensors}, {**tensors})

    return SegmentView(ports, sites, frozenset(), {}, frozenset(), {}, read)


def view_around_mixers(quantized: Quantized, base: Model) -> SegmentView:
    """Return the view of the code around the mixers of a mode, each of which is one silent part."""
    mixers = [
        name for name, module in quantized.model.module.named_modules()
        if isinstance(module, SimulatedMixer)
    ]  # fmt: skip
    view = plain_view(base)
    silent = frozenset(f"{name}.out_proj:output" for name in mixers)
    sites = [
        site for site in view.sites
        if site.name in silent or not site.module.startswith(tuple(f"{name}." for name in mixers))
    ]  # fmt: skip
    ports = [Port(site.module, site.port) for site in sites]
    return replace(view, ports=tuple(ports), sites=tuple(sites), silent=silent)


class TakenTensors:
    """Tensors that a pass hands over; those that later code overwrites are copied."""

    def __init__(self, overwritten: Iterable[str] = (), copies: bool = False) -> None:
        self.tensors: dict[str, list[Tensor]] = {}
        self._copied = set(overwritten)
        self._copies = copies
        self._versions: list[tuple[str, Tensor, int]] = []
        self._clones: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def watch(self, module: nn.Module, ports: Sequence[Port]) -> Iterator[None]:
        first = [port for port in ports if port.first]
        after = [port for port in ports if not port.first]
        with (
            tap_sites(module, first, self._take, first=True),
            tap_sites(module, after, self._take),
        ):
            yield

    def _take(self, port: Port, tensor: Tensor) -> None:
        key = id(tensor), (version := _version(tensor))
        if key not in self._clones:
            is_copied = self._copies or port.name in self._copied
            self._clones[key] = tensor.detach().clone() if is_copied else tensor.detach()
        self._versions.append((port.name, tensor, version))
        self.tensors.setdefault(port.name, []).append(self._clones[key])

    def overwritten(self) -> set[str]:
        return {name for name, tensor, version in self._versions if _version(tensor) != version}

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._clones.values())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def swapped(module: nn.Module, parameters: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
    """Let modules compute with other parameters for a while."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, values in parameters.items():
            owner = module.get_submodule(name)
            for key, value in values.items():
                before.append((owner, key, owner._parameters[key]))
                owner._parameters[key] = value  # type: ignore[assignment]
        yield
    finally:
        for owner, key, parameter in before:
            owner._parameters[key] = parameter


# Modes of rules, whole dtypes, and kernels --------------------------------------------------------


def _rules(quantized: Quantized, base: Model, meant: Quantized) -> SegmentView:
    mode, module = quantized.mode, quantized.model.module
    left_out: dict[str, str] = {}
    planned = set(quantized.plan.quantizers())
    sites = [site for site in base.sites() if site.port not in ("weight", "state")]
    silent: set[str] = set()
    if mode.attention is not None:
        # Held by the definition of attention over the cache, which FP32 code does not have.
        ats = {entry.site.rpartition(".")[0] for entry in quantized.plan.entries}
        silent = {
            f"{at}.{leaf}:input" for at in ats for leaf in ("o_proj", "out_proj", "kv_b_proj")
        }
    if mode.states is not None:
        # Held by the definition of what follows from stored states.
        silent = {
            reader for m in mixers.named_mixers(quantized.model) for reader in m.readers.values()
        }
    if mode.own and not quantized.model.sites():
        left_out["*"] = (
            f"mode {mode.name} has no module of the reference: its outputs are held by their "
            "accepted errors alone"
        )
        sites = []
    elif mode.own and meant is quantized:
        left_out["*"] = (
            f"mode {mode.name} may quantize anything, and is held by its accepted errors; "
            "qgate.modes.Kernel says what a kernel stands for"
        )
        sites = []
    elif mode.own:
        kernels = {name.partition(":")[0] for name in meant.plan.quantizers()}
        present = {name for name, _ in module.named_modules()}
        for name in sorted(kernels - present):
            left_out[base.layer_of(name) or name] = (
                f"{name} has no counterpart in the run: its budget and accepted errors hold it"
            )
        sites = [s for s in sites if s.module in present]
        sites = [s for s in sites if (base.layer_of(s.module) or s.module) not in left_out]
        silent = {f"{name}:output" for name in kernels}
        if kernels:
            left_out["kernels"] = "their products are held by the budget: quantized inside"
    weights = {
        site.module: {"weight": _weight(module, site.module)}
        for site in base.sites()
        if site.port == "weight" and site.name in planned
    }
    if meant.mode.dtype is not None:
        weights = dict(_rounded_once(module, base.module))
    ports = [Port(s.module, s.port, first=True) for s in sites if s.name in planned]
    ports += [Port(s.module, s.port) for s in sites]

    def read(tensors: Tensors) -> Passed:
        forwarded = {s.name: tensors[s.name] for s in sites if s.name in tensors}
        actual = {name: tensors.get(f"{name}!", values) for name, values in forwarded.items()}
        return Passed(actual, forwarded)

    return SegmentView(
        tuple(ports), tuple(sites), frozenset(silent), weights, frozenset(), left_out, read
    )


@torch.no_grad()
def _weight(module: nn.Module, name: str) -> Tensor:
    """Return a weight as it is read; without gradients it is quantized once for all passes."""
    weight = module.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _rounded_once(
    module: nn.Module, reference: nn.Module
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the weights of a run that are those of the reference, rounded to another dtype."""
    own_modules = dict(module.named_modules())
    for name, owner in reference.named_modules():
        mine = own_modules[name]._parameters if name in own_modules else {}
        rounded = {
            key: parameter.detach().float()
            for key, parameter in mine.items()
            if parameter is not None
            and (true := owner._parameters.get(key)) is not None
            and parameter.dtype != true.dtype
            and torch.equal(true.detach().to(parameter.dtype), parameter)
        }
        if rounded:
            yield name, rounded


# Quantized mixers ---------------------------------------------------------------------------------


def _mixers(quantized: Quantized, base: Model) -> SegmentView:
    network = quantized.model.module
    mixers = {
        name: module for name, module in network.named_modules()
        if isinstance(module, SimulatedMixer)
    }  # fmt: skip
    sites = [site for site in base.sites() if site.port not in ("weight", "state")]
    ports = [Port(site.module, site.port) for site in sites]
    weights: dict[str, dict[str, Tensor]] = {}
    half: set[str] = set()
    silent: set[str] = set()
    for at, mixer in mixers.items():
        ports += [Port(f"{at}.{leaf}", port) for leaf, port in _casts(mixer)]
        ports += [Port(f"{at}.scan", name) for name in _PARAMETERS]
        sites += [Site(f"{at}.scan", name, "scan") for name in _PARAMETERS]
        silent |= {f"{at}.scan:{name}" for name in _PARAMETERS}
        half |= {f"{at}.scan:output", f"{at}.out_proj:output"}
        for leaf in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"):
            module: Any = mixer.get_submodule(leaf)
            weights[f"{at}.{leaf}"] = {"weight": module.weight.detach()}
        if mixer.conv1d.bias_codes is not None:
            bias = mixer.conv1d.bias_codes.dequantized()
            weights[f"{at}.conv1d"]["bias"] = bias.detach()

    def read(tensors: Tensors) -> Passed:
        forwarded = {s.name: tensors[s.name] for s in sites if s.name in tensors}
        passed = Passed(dict(forwarded), dict(forwarded))
        for at, mixer in mixers.items():
            if f"{at}.in_cast:input" in tensors:
                _read_mixer(at, mixer, tensors, passed)
        return passed

    return SegmentView(
        tuple(dict.fromkeys(ports)), tuple(sites), frozenset(silent), weights, frozenset(half), {},
        read,
    )  # fmt: skip


def _casts(mixer: SimulatedMixer) -> list[tuple[str, str]]:
    """List the places of a mixer where tensors are still unquantized, or already quantized."""
    places = [("in_cast", "input"), ("in_proj.cast", "input"), ("hadamard.cast", "input")]
    places += [(leaf, "output") for leaf in ("x_cast", "dt_cast")]
    for leaf in ("x_proj", "dt_proj"):
        if isinstance(mixer.get_submodule(leaf), IntLinear):
            places.append((f"{leaf}.cast", "input"))
    if mixer.choices.dynamic_conv:
        places.append(("conv_cast", "input"))
    if mixer.choices.path_a == "codes":
        places.append(("u_cast", "input"))
    if mixer.path_b is not None:
        places.append(("path_b", "input"))
    return places


def _read_mixer(at: str, mixer: SimulatedMixer, tensors: Tensors, passed: Passed) -> None:
    """Fill in what a mixer made before its casts, and what it read behind them."""
    choices = mixer.choices

    def calls(leaf: str, port: str = "input") -> list[Tensor]:
        return tensors[f"{at}.{leaf}:{port}"]

    def set_actual(site: str, values: list[Tensor]) -> None:
        passed.actual[f"{at}.{site}"] = values

    set_actual("in_proj:input", calls("in_cast"))
    if choices.dynamic_conv:
        set_actual("conv1d:input", calls("conv_cast"))
    set_actual("x_proj:input", calls("u_cast" if choices.path_a == "codes" else "path_b"))
    set_actual("scan:u", calls("u_cast" if mixer.path_b is None else "path_b"))
    for leaf in ("in_proj", "x_proj", "dt_proj"):
        module: nn.Module = mixer.get_submodule(leaf)
        if isinstance(module, FloatLinear):
            continue
        assert isinstance(module, IntLinear)
        products = [k * module.s_out for k in calls(f"{leaf}.cast")]
        if isinstance(module, SplitLinear):
            halves = zip(calls(leaf, "output"), products, strict=True)
            products = [torch.cat([y.chunk(2, -1)[0], second], -1) for y, second in halves]
        set_actual(f"{leaf}:output", products)
    hadamard: Any = mixer.hadamard
    set_actual("hadamard:output", [k * hadamard.scale for k in calls("hadamard.cast")])
    # What x_proj returns is put on a grid behind it; dt_proj reads it before where only the scan
    # reads it from the grid.
    on_grid, rank = calls("x_cast", "output"), mixer.split[0]
    if choices.regridded == "scan":
        pairs = zip(calls("x_proj", "output"), on_grid, strict=True)
        on_grid = [torch.cat([y[..., :rank], k[..., rank:]], -1) for y, k in pairs]
    passed.forwarded[f"{at}.x_proj:output"] = on_grid
    passed.forwarded[f"{at}.dt_proj:output"] = calls("dt_cast", "output")
