"""Tensors of one run by token, and runs of the same tokens that are compared with it and fed by it.

A tensor of a site is seen as (rows, tokens, …). In a compared run each site gets the recorded
tensor once it was compared: what differs was made between this site and those before it, and a
code that noise turned changes nothing behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qgate.hooks.tapping import tap_sites
from qgate.models import Model, Site
from qgate.models.sites import sites_of

ROWS, FLAT = -1, -2
"""Layouts beside the dimension of tokens: none has tokens, or rows and tokens are one dimension."""


@dataclass(frozen=True)
class Span:
    """Tokens of one row of a call, and the recorded ones that they are."""

    row: int
    start: int
    source_row: int
    source_start: int
    length: int


@dataclass(frozen=True)
class Pass:
    """One call: a sample of so many rows and tokens, and which of them were recorded."""

    sample: Any
    rows: int
    tokens: int
    spans: tuple[Span, ...] = ()

    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return row and token of each compared token, here and in the recording."""
        parts: list[list[Tensor]] = [[], [], [], []]
        for span in self.spans:
            steps = torch.arange(span.length)
            parts[0].append(torch.full_like(steps, span.row))
            parts[1].append(span.start + steps)
            parts[2].append(torch.full_like(steps, span.source_row))
            parts[3].append(span.source_start + steps)
        return tuple(torch.cat(part) for part in parts)  # type: ignore[return-value]


@dataclass
class Recording:
    """Tensors of one run by site and call; `layouts` say where rows and tokens are."""

    rows: int
    tokens: int
    layouts: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    unaligned: list[str] = field(default_factory=list)

    def add(self, site: str, tensor: Tensor) -> None:
        """Keep a tensor that has rows; others belong to no row, or to several."""
        layout = self._layout(tensor)
        if layout is None:
            if site not in self.unaligned:
                self.unaligned.append(site)
            return
        self.layouts.setdefault(site, layout)
        viewed = grid_view(tensor.detach(), self.layouts[site], self.rows, self.tokens)
        if viewed is not None:
            self.tensors.setdefault(site, []).append(viewed.clone())

    def _layout(self, tensor: Tensor) -> int | None:
        if tensor.dim() and tensor.shape[0] == self.rows:
            along = [dim for dim in range(1, tensor.dim()) if tensor.shape[dim] == self.tokens]
            return along[0] if along and self.tokens > 1 else ROWS
        is_flat = tensor.dim() > 1 and tensor.shape[0] == self.rows * self.tokens
        return FLAT if is_flat else None


def grid_view(tensor: Tensor, layout: int, rows: int, tokens: int) -> Tensor | None:
    """View a tensor as (rows, tokens, …); None where its shape is another one."""
    if layout == FLAT:
        fits = tensor.dim() > 1 and tensor.shape[0] == rows * tokens
        return tensor.view(rows, tokens, *tensor.shape[1:]) if fits else None
    if not tensor.dim() or tensor.shape[0] != rows:
        return None
    if layout == ROWS:
        return tensor.unsqueeze(1)
    if tensor.dim() <= layout or tensor.shape[layout] != tokens:
        return None
    return tensor.movedim(layout, 1)


Judge = Callable[[str, Tensor, Tensor, Pass], None]
"""Takes a site, the tensor of the compared tokens, the recorded one, and the call."""


def record(model: Model, sites: Sequence[Site], sample: Any, rows: int, tokens: int) -> Recording:
    """Run a sample and keep the tensors at the sites before any quantizer of theirs."""
    recording = Recording(rows, tokens)

    def take(site: Site, tensor: Tensor) -> None:
        recording.add(site.name, tensor)

    with torch.no_grad(), tap_sites(model.module, sites, take, first=True, lenient=True):
        outputs = model.outputs(sample)
    for name, tensor in outputs.items():
        recording.add(name, tensor)
    return recording


class FedRun:
    """Calls of a model whose tensors are compared with recorded ones, and replaced by them.

    `change` alters what a site gets in place of its tensor.
    """

    def __init__(
        self,
        model: Model,
        sites: Sequence[Site],
        recording: Recording,
        judge: Judge,
        *,
        force: bool = True,
        change: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.model, self.recording, self._judge = model, recording, judge
        self._sites = [site for site in sites if site.name in recording.tensors]
        self._force, self._change = force, change
        self.missing: set[str] = set()

    def run(self, calls: Iterator[Pass]) -> None:
        """Make calls one after the other; those without spans are not compared."""
        with torch.no_grad():
            for call in calls:
                if call.spans:
                    self._compare(call)
                else:
                    self.model.outputs(call.sample)

    def _compare(self, call: Pass) -> None:
        counts: dict[str, int] = {}
        indices = call.indices()

        def take(site: Site, tensor: Tensor) -> Tensor | None:
            number = counts[site.name] = counts.get(site.name, -1) + 1
            return self._at(site.name, number, tensor, call, indices)

        with tap_sites(self.model.module, self._sites, take, first=True, lenient=True):
            outputs = self.model.outputs(call.sample)
        for name, tensor in outputs.items():
            if name in self.recording.tensors:
                self._at(name, 0, tensor, call, indices)

    def _at(
        self, site: str, number: int, tensor: Tensor, call: Pass, indices: tuple[Tensor, ...]
    ) -> Tensor | None:
        """Compare a tensor with the recorded one; return it with what was recorded in place."""
        recorded = self.recording.tensors[site]
        layout = self.recording.layouts[site]
        if number >= len(recorded):
            self.missing.add(site)
            return None
        row, token, source_row, source_token = indices
        if layout == ROWS:
            if call.tokens != self.recording.tokens:
                return None
            firsts = token == 0
            row, token, source_row = row[firsts], token[firsts], source_row[firsts]
            source_token = token
        viewed = grid_view(tensor, layout, call.rows, call.tokens)
        if viewed is None or viewed.shape[2:] != recorded[number].shape[2:]:
            self.missing.add(site)
            return None
        expected = recorded[number][source_row, source_token]
        self._judge(site, viewed[row, token], expected, call)
        if not self._force:
            return None
        replaced = tensor.clone()
        target = grid_view(replaced, layout, call.rows, call.tokens)
        assert target is not None
        target[row, token] = self._change(expected).to(target.dtype)
        return replaced


def leaf_sites(model: Model) -> list[Site]:
    """List all ports where activations flow, those of modules that a mode put in too."""
    return [s for s in sites_of(model.module, model.layers) if s.port not in ("weight", "state")]
