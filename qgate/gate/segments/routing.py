"""Routers of a run whose near ties fall to the other side than the reference's.

A router in 16 bits rounds its scores, and may send a token to another expert whose score is as
good. The reference then follows the run, so that what comes after is compared for the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qgate.hooks import ModuleHooks

_ROOM = 1e-4
"""Share of the largest logit or score by which those of a right router may differ in float32."""
_MARGIN = 4.0
"""Roundings of the largest score that two scores of a near tie may lie apart."""


class Routers:
    """Choices of the routers of one pass, by name and call."""

    def __init__(self, run: nn.Module, reference: nn.Module, names: list[str]) -> None:
        self._names = names
        self._run, self._reference = run, reference
        self._chosen: dict[str, list[tuple[Tensor, ...]]] = {}
        self.faults: dict[str, str] = {}
        """By name, what a router of the run does otherwise: words for errors behind it."""
        self.replaced: list[Tensor] = []
        """What the reference's routers gave where it followed the run: no gradient goes there."""

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep what the routers of the run choose in the pass inside."""
        self._chosen = {}

        def keep(name: str, result: Any) -> None:
            if _is_choice(result):
                copies = tuple(part.detach().clone() for part in result)
                self._chosen.setdefault(name, []).append(copies)

        with self._hooks(self._run, keep):
            yield

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Let the reference choose as the run did where both choices are as good."""
        calls: dict[str, int] = {}
        self.replaced = []

        def choose(name: str, result: Any) -> Any:
            call = calls[name] = calls.get(name, -1) + 1
            listed = self._chosen.get(name, ())
            if call >= len(listed) or not _is_choice(result):
                return None
            followed = _followed(result, listed[call])
            if words := _fault(result if followed is None else followed, listed[call]):
                self.faults.setdefault(name, words)
            self.replaced += [part for part in result if followed and part.requires_grad]
            return followed

        with self._hooks(self._reference, choose):
            yield

    def _hooks(self, root: nn.Module, take: Any) -> ModuleHooks:
        hooks = ModuleHooks()
        present = dict(root.named_modules())
        for name in self._names:
            if name in present:

                def after(_module: Any, _args: Any, result: Any, name: str = name) -> Any:
                    return take(name, result)

                hooks.add(present[name], None, after)
        return hooks


class OwnRouters:
    """Choices of the largest or least by code of one's own, in the order in which they are made."""

    replaced: Sequence[Tensor] = ()
    faults: Mapping[str, str] = MappingProxyType({})

    def __init__(self, run: nn.Module) -> None:
        dtypes = {p.dtype for p in run.parameters() if p.is_floating_point()}
        wide = [torch.finfo(dtype).eps for dtype in dtypes if dtype.itemsize > 1]
        self._eps = max(wide, default=0.0)
        self._chosen: list[Tensor] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep what the run chooses in the pass inside."""
        self._chosen = []

        def keep(_call: int, _x: Tensor, _dim: int, indices: Tensor) -> None:
            self._chosen.append(indices.detach().clone())

        with _TopCalls(keep):
            yield

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Let the reference choose as the run did where both choices are as good."""

        def choose(call: int, x: Tensor, dim: int, indices: Tensor) -> Tensor | None:
            chosen = self._chosen[call] if call < len(self._chosen) else None
            if chosen is None or chosen.shape != indices.shape or not x.is_floating_point():
                return None
            chosen = chosen.to(indices.device)
            eps = max(self._eps, torch.finfo(x.dtype).eps)
            tied = _near_ties(x.detach().double(), dim, indices, chosen, eps)
            return torch.where(tied, chosen, indices) if bool(tied.any()) else None

        with _TopCalls(choose):
            yield


def of(run: nn.Module, reference: nn.Module, names: list[str]) -> Routers | OwnRouters:
    """Return what follows routers that are known by name, or else what chooses the largest."""
    return Routers(run, reference, names) if names else OwnRouters(run)


class _TopCalls(TorchFunctionMode):
    """Hands on what is chosen along a dimension as largest or least; takes other choices back."""

    def __init__(self, take: Callable[[int, Tensor, int, Tensor], Tensor | None]) -> None:
        super().__init__()
        self._take, self._calls = take, -1

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = _CHOOSING.get(func)
        if names is None:
            return result
        named = dict(zip(names, args, strict=False)) | (kwargs or {})
        x, dim = named["input"], named.get("dim", -1 if "k" in names else None)
        if not isinstance(dim, int):
            return result
        self._calls += 1
        numbers = result if isinstance(result, Tensor) else result.indices
        keeps = numbers.dim() == x.dim()
        indices = self._take(self._calls, x, dim, numbers if keeps else numbers.unsqueeze(dim))
        if indices is None:
            return result
        values = x.gather(dim, indices)
        if not keeps:
            values, indices = values.squeeze(dim), indices.squeeze(dim)
        return indices if isinstance(result, Tensor) else type(result)((values, indices))


_CHOOSING: dict[Any, tuple[str, ...]] = {
    function: ("input", "k", "dim") if name == "topk" else ("input", "dim")
    for name in ("topk", "max", "min", "argmax", "argmin")
    for function in (getattr(torch, name), getattr(Tensor, name))
}


def _near_ties(scores: Tensor, dim: int, numbers: Tensor, others: Tensor, eps: float) -> Tensor:
    """Find where two choices along a dimension differ by scores that rounding may exchange."""
    first, second = (scores.gather(dim, of).sort(dim)[0] for of in (numbers, others))
    room = _MARGIN * eps * scores.abs().amax(dim, keepdim=True)
    is_near = (first - second).abs().amax(dim, keepdim=True) <= room
    return is_near & (numbers != others).any(dim, keepdim=True)


def _is_choice(result: Any) -> bool:
    """Tell if a result is scores of all experts first, and numbers of the chosen ones."""
    if not isinstance(result, tuple) or not all(isinstance(part, Tensor) for part in result):
        return False
    numbers = [part for part in result if not part.is_floating_point()]
    return len(numbers) == 1 and result[0].is_floating_point() and result[0].dim() == 2


def _fault(result: tuple[Tensor, ...], chosen: tuple[Tensor, ...]) -> str:
    """Say what a router gave otherwise than `result`, its logits first; empty for rounding."""
    if len(result) != len(chosen) or any(map(_differ_in_shape, result, chosen)):
        return ""
    pairs = list(zip(result, chosen, strict=True))
    floats = [(r.double(), c.double()) for r, c in pairs if r.is_floating_point()]
    ((numbers, run_numbers),) = [(r, c) for r, c in pairs if not r.is_floating_point()]
    count = len(numbers)
    room = max(_ROOM, _MARGIN * torch.finfo(chosen[0].dtype).eps)
    wrong = [(c - r).abs().amax(-1) > room * r.abs().amax() for r, c in floats]
    if bool(wrong[0].any()):
        return f"gives other logits to {int(wrong[0].sum()):,} of {count:,} tokens"
    changed = int((numbers.sort(-1)[0] != run_numbers.sort(-1)[0]).any(-1).sum())
    if changed:
        return f"chooses other experts for {changed:,} of {count:,} tokens"
    for (right, actual), rows in zip(floats[1:], wrong[1:], strict=True):
        if bool(rows.any()):
            factor = float((actual * right).sum() / right.square().sum())
            is_one = bool(((actual - factor * right).abs() <= room * right.abs().amax()).all())
            size = f"weighs experts {factor:.4g} times" if is_one else "weighs experts otherwise"
            return f"{size} for {int(rows.sum()):,} of {count:,} tokens"
    return ""


def _differ_in_shape(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape


def _followed(result: tuple[Tensor, ...], chosen: tuple[Tensor, ...]) -> Any:
    """Return a result with the run's choice for tokens whose scores nearly tie; None if none."""
    (numbers,) = (part for part in result if not part.is_floating_point())
    (run_numbers,) = (part for part in chosen if not part.is_floating_point())
    if len(result) != len(chosen) or numbers.shape != run_numbers.shape:
        return None
    eps = torch.finfo(chosen[0].dtype).eps
    rows = _near_ties(result[0].double(), -1, numbers, run_numbers.to(numbers.device), eps)
    if not bool(rows.any()):
        return None
    pairs = zip(result, chosen, strict=True)
    return tuple(
        part if part.dim() != 2 or len(part) != len(rows) else torch.where(rows, of.to(part), part)
        for part, of in pairs
    )
