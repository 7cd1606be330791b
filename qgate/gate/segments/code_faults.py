"""Faults of the code between two places of a block, which is a function of what it begins at."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qgate.errors import QgateError
from qgate.expected.distances import relative_error
from qgate.expected.intermediates import HALVES
from qgate.gate.measuring.call_arguments import CallArguments, anew, arguments_of
from qgate.gate.segments.rows import IS_PLACE, SAYS_NOTHING
from qgate.gate.segments.views import SegmentView, TakenTensors
from qgate.hooks import ModuleHooks
from qgate.hooks.tapping import tap_sites
from qgate.kernel_checks.explained import CodeCall, floating_state
from qgate.kernel_checks.subject import KernelRefusal
from qgate.models import Model, Site
from qgate.models.model import first_tensor
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.models.rows import cut_sample, fullest_row, map_tensors

Parameters = Mapping[str, Tensor]
_MOST_BYTES = 2**28
"""Bytes of a model that is run as a whole, to see what it does behind its last layer."""
FEW_TOKENS = 24
"""Tokens of the sample that code is run with."""
_ROUNDINGS = 16.0
"""Times the rounding of a dtype that two results of the same code may be apart."""
BLOCK_INPUT = "the block's input"


class _Reached(Exception):
    """The place at which the code ends was passed."""


@dataclass(frozen=True)
class CodeBetween:
    """A block of a model, run from given tensors at some sites up to one site.

    root     the whole model, whose sites these are
    block    name of the block, empty for the model
    call     the arguments of the block in one pass
    sources  sites whose tensors are given
    end      the site whose tensor is returned; None for what the model returns first
    skipped  what layers returned, which are not run again
    """

    root: nn.Module
    block: str
    call: CallArguments
    sources: Sequence[Site]
    end: Site | None
    skipped: Mapping[str, Any] = field(default_factory=dict)

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
        args, kwargs = map_tensors((self.call.args, self.call.kwargs), _cast_to(dtype), anew)
        module = self.root.get_submodule(self.block)
        with (
            tap_sites(self.root, [self.end] if self.end else [], take, first=True),
            tap_sites(self.root, self.sources, give),
            self._skipping(dtype),
        ):
            try:
                given = dict(parameters)
                result = functional_call(module, given, args, kwargs, tie_weights=False)
            except _Reached:
                return reached[0]
        if self.end is None:
            return first_tensor(result, self.root.__class__.__name__)
        raise ValueError(f"{self.end} is not passed")

    @contextmanager
    def _skipping(self, dtype: torch.dtype) -> Iterator[None]:
        """Let layers return what they did, as their operators are no part of the code."""
        modules = {name: self.root.get_submodule(name) for name in self.skipped}
        own: dict[str, Callable[..., Any] | None] = {
            name: vars(of).get("forward") for name, of in modules.items()
        }
        try:
            for name, module in modules.items():
                result = map_tensors(self.skipped[name], _cast_to(dtype), anew)
                module.forward = lambda *_, result=result, **__: result
            yield
        finally:
            for name, module in modules.items():
                vars(module).pop("forward", None)
                if (forward := own[name]) is not None:
                    module.forward = forward

    def needs(
        self, tensors: Sequence[Tensor], parameters: Parameters
    ) -> tuple[list[Site], list[str]]:
        """Return the sources and the parameters that the result depends on."""
        leaves = [t.detach().float().requires_grad_() for t in (*tensors, *parameters.values())]
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


@dataclass(frozen=True)
class CodeBefore:
    """The code before a site with the tensors of a run, beside the reference's code.

    call       both, as functions of the tensors and parameters that they read
    wide       the same in float32, for code in 16 bits: its faults without its roundings
    sources    number of those that are tensors of sites, which come first
    elsewhere  tensors of other sites of the block, by name
    """

    call: CodeCall
    sources: int
    elsewhere: Mapping[str, Tensor]
    end: Site | None
    wide: CodeCall | None = None

    @torch.no_grad()
    def fault(self) -> str:
        """Say what the code does wrong; empty if nothing, or nothing that can be told."""
        result = self.call.code(*self.call.arguments)
        words = self._other_source(result) or self._drawn(result)
        if not words and (words := self.call.fault()) and self.wide:
            words = self._plain_fault(result.dtype, words)
        words = _in_terms_of_site(words, self.end, result)
        return re.sub(r" \(declare arithmetic=.*\)", "", words)

    def _drawn(self, result: Tensor) -> str:
        """Say that the code gives something else when it runs again; empty if it does not."""
        second_result = self.call.code(*self.call.arguments)
        error = relative_error(second_result.float(), result.float())
        if not error > (_ROUNDINGS * torch.finfo(result.dtype).eps) ** 2:
            return ""
        return "it gives other values when it runs again: it draws random numbers, or keeps a state"

    def _plain_fault(self, dtype: torch.dtype, words: str) -> str:
        """Return better words for a fault of code in 16 bits: those of the code in float32.

        What it rounds to its own dtype is no fault.
        """
        assert self.wide is not None
        try:
            plain = self.wide.fault()
        except (QgateError, KernelRefusal, *LENGTH_REFUSALS):
            return words
        own = f"{dtype}".removeprefix("torch.")
        is_open = re.search(f"{SAYS_NOTHING}|{IS_PLACE}|rounded to {own}|errors look like", plain)
        return words if not plain or is_open else plain

    def _other_source(self, result: Tensor) -> str:
        """Name a tensor or parameter that is read in the place of another, or two that are."""
        values, names = self.call.arguments, self.call.names
        sources = dict(zip(names[: self.sources], values, strict=False))
        parameters = dict(zip(names[self.sources :], values[self.sources :], strict=True))
        eps = torch.finfo(result.dtype).eps

        def explains(changed: Mapping[int, Tensor]) -> bool:
            changed_values = [changed.get(position, value) for position, value in enumerate(values)]
            right = self.call.like(*changed_values).float()
            error = relative_error(result.float(), right)
            return bool(right.any()) and error <= (_ROUNDINGS * eps) ** 2

        if explains({}):
            return ""
        for position, name in enumerate(names):
            near = {**sources, **self.elsewhere} if position < self.sources else parameters
            for other, tensor in near.items():
                if other == name or tensor.shape != values[position].shape:
                    continue
                if explains({position: tensor.float()}):
                    return f"{other} is read in the place of {name}"
        for first, second in itertools.combinations(range(len(names)), 2):
            pair = values[first], values[second]
            if pair[0].shape == pair[1].shape and explains({first: pair[1], second: pair[0]}):
                return f"{names[first]} and {names[second]} are read in each other's place"
        return ""


def code_before(actual: Model, base: Model, view: SegmentView, name: str) -> CodeBefore | None:
    """Return the code before a site of a run; None where it has none that runs by itself.

    The code of a block begins at sites in it; outside of blocks each module is taken by itself.

    actual  the model under test, whose tensors are taken
    """
    end = next((site for site in view.sites if site.name == name), None)
    block = _block_around(base, end) if end is not None else ""
    size = sum(tensor.nbytes for tensor in base.module.parameters())
    is_output = name == "logits"
    is_whole = (is_output or end is not None) and not block and size <= _MOST_BYTES
    if not (is_whole or block):
        return None
    sample = cut_sample(fullest_row(base.inputs[0]), slice(0, 1), FEW_TOKENS)
    recorder, returned = TakenTensors(copies=True), dict[str, object]()
    with torch.no_grad(), ModuleHooks() as hooks, recorder.watch(actual.module, view.ports):
        for layer in base.layers if is_whole else ():
            keep = partial(_keep_result, returned, layer)
            hooks.add(actual.module.get_submodule(layer), None, keep)
        actual.outputs(sample)
    forwarded = view.read(recorder.tensors).forwarded
    sources = [
        site
        for site in view.sites
        if _is_inside(site.module, block) and site.name in forwarded and site is not end
    ]
    call = arguments_of(actual, [block], sample)[block]
    module = base.module.get_submodule(block)
    parameters = floating_state(module)
    first_names = {id(tensor): name for name, tensor in module.named_parameters()}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        first_name = first_names[id(tensor)]  # a head may be the embedding
        if first_name in parameters:
            parameters[name] = parameters[first_name]
    for owner, quantized in view.weights.items():  # as the run reads them
        if _is_inside(owner, block):
            inside = f"{owner}.".removeprefix(f"{block}.")
            parameters |= {f"{inside}{key}": value for key, value in quantized.items()}
    whole = CodeBetween(base.module, block, call, sources, end, returned)
    sites, read = whole.needs([forwarded[site.name][0] for site in sources], parameters)
    # At other shapes torch's own code of a normed weight ends the process.
    names = [name for name in read if not _is_normed(name)]
    right = replace(whole, sources=sites)
    own = replace(right, root=actual.module)
    run_tensors = [forwarded[site.name][0] for site in sites]
    values = [*(tensor.float() for tensor in run_tensors), *(parameters[name] for name in names)]

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
        # Code in 16 bits takes what the run handed it, whatever dtype the reference computes in.
        pairs = zip(given[: len(sites)], run_tensors, strict=True)
        return own([tensor.to(of_run.dtype) for tensor, of_run in pairs], {})

    def within(site: Site) -> str:
        return BLOCK_INPUT if site.module == block else site.name.removeprefix(f"{block}.")

    titles = [*map(within, sites), *names]
    elsewhere = {
        within(site): tensors[0]
        for site in sources
        if site not in sites and site.port == "output" and (tensors := forwarded[site.name])
    }
    state = floating_state(actual.module.get_submodule(block))
    float_state = {name: value.float() for name, value in state.items()}

    def in_float32(*given: Tensor) -> Tensor:
        return own([tensor.float() for tensor in given[: len(sites)]], float_state)

    is_half = any(tensor.dtype in HALVES for tensor in run_tensors)
    return CodeBefore(
        CodeCall(values, titles, code, like, {}),
        len(sites),
        elsewhere,
        end,
        CodeCall(values, titles, in_float32, like, {}) if is_half else None,
    )


def name_of(words: str) -> str:
    """Return the words of a fault of code, empty where they say no more than that it is wrong."""
    if words == f"{BLOCK_INPUT} is not used: read as zeros":
        return "it has lost its residual, the input of the block"
    return "" if re.search(f"{SAYS_NOTHING}|{IS_PLACE}", words) else words


def _block_around(base: Model, end: Site) -> str:
    """Return the layer that code at a site is in, else the module, or what calls it; or nothing."""
    layer = base.layer_of(end.module)
    is_before = layer == end.module and end.port == "input"
    if not is_before and (layer or end.port == "output"):
        return layer or end.module
    parent = end.module.rpartition(".")[0]
    while parent and isinstance(base.module.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
        parent = parent.rpartition(".")[0]  # nothing calls it
    return "" if any(name.startswith(f"{parent}.") for name in base.layers) else parent


def _is_normed(parameter: str) -> bool:
    """Tell if torch computes a weight of a parameter, as its norms of weights do."""
    return "parametrizations." in parameter or parameter.endswith(("weight_g", "weight_v"))


def _keep_result(returned: dict[str, object], layer: str, *called: Any) -> None:
    """Keep what a hook behind a layer gets last."""
    returned[layer] = called[-1]


def _is_inside(module: str, block: str) -> bool:
    return not block or f"{module}.".startswith(f"{block}.")


def _in_terms_of_site(words: str, end: Site | None, result: Tensor) -> str:
    """Call the axes of a result what they are at a site: channels, and tokens before them.

    Words about the scores of attention mean theirs.
    """
    if "scores" in words:
        return words
    axis = (end.channel_axis(result) if end is not None else -1) % result.dim()
    if axis != result.dim() - 1:
        places = r"\b(?:index|indices|entry|entries) ([\d, to]+?(?: of [\d,]+)?)"
        places += rf" (?:in|of) dimension {axis}\b"
        return re.sub(places, lambda m: f"channel{'s' * (' to ' in m[1])} {m[1]}", words)
    words = re.sub(r"\bcolumn", "channel", words)
    return re.sub(r"\brow", "token", words) if result.dim() > 2 else words


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Any]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
