"""Tensors of one run by token, and runs of the same tokens that are compared with it and fed by it.

A tensor of a site is seen as (rows, tokens, …). In a compared run each site gets the recorded
tensor once it was compared: what differs was made between this site and those before it, and a
code that noise turned changes nothing behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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

    @cached_property
    def part(self) -> tuple[slice | list[int], slice] | None:
        """Return recorded rows and tokens, where all of the call are such a part of them."""
        starts = {(span.start, span.source_start, span.length) for span in self.spans}
        if len(starts) != 1 or [span.row for span in self.spans] != list(range(self.rows)):
            return None
        start, source_start, length = starts.pop()
        if start != 0 or length != self.tokens:
            return None
        rows = [span.source_row for span in self.spans]
        first, end = rows[0], rows[-1] + 1
        are_neighbors = rows == list(range(first, end))
        tokens = slice(source_start, source_start + length)
        return slice(first, end) if are_neighbors else rows, tokens

    @cached_property
    def whole_rows(self) -> tuple[Tensor, ...]:
        """Return the rows without padding, here and in the recording; each has one token."""
        whole = [span for span in self.spans if span.length == self.tokens]
        rows = torch.tensor([[span.row, span.source_row] for span in whole], dtype=torch.int64)
        row, source_row = rows.reshape(-1, 2).unbind(1)
        return row, torch.zeros_like(row), source_row, torch.zeros_like(row)

    @cached_property
    def indices(self) -> tuple[Tensor, ...]:
        """Return row and token of each compared token, here and in the recording."""
        parts: list[list[Tensor]] = [[], [], [], []]
        for span in self.spans:
            steps = torch.arange(span.length)
            parts[0].append(torch.full_like(steps, span.row))
            parts[1].append(span.start + steps)
            parts[2].append(torch.full_like(steps, span.source_row))
            parts[3].append(span.source_start + steps)
        return tuple(torch.cat(part) for part in parts)


@dataclass
class Recording:
    """Tensors of one run by site and call; `layouts` say where rows and tokens are."""

    rows: int
    tokens: int
    layouts: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    unaligned: list[str] = field(default_factory=list)
    is_long: bool = False
    """Weights of attention, with tokens along two dimensions, are not kept."""

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
            if self.is_long and len(along) > 1:
                return None
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


def record(model: Model, sites: Sequence[Site], whole: Pass, *, is_long: bool = False) -> Recording:
    """Make a call and keep the tensors at the sites before any quantizer of theirs."""
    recording = Recording(whole.rows, whole.tokens, is_long=is_long)

    def take(site: Site, tensor: Tensor) -> None:
        recording.add(site.name, tensor)

    with torch.no_grad(), tap_sites(model.module, sites, take, first=True, lenient=True):
        outputs = model.outputs(whole.sample)
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
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model, self.recording, self._judge = model, recording, judge
        self._sites = [site for site in sites if site.name in recording.tensors]
        self._force, self._change = force, change
        self.missing: set[str] = set()
        self._call: Pass | None = None
        self._counts: dict[str, int] = {}

    def run(self, calls: Iterator[Pass]) -> None:
        """Make calls one after the other; those without spans are not compared."""
        with (
            torch.no_grad(),
            tap_sites(self.model.module, self._sites, self._take, first=True, lenient=True),
        ):
            for call in calls:
                self._call, self._counts = (call if call.spans else None), {}
                outputs = self.model.outputs(call.sample)
                if not call.spans:
                    continue
                for name, tensor in outputs.items():
                    if name in self.recording.tensors:
                        self._at(name, 0, tensor, call)

    def _take(self, site: Site, tensor: Tensor) -> Tensor | None:
        if self._call is None:
            return None
        number = self._counts[site.name] = self._counts.get(site.name, -1) + 1
        return self._at(site.name, number, tensor, self._call)

    def _at(self, site: str, number: int, tensor: Tensor, call: Pass) -> Tensor | None:
        """Compare a tensor with the recorded one; return it with what was recorded in place."""
        listed, layout = self.recording.tensors[site], self.recording.layouts[site]
        if layout == ROWS and call.tokens != self.recording.tokens:
            return None
        # Such as the positions of a batch whose rows begin at the same one.
        is_shared = layout != FLAT and tensor.dim() > 1 and len(tensor) == 1 < call.rows
        every_row = tensor.expand(call.rows, *tensor.shape[1:]) if is_shared else tensor
        is_fed = self._force and not is_shared
        viewed = grid_view(every_row, layout, call.rows, call.tokens)
        recorded = listed[number] if number < len(listed) else None
        if recorded is None or viewed is None or viewed.shape[2:] != recorded.shape[2:]:
            self.missing.add(site)
            if ":" not in site and recorded is not None:
                # An output of another shape is no output of these tokens.
                expected = recorded[:1, :1].flatten(0, 1)
                self._judge(site, torch.full_like(expected, math.nan), expected, call)
            return None
        part = call.part
        if part is not None and layout in (1, FLAT) and not self._change:
            expected = recorded[part]
            actual = viewed.flatten(0, 1)
            if torch.equal(viewed, expected):
                self._judge(site, actual, actual, call)
                return None
            self._judge(site, actual, expected.flatten(0, 1), call)
            if not is_fed:
                return None
            return expected.to(tensor.dtype, copy=True).reshape(tensor.shape)
        row, token, source_row, source_token = call.whole_rows if layout == ROWS else call.indices
        if not len(row):
            return None
        expected = recorded[source_row, source_token]
        self._judge(site, viewed[row, token], expected, call)
        if not is_fed:
            return None
        replaced = tensor.clone()
        target = grid_view(replaced, layout, call.rows, call.tokens)
        assert target is not None
        values = expected if self._change is None else self._change(expected)
        target[row, token] = values.to(target.dtype)
        return replaced


def leaf_sites(model: Model) -> list[Site]:
    """List all ports where activations flow, those of modules that a mode put in too."""
    return [s for s in sites_of(model.module, model.layers) if s.port not in ("weight", "state")]
