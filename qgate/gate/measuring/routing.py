"""Routers of a run whose near ties fall to the other side than the reference's.

A router in 16 bits rounds its scores, and may send a token to another expert whose score is as
good. The reference then follows the run, so that what comes after is compared for the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qgate.hooks import ModuleHooks

_MARGIN = 4.0
"""Roundings of the largest score that two scores of a near tie may lie apart."""


class Routers:
    """Choices of the routers of one pass, by name and call."""

    def __init__(self, run: nn.Module, reference: nn.Module, names: list[str]) -> None:
        self._names = names
        self._run, self._reference = run, reference
        self._chosen: dict[str, list[tuple[Tensor, ...]]] = {}
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


def _is_choice(result: Any) -> bool:
    """Tell if a result is scores of all experts first, and numbers of the chosen ones."""
    if not isinstance(result, tuple) or not all(isinstance(part, Tensor) for part in result):
        return False
    numbers = [part for part in result if not part.is_floating_point()]
    return len(numbers) == 1 and result[0].is_floating_point() and result[0].dim() == 2


def _followed(result: tuple[Tensor, ...], chosen: tuple[Tensor, ...]) -> Any:
    """Return a result with the run's choice for tokens whose scores nearly tie; None if none."""
    (numbers,) = (part for part in result if not part.is_floating_point())
    (run_numbers,) = (part for part in chosen if not part.is_floating_point())
    if len(result) != len(chosen) or numbers.shape != run_numbers.shape:
        return None
    scores = result[0].double()
    both = (scores.gather(1, n.to(scores.device)) for n in (numbers, run_numbers))
    apart = torch.stack(list(both)).sort(-1)[0].diff(dim=0).abs().amax((0, -1))
    room = _MARGIN * torch.finfo(chosen[0].dtype).eps * scores.abs().amax(-1)
    tied = (numbers != run_numbers).any(-1) & (apart <= room)
    if not bool(tied.any()):
        return None
    pairs = zip(result, chosen, strict=True)
    rows = tied.reshape(-1, 1)
    return tuple(
        part if part.dim() != 2 or len(part) != len(rows) else torch.where(rows, of.to(part), part)
        for part, of in pairs
    )
