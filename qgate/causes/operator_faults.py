"""A function with one operator that does another thing: eps, masks, activations, coarse values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from qgate.expected.dispatching import DispatchMode
from qgate.expected.intermediates import rounded
from qgate.expected.known_attention import AttentionSides
from qgate.expected.noise import evaluate
from qgate.stats.bits import short_name

Function = Callable[..., Any]
Arguments = Callable[[Sequence[Any]], Sequence[Any]]
Result = Callable[[Sequence[Any], Any], Tensor]

_aten = torch.ops.aten
_SPELLED = get_decompositions(
    [_aten.native_layer_norm, _aten.native_group_norm, _aten._fused_rms_norm]
)
EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""What is added below a root, as models have it."""
LARGEST_EPS = 0.1
HIDDEN = -1e3
"""Scores up to which an entry is taken to be masked."""
NEAR = 0.05
"""Distance of a term's weight from zero within which it is called lost."""
TILES = (8, 16, 32, 64, 128)
"""Tiles of keys that may be filled up with zeros."""
MOST_OPERATORS = 256
"""Operators of a function up to which one of them may be called the fault: loops have more."""
LONGEST_LOOP = 2048
"""Numbers that are added one after another in 16 bits."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": torch.relu,
    "the identity": torch.clone,
}
COARSE = (torch.float8_e4m3fn, torch.float8_e5m2)
_ROUNDED = frozenset({"mul", "silu", "gelu", "relu", "sigmoid", "tanh", "exp", "_softmax"})


@dataclass(frozen=True)
class OperatorFault:
    """One operator of a function, by its number, and what it gets or gives instead.

    arguments  makes other arguments of its own
    result     makes another result of its arguments and its own result
    """

    words: str
    site: int
    arguments: Arguments | None = None
    result: Result | None = None

    def within(self, like: Function) -> Function:
        """Return the function with this fault."""

        def faulty(*arguments: Any) -> Any:
            with _SpelledAttention(), _Sites(self):
                return like(*arguments)

        return faulty


class _SpelledAttention(TorchFunctionMode):
    """Compute attention by the operators that define it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is functional.scaled_dot_product_attention:
            return AttentionSides.of(*args, **(kwargs or {})).exact()
        return function(*args, **(kwargs or {}))


class _Sites(DispatchMode):
    """Number the operators inside; list the faults that they may have, or give one of them one."""

    def __init__(self, fault: OperatorFault | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.count = 0
        self.listed: list[OperatorFault] = []
        self.products: list[tuple[int, Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _SPELLED:
            with self:
                return _SPELLED[function](*args, **kwargs)
        site, self.count = self.count, self.count + 1
        if self.fault is not None:
            return self._with_fault(function, args, kwargs, site)
        result = function(*args, **kwargs)
        name = function._schema.name.split("::")[-1].rstrip("_")
        if name in ("mm", "bmm"):
            self.products.append((site, args[0], args[1]))
        with _disable_current_modes():
            for words, arguments, changed in _faults(name, args, kwargs, result):
                self.listed.append(OperatorFault(words, site, arguments, changed))
        return result

    def _with_fault(self, function: Any, args: Any, kwargs: Any, site: int) -> Any:
        fault = self.fault
        if fault is None or fault.site != site:
            return function(*args, **kwargs)
        if fault.arguments is not None:
            with _disable_current_modes():
                args = fault.arguments(args)
            return function(*args, **kwargs)
        assert fault.result is not None
        own = function(*args, **kwargs)  # may be rounded before it is changed
        with _disable_current_modes():
            value = fault.result(args, own)
        return _aten.mul.Tensor(value, 1.0)  # an operator whose result may be rounded


def operator_faults(
    like: Function, arguments: Sequence[Any], residual: Tensor
) -> list[OperatorFault]:
    """List the faults that single operators of a function may have, the plainest first.

    residual  what a faulty result differs by, from which the weight of a term is read
    """
    sites = _Sites()
    with _SpelledAttention(), sites:
        evaluate(like, arguments)
    if sites.count > MOST_OPERATORS:
        return []
    # What becomes of the last result is no matter of one operator.
    coarse = [fault for fault in sites.listed if "rounded to" in fault.words]
    plain = [fault for fault in sites.listed if "rounded to" not in fault.words]
    for site, a, b in sites.products[-1:]:
        plain += _wrong_terms(site, a, b, residual)
    return plain + [fault for fault in coarse if fault.site < sites.count - 1]


def _wrong_terms(site: int, a: Tensor, b: Tensor, residual: Tensor) -> Iterator[OperatorFault]:
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

    yield OperatorFault(f"term {term} of the last sum over {a.shape[2]} {does}", site, weighted)


Listed = Iterator[tuple[str, Arguments | None, Result | None]]


def _faults(name: str, args: Sequence[Any], kwargs: Any, result: Any) -> Listed:
    if name == "add" and len(args) > 1:
        yield from _of_sum(args)
    elif name == "mean" and isinstance(result, Tensor):
        yield from _of_mean(args[0], result)
    elif name in ("silu", "gelu", "relu"):
        own = "gelu by tanh" if kwargs.get("approximate") == "tanh" else name
        for other, activation in ACTIVATIONS.items():
            if other != own:
                yield (
                    f"{other} is computed in the place of {own}",
                    None,
                    lambda a, _, activation=activation: activation(a[0]),  # type: ignore[misc]
                )
    elif name in ("_softmax", "_log_softmax") and args[1] in (-1, args[0].dim() - 1):
        yield from _of_softmax(args[0], is_plain=name == "_softmax")
    elif name == "masked_fill" and float(args[2]) <= HIDDEN:
        for words, change in _masks(args[1]):
            yield words, lambda a, change=change: (a[0], change(a[1]), *a[2:]), None  # type: ignore[misc]
    is_float = isinstance(result, Tensor) and result.is_floating_point()
    if name in _ROUNDED and is_float and result.numel() > 1:
        yield from _rounded_to(name)


def _of_sum(args: Sequence[Any]) -> Listed:
    """List other numbers for a small one that is added, and other masks for added ones."""
    other = args[1]
    if isinstance(other, Tensor) and other.dim() >= 2 and bool((other <= HIDDEN).any()):
        for words, change in _masks(other <= HIDDEN):

            def masked(a: Sequence[Any], change: Mask = change) -> Sequence[Any]:
                hidden = a[1] <= HIDDEN
                lowest = a[1][hidden].max()
                visible = torch.where(hidden, torch.zeros_like(a[1]), a[1])
                return a[0], torch.where(change(hidden), lowest, visible), *a[2:]

            yield words, masked, None
    if isinstance(other, Tensor) and other.dim() == 0:
        other = float(other)
    if not isinstance(other, float) or not 0 < other <= LARGEST_EPS:
        return
    for eps in EPS:
        if eps != other:
            yield (
                f"eps is {eps:g}, not {other:g}",
                lambda a, eps=eps: (a[0], eps, *a[2:]),  # type: ignore[misc]
                None,
            )


def _of_mean(x: Tensor, mean: Tensor) -> Listed:
    count = x.numel() // max(mean.numel(), 1)
    if count > 2:
        yield (
            f"the sum over {count} is divided by {count - 1}, not by {count}",
            None,
            lambda _, value: value * (count / (count - 1)),
        )
    if not 2 < count <= LONGEST_LOOP:
        return
    for dtype in (torch.bfloat16, torch.float16):
        yield (
            f"the sum over {count} is added up in {short_name(dtype)}",
            None,
            lambda a, value, dtype=dtype: _one_by_one(a[0], value, dtype),  # type: ignore[misc]
        )


def _one_by_one(x: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Return means of the last dimension whose terms are added one after another in a dtype."""
    count = x.numel() // mean.numel()
    if x.shape[-1] != count:
        return mean
    terms = rounded(x, dtype)
    total = terms[..., 0]
    for index in range(1, count):
        total = rounded(total + terms[..., index], dtype)
    return (total / count).reshape(mean.shape)


# Softmax ------------------------------------------------------------------------------------------


def _of_softmax(scores: Tensor, *, is_plain: bool) -> Listed:
    keys = scores.shape[-1]
    if keys < 2:
        return
    for words, change in _hidden_keys(scores):
        yield f"{words} is left out of the softmax", _on_scores(change), None
    if scores.dim() > 2 and scores.shape[-2] > 1 and not bool((scores <= HIDDEN).any()):
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        yield (
            "later keys are masked (causal), and should not be",
            _on_scores(lambda s: s.masked_fill(causal, -math.inf)),
            None,
        )
    for words, factor in _factors():
        yield (
            f"the scores of the softmax are {words} times as large as they should be",
            _on_scores(lambda s, factor=factor: s * factor),  # type: ignore[misc]
            None,
        )
    if not is_plain:
        return
    for more in sorted({1, *(-keys % tile for tile in TILES)} - {0}):
        zeros = f"{more} more keys" if more > 1 else "one more key"
        yield (
            f"padding is counted in the softmax, as {zeros} of zeros would be",
            None,
            lambda a, p, more=more: _padded(a[0], p, more),  # type: ignore[misc]
        )


def _on_scores(change: Callable[[Tensor], Tensor]) -> Arguments:
    return lambda a: (change(a[0]), *a[1:])


def _hidden_keys(scores: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    keys = scores.shape[-1]
    last = f"entry {keys - 1} of {keys} (the last one)"
    yield last, lambda s: _hide(s, slice(None), -1)
    yield f"entry 0 of {keys}", lambda s: _hide(s, slice(None), 0)
    if scores.dim() > 1 and scores.shape[-2] > 1:
        yield f"{last} of the last row", lambda s: _hide(s, slice(-1, None), -1)
        yield f"{last} of the first row", lambda s: _hide(s, slice(0, 1), -1)


def _hide(scores: Tensor, rows: slice, key: int) -> Tensor:
    changed = scores.clone()
    if scores.dim() > 1:
        changed[..., rows, key] = -math.inf
    else:
        changed[key] = -math.inf
    return changed


def _factors() -> Iterator[tuple[str, float]]:
    yield "log2(e)", math.log2(math.e)
    yield "ln(2)", math.log(2)
    for size in (2, 4, 8, 16, 32, 64, 128, 256):
        yield f"sqrt({size})", math.sqrt(size)
        yield f"1/sqrt({size})", 1 / math.sqrt(size)


def _padded(scores: Tensor, p: Tensor, more: int) -> Tensor:
    """Return probabilities where so many more scores of zero are counted."""
    total = torch.logaddexp(
        scores.logsumexp(-1, keepdim=True), torch.tensor(math.log(more), dtype=scores.dtype)
    )
    return torch.exp(scores - total).to(p)


# Masks --------------------------------------------------------------------------------------------

Mask = Callable[[Tensor], Tensor]


def _masks(hidden: Tensor) -> Iterator[tuple[str, Mask]]:
    """List other masks of rows and keys; True hides."""
    if hidden.dim() < 2 or min(hidden.shape[-2:]) < 2 or not bool(hidden.any()):
        return
    yield "the mask is not applied", torch.zeros_like
    yield "the mask shows one key more", lambda mask: _moved(mask, 1, first=False)
    yield "the mask shows one key less", lambda mask: _moved(mask, -1, first=True)
    yield "the mask is transposed", _transposed
    yield "the mask hides what it should show", lambda mask: ~mask


def _moved(mask: Tensor, by: int, *, first: bool) -> Tensor:
    """Move a mask along the keys; what is moved in hides, or not."""
    moved = mask.roll(by, -1)
    moved[..., 0 if by > 0 else -1] = first
    return moved


def _transposed(mask: Tensor) -> Tensor:
    return mask.mT if mask.shape[-1] == mask.shape[-2] else mask


# Coarse values ------------------------------------------------------------------------------------


def _rounded_to(name: str) -> Listed:
    named = "the probabilities of the softmax are" if name == "_softmax" else f"{name} is"
    for dtype in COARSE:
        yield (
            f"{named} rounded to {short_name(dtype)}",
            None,
            lambda _, value, dtype=dtype: rounded(value, dtype),  # type: ignore[misc]
        )
    yield f"{named} rounded to int8 by row", None, lambda _, value: _int8(value)


def _int8(value: Tensor) -> Tensor:
    scale = value.abs().amax(-1, keepdim=True) / torch.tensor(127.0, dtype=value.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (value / scale).round() * scale
