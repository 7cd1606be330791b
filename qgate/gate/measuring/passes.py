"""Passes through a model: the tensors at its sites, alone or fed by the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.capture import Capture
from qgate.capture.running import pass_through
from qgate.errors import QgateError
from qgate.expected.distances import relative_error
from qgate.expected.modules import own_factors
from qgate.gate.measuring.call_arguments import CallArguments
from qgate.hooks.module_hooks import ModuleHooks
from qgate.hooks.tapping import tap_sites
from qgate.models import Model, Site
from qgate.models.rows import (
    cut_sample,
    fullest_row,
    join_rows,
    real_tokens,
    row_count,
    tensors_of,
    token_ids,
)
from qgate.models.sites import like
from qgate.modes import Quantized

BUDGET_TOKENS = 128
_MOST_NUMBERS = 1 << 16
# Sums whose order differs between two runs, as on a GPU, move an output by 1e-13 of its energy.
_REPEATABLE = 1e-9
Watch = Callable[[Any, str], AbstractContextManager[dict[str, Tensor]]]
AT_ONCE = 8
"""Samples that run side by side, where a device has the memory."""


def short_layer(name: str) -> str:
    """Return `layers.3` for `backbone.layers.3`."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 else name


def linear_weights(model: Model) -> list[Site]:
    return [site for site in model.sites() if site.port == "weight" and site.is_product]


def batches(samples: Sequence[Any], together: bool, most: int = AT_ONCE) -> Iterator[list[Any]]:
    """Put samples of one shape side by side, where a mode is the same alone and in a batch."""
    batch: list[Any] = []
    for sample in samples:
        fits = together and batch and isinstance(sample, Tensor) and len(batch) < most
        if batch and not (fits and sample.shape == batch[0].shape):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def outer_tensors(
    model: Model,
    samples: Sequence[Any],
    forced: Capture | None = None,
    together: bool = True,
    watch: Watch | None = None,
    most: int = AT_ONCE,
) -> Capture:
    """Capture inputs and outputs of the blocks and of the model, one tensor per sample.

    `forced` gives the inputs. `watch(batch, name)` is entered around each pass, and gets the
    outputs of the model. Where samples are not told apart in a batch, each runs alone; at most
    `most` run at once.
    """
    sites = [s for s in model.sites() if s.is_block and s.port in ("input", "output")]
    record = Capture(model.name, model.basis, "")
    record.tensors = {site.name: [] for site in sites}
    start = 0
    with torch.no_grad():
        for batch in batches(samples, together, most):
            passed: dict[str, Tensor] = {}

            def keep(
                _index: int, site: Site, tensor: Tensor, passed: dict[str, Tensor] = passed
            ) -> None:
                # A module that runs again is compared the first time.
                passed.setdefault(site.name, _copied(tensor))

            end = start + len(batch)
            sample = batch[0] if len(batch) == 1 else torch.cat(batch)
            part = None if forced is None else _inputs(forced, sites, start, end)
            with watch(sample, _named(start, end)) if watch else nullcontext({}) as watched:
                outputs = pass_through(model, sites, 0, sample, keep, part)
                watched |= outputs
            passed |= {name: _copied(tensor) for name, tensor in outputs.items()}
            if len(batch) > 1 and any(len(tensor) % len(batch) for tensor in passed.values()):
                return outer_tensors(model, samples, forced, together=False, watch=watch)
            for name, tensor in passed.items():
                record.tensors.setdefault(name, []).extend(tensor.chunk(len(batch)))
            start = end
    return record


def _copied(tensor: Tensor) -> Tensor:
    """Copy a tensor to float32; a single number counts as one row."""
    copied = tensor.detach().to(torch.float32, copy=True)
    return copied if copied.dim() else copied.reshape(1)


def _named(start: int, end: int) -> str:
    return f"sample {start}" if end == start + 1 else f"samples {start} to {end - 1}"


def _inputs(forced: Capture, sites: list[Site], start: int, end: int) -> Capture:
    part = Capture(forced.model, forced.basis, "")
    for site in sites:
        if site.port == "input":
            part.tensors[site.name] = [join_rows(forced[site.name][start:end])]
    return part


def shortened(sample: Any) -> Any:
    """Return the first tokens of a sample, or as many rows as have few numbers.

    Of a sample with padding it is one row, and its real tokens.
    """
    if real_tokens(sample) is not None:
        return cut_sample(fullest_row(sample), slice(0, 1), BUDGET_TOKENS)
    numbers = sum(tensor.numel() for _, tensor in tensors_of(sample))
    rows = row_count(sample)
    if token_ids(sample) is None and numbers > _MOST_NUMBERS:
        rows = max(1, rows * _MOST_NUMBERS // numbers)
    return cut_sample(sample, slice(0, rows), BUDGET_TOKENS)


def capture_sites(model: Model, sites: Sequence[Site]) -> dict[str, Tensor]:
    """Capture the tensors at sites on a short text."""
    return flow(model, set(sites), shortened(model.inputs[0]))


def check_repeatable(model: Model) -> None:
    """Refuse a model whose outputs are masked by infinities, or others when it runs again.

    NaN is a result of the weights that the gates have to find and place.
    """
    sample = shortened(model.inputs[0])
    with torch.no_grad():
        first, second = model.outputs(sample), model.outputs(sample)
    for name, tensor in first.items():
        if not bool(tensor.isnan().any()) and (count := int(tensor.isinf().sum())):
            raise QgateError(
                f"{model.name} cannot be a reference: its output {name} has {count} infinite "
                f"values of {tensor.numel()}, which nothing can be compared with. Let its forward "
                "return other outputs alone."
            )
        repeated = second.get(name)
        if repeated is None or repeated.shape != tensor.shape:
            shape = "is not there" if repeated is None else f"is {tuple(repeated.shape)}"
            problem = f"{name} is {tuple(tensor.shape)}, and {shape} when it runs again"
        elif relative_error(repeated, tensor) > _REPEATABLE:
            problem = f"{name} has other values when it runs again: dropout or sampling is on"
        else:
            continue
        raise QgateError(
            f"{model.name} cannot be a reference: its output {problem}. Let its forward draw no "
            "random numbers, or seed them there."
        )


def flow(model: Model, sites: Iterable[Site], sample: Any) -> dict[str, Tensor]:
    """Capture the first tensor at each site in one pass of a sample; experts may get none."""
    tensors: dict[str, Tensor] = {}

    def keep(_index: int, site: Site, tensor: Tensor) -> None:
        tensors.setdefault(site.name, tensor.detach().clone())

    with torch.no_grad():
        pass_through(model, sites, 0, sample, keep, strict=False)
    return tensors


def fed(
    quantized: Quantized,
    sites: list[Site],
    sample: Any,
    flowing: dict[str, Tensor],
    outside: Sequence[Site] = (),
    whole: Mapping[str, CallArguments] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Capture the tensors of a mode at sites that are given the reference's inputs.

    A quantized Mamba mixer is fed as a whole, as its parts depend on each other; elsewhere every
    linear layer, every convolution and every other site that is quantized on its way in is fed by
    itself, and so are the sites `outside` of all blocks. A module that runs again is fed the first
    time. Modules with several inputs get all of them from `whole`. Modules that get other rows
    here, or none, as an expert does when a router chooses otherwise, are called by themselves.
    """
    model = quantized.model
    if quantized.mode.choices is not None:
        gates = [s for s in model.sites() if s.port == "input" and s.is_block]
    else:
        own = quantized.plan.quantizers()
        gates = [
            site
            for site in sites
            if site.port not in ("weight", "output", "state")
            and (site.is_product or site.name in own)
        ]
    taps = dict.fromkeys([*gates, *outside])
    waiting = {site.name for site in taps if site.name in flowing}

    def feed(site: Site, tensor: Tensor) -> Tensor:
        if site.name not in waiting or flowing[site.name].shape != tensor.shape:
            return tensor
        waiting.remove(site.name)
        return flowing[site.name].to(tensor.dtype)

    with torch.no_grad(), tap_sites(model.module, taps, feed, first=True), ModuleHooks() as hooks:
        for name, arguments in whole.items():
            hooks.add(model.module.get_submodule(name), arguments.give, first=True)
        tensors = flow(model, sites, sample)

    def keep(site: Site, tensor: Tensor) -> None:
        tensors[site.name] = tensor.detach().clone()

    # Of modules without a call those alone whose like were called: other experts of the layer.
    called = {like(name) for name in tensors}
    for site in taps:
        if site.name in waiting and site.port == "input" and like(site.name) in called:
            of_module = [other for other in sites if other.module == site.module]
            with torch.no_grad(), tap_sites(model.module, of_module, keep):
                module = model.module.get_submodule(site.module)
                dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
                module(flowing[site.name].to(dtypes[0] if dtypes else None))
    return tensors


@contextmanager
def idle_experts(model: Model) -> Iterator[set[str]]:
    """Yield the weights of experts, and take away those whose module gets rows inside."""
    experts = [s for s in model.sites() if s.port == "weight" and like(s.name) != s.name]
    idle = {site.name for site in experts}

    def take(site: Site, tensor: Tensor) -> None:
        if tensor.numel():
            idle.discard(f"{site.module}:weight")

    inputs = [replace(site, port="input") for site in experts]
    with tap_sites(model.module, inputs, take, lenient=True):
        yield idle


def float64_array(tensor: Tensor) -> npt.NDArray[np.float64]:
    return tensor.detach().float().cpu().numpy().astype(np.float64)


@torch.no_grad()
def errors_of_torch(
    base: Model, dtype: torch.dtype, flowing: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Return the errors of torch's own products in 16 bits, also where a bias is added behind them.

    It rounds a product before it adds the bias, or each tap of a convolution, for some layouts. A
    layer that scales its weight rounds that.
    """
    errors = {}
    for site in base.sites():
        x, output = flowing.get(f"{site.module}:input"), flowing.get(site.name)
        module = base.module.get_submodule(site.module)
        if not (site.is_product and site.port == "output") or x is None or output is None:
            continue
        is_torch = type(module).__module__.startswith("torch.nn.")
        if is_torch or own_factors(module) != (1.0, 1.0):
            parameters = {name: p.to(dtype) for name, p in module.named_parameters()}
            run = partial(torch.func.functional_call, module)
            results = [run(parameters, (x.to(dtype),))]
            if is_torch and (bias := parameters.get("bias")) is not None:
                product = run({**parameters, "bias": torch.zeros_like(bias)}, (x.to(dtype),))
                axis = site.channel_axis(product) % product.dim()
                results.append(product + bias.reshape(-1, *(1,) * (product.dim() - 1 - axis)))
            errors[site.name] = [relative_error(result, output) for result in results]
    return errors
