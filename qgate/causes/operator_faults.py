"""A function with one operator that does another thing: eps, masks, activations, coarse values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from qgate.causes.element_faults import element_faults, general_faults, rounded_faults
from qgate.causes.exchange_faults import exchange_faults
from qgate.causes.faults import Function
from qgate.causes.operator_calls import COPIES, Call, CallFault, Makers, words_of
from qgate.causes.rotation_faults import rotation_faults
from qgate.causes.softmax_faults import mask_faults, softmax_faults, window_faults
from qgate.causes.sum_faults import product_faults, sum_faults
from qgate.expected.dispatching import DispatchMode
from qgate.expected.known_attention import AttentionSides
from qgate.expected.noise import evaluate

_aten = torch.ops.aten
_SPELLED = get_decompositions(
    [
        _aten.native_layer_norm, _aten.native_group_norm, _aten._fused_rms_norm,
        _aten.native_layer_norm_backward, _aten.native_group_norm_backward,
        _aten._softmax_backward_data, _aten._log_softmax_backward_data,
    ]
)  # fmt: skip
NEAR = 0.05
"""Distance of a term's weight from zero within which it is called lost."""
MOST_OPERATORS = 256
"""Operators of a function up to which one of them may be called the fault: loops have more."""
FEW_OPERATORS = 4
"""Operators of one name up to which one of them may be called the fault of a longer function."""
MOST_CALLS = 8192
"""Operators of a function up to which those of one name may all have one fault."""


@dataclass(frozen=True)
class OperatorFault:
    """A fault of operators of a function, and which of them have it: one, or all of one name.

    site   the number of the operator, None for all of this name that may have the fault
    """

    words: str
    site: int | None
    name: str
    fault: CallFault

    def within(self, like: Function) -> Function:
        """Return the function with this fault."""

        def faulty(*arguments: Any) -> Any:
            with SpelledAttention(), _Sites(arguments, self):
                return like(*arguments)

        return faulty


class SpelledAttention(TorchFunctionMode):
    """Compute attention by the operators that define it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is functional.scaled_dot_product_attention:
            return AttentionSides.of(*args, **(kwargs or {})).exact()
        return function(*args, **(kwargs or {}))


class _Sites(DispatchMode):
    """Number the operators inside; list the faults that they may have, or give some of them one."""

    def __init__(self, arguments: Sequence[Any], fault: OperatorFault | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.count = 0
        self.counts: Counter[str] = Counter()
        self.makers = Makers(arguments)
        self.listed: list[OperatorFault] = []
        self.windows: list[OperatorFault] = []
        self.general: list[OperatorFault] = []
        self.coarse: list[OperatorFault] = []
        self.products: list[tuple[int, str, Tensor, Tensor]] = []
        self.scalable: list[tuple[int, str, str]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _SPELLED:
            with self:
                return _SPELLED[function](*args, **kwargs)
        site, self.count = self.count, self.count + 1
        name = function._schema.name.split("::")[-1].rstrip("_")
        self.counts[name] += 1
        if self.fault is not None:
            result = self._with_fault(function, name, args, kwargs, site)
            self.makers.note(function, name, args, result)
            return result
        result = function(*args, **kwargs)
        if name in ("mm", "bmm"):
            self.products.append((site, name, args[0], args[1]))
        if self.count <= MOST_CALLS:
            with _disable_current_modes():
                self._list(Call(name, args, kwargs, result, self.makers), site)
        self.makers.note(function, name, args, result)
        if isinstance(result, Tensor) and result.is_floating_point() and not function.is_view:
            maker = self.makers.of(result)
            if maker is None or name not in COPIES or maker.name == "argument":
                self.scalable.append((site, name, maker.words if maker else words_of(name)))
        return result

    def _list(self, call: Call, site: int) -> None:
        for faults, listed in (
            (plain_faults, self.listed),
            (window_faults, self.windows),
            (late_faults, self.general),
            (rounded_faults, self.coarse),
        ):
            for fault in faults(call):
                listed.append(OperatorFault(fault.words, site, call.name, fault))

    def _with_fault(self, function: Any, name: str, args: Any, kwargs: Any, site: int) -> Any:
        chosen = self.fault
        assert chosen is not None
        # Where a fault changes a choice, the same number may be of another operator.
        if chosen.name != name or chosen.site not in (None, site):
            return function(*args, **kwargs)
        fault: CallFault | None = chosen.fault
        if chosen.site is None:
            own = function(*args, **kwargs)
            with _disable_current_modes():
                fault = _same(Call(name, args, kwargs, own, self.makers), chosen.words)
            if fault is None:
                return own
        assert fault is not None
        if fault.arguments is not None:
            with _disable_current_modes():
                args = fault.arguments(args)
            return function(*args, **kwargs)
        assert fault.result is not None
        own = function(*args, **kwargs)  # may be rounded before it is changed
        with _disable_current_modes():
            value = fault.result(args, own)
        if not isinstance(value, Tensor):
            return value
        return _aten.mul.Tensor(value, 1.0)  # an operator whose result may be rounded


def plain_faults(call: Call) -> Iterator[CallFault]:
    """List the known faults of one operator."""
    yield from mask_faults(call)
    yield from element_faults(call)
    yield from rotation_faults(call)
    yield from sum_faults(call)
    yield from softmax_faults(call)


def late_faults(call: Call) -> Iterator[CallFault]:
    """List faults that are tried after wrong readings of arguments, which may be the same."""
    yield from general_faults(call)
    yield from exchange_faults(call)
    yield from product_faults(call)


def _same(call: Call, words: str) -> CallFault | None:
    """Return the fault of an operator that has these words."""
    for faults in (plain_faults, window_faults, late_faults, rounded_faults):
        for fault in faults(call):
            if fault.words == words:
                return fault
    return None


def operator_faults(
    like: Function, arguments: Sequence[Any], residual: Tensor
) -> list[OperatorFault]:
    """List the faults that operators of a function may have, the plainest first.

    residual  what a faulty result differs by, from which the weight of a term is read
    """
    sites = _traced(like, arguments)
    plain, coarse = _with_repeated(sites, sites.listed), _with_repeated(sites, sites.coarse)
    if sites.count <= MOST_OPERATORS:
        for product in sites.products[-1:]:
            plain += _wrong_terms(*product, residual)
    # What becomes of the last result is no matter of one operator.
    return plain + [f for f in coarse if f.site is None or f.site < sites.count - 1]


def general_operator_faults(like: Function, arguments: Sequence[Any]) -> list[OperatorFault]:
    """List operators that are left out, done twice or done in another order."""
    sites = _traced(like, arguments)
    # Positions of another size may do to a mask what another window does.
    return _with_repeated(sites, sites.windows) + _with_repeated(sites, sites.general)


def scaled_operators(
    like: Function, arguments: Sequence[Any]
) -> list[tuple[str, Callable[[float], Function]]]:
    """List operators whose result may have a factor: words, and the function with a factor."""
    sites = _traced(like, arguments)
    if sites.count > MOST_OPERATORS:
        return []
    listed = []
    for site, name, result_words in sites.scalable:
        is_softmax = name in ("_softmax", "_log_softmax")
        words = "the scores of the softmax are" if is_softmax else f"{result_words} is"
        change = _scaled_scores if is_softmax else _scaled_result
        listed.append((words, _scaled_by(like, site, name, change)))
        if name == "tanh":
            bounded = _scaled_by(like, site, name, _scaled_bound)
            listed.append(("the bound of tanh (a soft cap) is", bounded))
    return sorted(listed, key=lambda entry: "softmax" not in entry[0])


def _scaled_by(
    like: Function, site: int, name: str, change: Callable[[float], CallFault]
) -> Callable[[float], Function]:
    return lambda factor: OperatorFault("", site, name, change(factor)).within(like)


def _scaled_scores(factor: float) -> CallFault:
    return CallFault("", arguments=lambda args: (args[0] * factor, *args[1:]))


def _scaled_result(factor: float) -> CallFault:
    return CallFault("", result=lambda _, own: own * factor)


def _scaled_bound(factor: float) -> CallFault:
    return CallFault("", result=lambda args, _: factor * torch.tanh(args[0] / factor))


def _traced(like: Function, arguments: Sequence[Any]) -> _Sites:
    sites = _Sites(arguments)
    with SpelledAttention(), sites:
        evaluate(like, arguments)
    return sites


def _with_repeated(sites: _Sites, listed: list[OperatorFault]) -> list[OperatorFault]:
    """Add faults that all operators of one name have; of loops, list these and those of a few."""
    counts: dict[tuple[str, str], list[OperatorFault]] = {}
    for fault in listed:
        counts.setdefault((fault.name, fault.words), []).append(fault)
    repeated = [
        OperatorFault(words, None, name, faults[0].fault)
        for (name, words), faults in counts.items()
        if len(faults) > 1
    ]
    if sites.count > MOST_CALLS:
        return []
    # Operators that are few of their name are no part of a loop.
    is_loop = sites.count > MOST_OPERATORS
    return repeated + [f for f in listed if not is_loop or sites.counts[f.name] <= FEW_OPERATORS]


def _wrong_terms(
    site: int, name: str, a: Tensor, b: Tensor, residual: Tensor
) -> Iterator[OperatorFault]:
    """Yield the term of the last product that a residual holds most of, with its weight."""
    a, b = (side.detach() if side.dim() == 3 else side.detach()[None] for side in (a, b))
    if residual.numel() != len(a) * a.shape[1] * b.shape[2] or a.shape[2] < 2:
        return
    overlaps = torch.einsum("bmn,bmk,bkn->k", residual.reshape(len(a), a.shape[1], -1).to(a), a, b)
    energy = torch.einsum("bmk,bkn->k", a.square(), b.square())
    shares = torch.where(energy > 0, overlaps / energy, 0.0)
    term = int((shares * overlaps).argmax())
    share = float(shares[term])
    if abs(share + 1) < NEAR:
        share = -1.0
    does = "is lost" if share == -1 else f"has {1 + share:.3g} times the right weight"

    def weighted(args: Sequence[Any]) -> Sequence[Any]:
        changed = args[0].clone()
        changed[..., term] *= 1 + share
        return changed, *args[1:]

    words = f"term {term} of the last sum over {a.shape[2]} {does}"
    yield OperatorFault(words, site, name, CallFault(words, weighted))
