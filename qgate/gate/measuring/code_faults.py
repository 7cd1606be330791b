"""Faults of the code between two places of a block, which is a function of what it begins at."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qgate.gate.measuring.call_arguments import CallArguments, arguments_of
from qgate.gate.measuring.segment_views import SegmentView
from qgate.gate.measuring.segments import TakenTensors
from qgate.hooks.tapping import tap_sites
from qgate.kernel_checks.explained import CodeCall, floating_state
from qgate.models import Model, Site
from qgate.models.rows import cut_sample, fullest_row, map_tensors

Parameters = Mapping[str, Tensor]
FEW_TOKENS = 24
"""Tokens of the sample that code is run with."""
SAYS_NOTHING = r"elements are wrong, the first at|errors look like rounding|a small error in all"
"""Words of a fault that has no name."""
IS_PLACE = r"(?:is|are) (?:wrong|zero)$"
"""How words end that say where a fault is, and not what it is."""
BLOCK_INPUT = "the block's input"


class _Reached(Exception):
    """The place at which the code ends was passed."""


@dataclass(frozen=True)
class CodeBetween:
    """A block of a model, run from given tensors at some sites up to one site.

    root     the whole model, whose sites these are
    block    name of the block
    call     the arguments of the block in one pass
    sources  sites whose tensors are given
    end      the site whose tensor is returned
    """

    root: nn.Module
    block: str
    call: CallArguments
    sources: Sequence[Site]
    end: Site

    def __call__(self, tensors: Sequence[Tensor], parameters: Parameters) -> Tensor:
        """Return the tensor that code makes at the end, before anything else changes it there."""
        waiting = {site.name: tensor for site, tensor in zip(self.sources, tensors, strict=True)}
        reached: list[Tensor] = []

        def give(site: Site, tensor: Tensor) -> Tensor | None:
            source = waiting.pop(site.name, None)
            return None if source is None else source.reshape(tensor.shape)

        def take(_site: Site, tensor: Tensor) -> None:
            reached.append(tensor)
            raise _Reached

        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        args, kwargs = map_tensors((self.call.args, self.call.kwargs), _cast_to(dtype))
        module = self.root.get_submodule(self.block)
        with (
            tap_sites(self.root, [self.end], take, first=True),
            tap_sites(self.root, self.sources, give),
        ):
            try:
                functional_call(module, dict(parameters), args, kwargs)
            except _Reached:
                return reached[0]
        raise ValueError(f"{self.end} is not passed")

    def needs(
        self, tensors: Sequence[Tensor], parameters: Parameters
    ) -> tuple[list[Site], list[str]]:
        """Return the sources and the parameters that the result depends on."""
        leaves = [t.detach().double().requires_grad_() for t in (*tensors, *parameters.values())]
        starts, of_block = leaves[: len(tensors)], leaves[len(tensors) :]
        with torch.enable_grad():
            result = self(starts, dict(zip(parameters, of_block, strict=True)))
            gradients = torch.autograd.grad(result.square().sum(), leaves, allow_unused=True)
        are_read = [gradient is not None for gradient in gradients]
        return (
            [site for site, is_read in zip(self.sources, are_read, strict=False) if is_read],
            [
                name
                for name, is_read in zip(parameters, are_read[len(tensors) :], strict=True)
                if is_read
            ],
        )


def code_call(actual: Model, base: Model, view: SegmentView, name: str) -> CodeCall | None:
    """Return the code before a site with the tensors of a run, beside the reference's code.

    The code of a block begins at sites in it; outside of blocks each module is taken by itself.

    actual  the model under test, whose tensors are taken
    """
    end = next((site for site in view.sites if site.name == name), None)
    if end is None:
        return None
    block = base.layer_of(end.module) or end.module
    sample = cut_sample(fullest_row(base.inputs[0]), slice(0, 1), FEW_TOKENS)
    recorder = TakenTensors(copies=True)
    with torch.no_grad(), recorder.watch(actual.module, view.ports):
        actual.outputs(sample)
    forwarded = view.read(recorder.tensors).forwarded
    sources = [
        site
        for site in view.sites
        if block in (base.layer_of(site.module), site.module)
        and site.name in forwarded
        and site is not end
    ]
    call = arguments_of(base, [block], sample)[block]
    parameters = floating_state(base.module.get_submodule(block))
    whole = CodeBetween(base.module, block, call, sources, end)
    sites, names = whole.needs([forwarded[site.name][0] for site in sources], parameters)
    right = replace(whole, sources=sites)
    own = replace(right, root=actual.module)
    values = [forwarded[site.name][0].float() for site in sites]
    values += [parameters[name] for name in names]

    def split(given: Sequence[Tensor]) -> tuple[Sequence[Tensor], Parameters]:
        tensors, of_block = given[: len(sites)], given[len(sites) :]
        dtype = tensors[0].dtype if tensors else torch.float32
        remaining = {name: value.to(dtype) for name, value in parameters.items()}
        return tensors, remaining | dict(zip(names, of_block, strict=True))

    def like(*given: Tensor) -> Tensor:
        return right(*split(given))

    def code(*given: Tensor) -> Tensor:
        if not all(map(torch.equal, given[len(sites) :], values[len(sites) :])):
            raise ValueError("the block under test has parameters of its own")
        return own(given[: len(sites)], {})

    short = [
        BLOCK_INPUT if site.is_block else site.name.removeprefix(f"{block}.") for site in sites
    ]
    return CodeCall(values, [*short, *names], code, like, {})


def name_of(words: str) -> str:
    """Return the words of a fault of code, empty where they say no more than that it is wrong."""
    if words == f"{BLOCK_INPUT} is not used: read as zeros":
        return "it has lost its residual, the input of the block"
    return "" if re.search(f"{SAYS_NOTHING}|{IS_PLACE}", words) else words


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Any]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
