"""Code of one's own in 16 bits: a factor that is in all values of a result is no rounding.

The limit of an isolated error lets each result in 16 bits differ by some roundings of that dtype,
and so a scale of attention passes that is 0.3 % off. All values together tell such a factor from
roundings, in whichever order these are made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qgate.causes.factors import figure_words
from qgate.errors import QgateError
from qgate.expected.intermediates import HALVES
from qgate.expected.noise import ARITHMETICS
from qgate.expected.structure import FACTOR, draw, figures
from qgate.gate.measured import Measured
from qgate.gate.measuring.attention_arithmetic import RunAttention, TakenCall, taken_calls
from qgate.gate.measuring.half_gains import with_gains
from qgate.gate.measuring.passes import shortened
from qgate.gate.measuring.segment_probes import several
from qgate.gate.measuring.segments import Segments
from qgate.hooks.module_hooks import ModuleHooks
from qgate.kernel_checks.explained import floating_state
from qgate.models import Model
from qgate.modes.applying import in_dtype

LEAST = 1e-3
"""Distance of a factor from 1 from which it is a fault: less may be a weight that is rounded."""
FACTOR_BEYOND = 5.0
"""Times its noise that a factor has: right code had up to 1.5 times, and 0.3 % has 7 times."""
_OF_CODE = "FP32 code makes of the same tensors"


def with_half(rows: Sequence[Measured], segments: Segments, sample: Any) -> list[Measured]:
    """Return isolated errors; those of wrong code in 16 bits say what is wrong there.

    In a mode of qgate's own every tensor that code reads may have a factor; code of one's own may
    round in another order, and is held module by module.
    """
    if not segments.is_own:
        return with_gains(rows, segments, sample)
    open_rows = {row.site: row for row in rows if not (row.why or {}).get("isolated")}
    try:
        faults = dict(half_faults(segments.model, segments.base, open_rows))
    # A model of one's own may raise anything when its code runs in another way.
    except (QgateError, RuntimeError, ValueError, TypeError):
        return [*rows]
    return [
        replace(row, why={**(row.why or {}), "isolated": faults[row.site]})
        if open_rows.get(row.site) is row and row.site in faults
        else row
        for row in rows
    ]


@torch.no_grad()
def half_faults(actual: Model, base: Model, sites: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield sites at which code in 16 bits has a factor that it should not have, in words."""
    own, open_sites = actual.module, set(sites)
    codes = {
        name: code
        for name, code in RunAttention.of(actual, base).codes.items()
        if f"{name}.{code.result}:input" in open_sites
    }
    modules = [site.removesuffix(":output") for site in open_sites if site.endswith(":output")]
    attention: dict[str, TakenCall] = {}
    called: dict[str, tuple[Tensor, Tensor]] = {}

    def take(taken: TakenCall) -> None:
        attention.setdefault(taken.name, taken)

    def keep(name: str, _module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        tensors = (*args, result)
        if len(args) == 1 and all(isinstance(t, Tensor) and t.dtype in HALVES for t in tensors):
            called.setdefault(name, (args[0], result))

    with ModuleHooks() as hooks, taken_calls(own, codes, take):
        for name in modules:
            if _is_small(base.module, name) and _is_small(own, name):
                hooks.add(own.get_submodule(name), None, functools.partial(keep, name))
        actual.outputs(shortened(several(base.inputs)))
    for name, call in attention.items():
        if call.is_otherwise and (words := _attention_factor(call)):
            yield f"{name}.{call.code.result}:input", f"is not the attention that {words}"
    for name, (x, result) in called.items():
        if words := _module_factor(base.module.get_submodule(name), x, result):
            yield f"{name}:output", f"is not what {words}"


def _is_small(root: nn.Module, name: str) -> bool:
    """Tell if a module has no parts and is no product, whose sums are judged elsewhere."""
    try:
        module = root.get_submodule(name)
    except AttributeError:
        return False
    return not [*module.children()] and all(p.dim() < 2 for p in module.parameters())


def _attention_factor(taken: TakenCall) -> str:
    call = taken.call

    def like(*projected: Tensor) -> Tensor:
        dtype = projected[0].dtype
        more = (t.to(dtype) if t.is_floating_point() else t for t in call.tensors)
        return call(*projected, *more)

    names = [f"the result of {leaf}" for leaf in taken.code.sources]
    return _factor(like, taken.projected, names, taken.actual)


def _module_factor(reference: nn.Module, x: Tensor, result: Tensor) -> str:
    twin = in_dtype(reference, x.dtype)
    if torch.equal(twin(x), result):
        return ""
    state = floating_state(twin)

    def like(x: Tensor, *parameters: Tensor) -> Any:
        return functional_call(reference, dict(zip(state, parameters, strict=True)), (x,))

    names = ["its input", *(f"its {name}" for name in state)]
    return _factor(like, [x, *state.values()], names, result)


def _factor(
    like: Callable[..., Any], arguments: Sequence[Tensor], names: Sequence[str], actual: Tensor
) -> str:
    """Name the factor on all of an argument or of the result that roundings do not explain."""
    unit = ARITHMETICS[str(actual.dtype).removeprefix("torch.")]
    draws = draw(like, [argument.detach() for argument in arguments], unit)
    if not bool(draws.values.isfinite().all() and actual.isfinite().all()):
        return ""
    factors = [
        figure
        for figure in figures(actual, draws)
        if figure.kind == FACTOR and figure.dim is None
        and figure.ratio > FACTOR_BEYOND and abs(figure.size) > LEAST
    ]  # fmt: skip
    if not factors:
        return ""
    words = figure_words(max(factors, key=lambda figure: figure.ratio), draws.values, None)
    for position, name in enumerate(names):
        words = words.replace(f"argument {position} ", f"{name} ")
    return f"{_OF_CODE}: {words}"
