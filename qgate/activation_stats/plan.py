"""Plans a run from its settings: which modules in which roles, and which statistics of each.

All checks are made here, before the first forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from qgate.activation_stats._ranges import PERCENTILES
from qgate.activation_stats.layer_stats import LayerRequest, OutlierRule
from qgate.activation_stats.reading import spread_evenly
from qgate.activation_stats.settings import ActivationSettings
from qgate.errors import QgateError
from qgate.hooks.observing import INPUT, OUTPUT, WEIGHT, compile_pattern, matching_modules
from qgate.models.blocks import blocks_of
from qgate.models.model import head_of
from qgate.models.sites import is_transposed_linear, kind_of
from qgate.text import listed

Panels = dict[str, list[str]]
LINEAR, BLOCKS = "linear layers", "blocks"
BINS = 50
_ROWS = 256
_ROW_ELEMENTS = 2**19
_REDUCED: dict[int | None, Any] = {-1: "token", -2: "channel", 0: "all", None: "all"}
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass
class ActivationPlan:
    """Requests by (module, role), panels by kind of picture and pattern, and the linear layers to
    smooth and to quantize alone."""

    requests: dict[tuple[str, str], LayerRequest] = field(default_factory=dict)
    panels: dict[str, Panels] = field(default_factory=dict)
    smoothed: list[str] = field(default_factory=list)
    sensitive: list[str] = field(default_factory=list)
    blocks: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def layer_number(name: str) -> int | None:
    number = _NUMBER.search(name)
    return int(number[1]) if number else None


def weight_table(module: nn.Module) -> Tensor | None:
    """Return a weight as output by input features; None where a module has none of its own."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or not weight.numel():
        return None
    weight = weight.detach()
    if is_transposed_linear(module):
        return weight.T
    return weight.reshape(1, -1) if weight.dim() < 2 else weight.flatten(1)


def plan_of(root: nn.Module, settings: ActivationSettings, part: str = "") -> ActivationPlan:
    """Plan a run; `part` matches the modules to measure where the settings name none."""
    return _Planner(root, settings, part).plan()


class _Planner:
    def __init__(self, root: nn.Module, settings: ActivationSettings, part: str) -> None:
        self.root, self.settings, self.part = root, settings, compile_pattern(part, "part")
        self.view = view = settings.visualization
        self.result = ActivationPlan(blocks=blocks_of(root, self.part))
        patterns = view.layer_selection.patterns
        matches = [matching_modules(root, p, "layer_selection.patterns") for p in patterns or ()]
        self.selected = {name for names in matches for name in names} if patterns else None
        self.emptied: list[str] = []
        own = view.outlier
        self.rule = OutlierRule(
            threshold=own.threshold,
            floor=own.floor,
            top=own.top_n,
            channel_ratio=own.channel_ratio,
            persistence=own.persistence,
        )

    def plan(self) -> ActivationPlan:
        view, on, result = self.view, self.view.enabled, self.result
        magnitude = self._panels("magnitude.patterns", view.magnitude.patterns, self._linears)
        if on.magnitude_input:
            self._add_panels("magnitude_input", magnitude, INPUT)
        if on.magnitude_output:
            self._add_panels("magnitude_output", magnitude, OUTPUT)
        if on.magnitude_weight:
            self._add_weights(magnitude)
        if on.outlier_layer_wise or on.outlier_position or on.outlier_token:
            panels = self._panels("outlier.pattern", view.outlier.pattern, self._blocks_or_linears)
            if panels:
                self._add_panels("outliers", panels, OUTPUT, outliers=self.rule)
            for (module, role), request in result.requests.items():
                if role != WEIGHT:
                    result.requests[module, role] = replace(request, outliers=self.rule)
        if on.distribution:
            own = view.distribution
            panels = self._panels("distribution.patterns", own.patterns, magnitude)
            self._add_panels("distribution", panels, _role(own), bins=BINS)
        if on.percentile_range:
            self._percentiles(magnitude)
        if on.heatmap_3d:
            heat = view.heatmap_3d
            first = dict(list(magnitude.items())[:1])
            panels = self._panels("heatmap_3d.pattern", heat.pattern, first)
            few = {p: names[: max(heat.num_2d_layers, 1)] for p, names in panels.items()}
            self._add_panels("heat_map", few, _role(heat), heat_map=heat.sample_idx)
        self._advice(magnitude)
        if self.emptied and not result.requests:
            raise QgateError(self.emptied[0])
        result.notes += dict.fromkeys(self.emptied)
        if not result.requests and not result.sensitive:
            raise QgateError(
                "there is nothing to measure: every analysis is switched off "
                "(visualization.enabled, smoothing.enabled, sensitivity.enabled)."
            )
        return result

    def _percentiles(self, magnitude: Panels) -> None:
        """Measure only the layers to draw, because histograms of channels take memory."""
        own = self.view.percentile_range
        panels = self._panels("percentile_range.patterns", own.patterns, magnitude)
        chosen = {p: spread_evenly(names, own.num_layers_to_show) for p, names in panels.items()}
        self.result.notes += [
            f"percentiles of channels are of {len(chosen[pattern])} of {len(names)} layers of "
            f"{pattern!r}, evenly spaced (percentile_range.num_layers_to_show)."
            for pattern, names in panels.items()
            if len(chosen[pattern]) < len(names)
        ]
        extra = {"percentiles": PERCENTILES, "absolute": own.use_abs}
        self._add_panels("percentile_range", chosen, _role(own), **extra)

    def _advice(self, magnitude: Panels) -> None:
        names = dict.fromkeys(name for layer_names in magnitude.values() for name in layer_names)
        tables = {
            name: weight_table(self._module(name))
            for name in names
            if kind_of(self._module(name)) == "linear"
        }
        widths = {name: table.shape[-1] for name, table in tables.items() if table is not None}
        result = self.result
        if self.settings.smoothing.enabled:
            result.smoothed = list(widths)
            if not widths:
                result.notes.append("no layer is linear, so there is no smoothing advice.")
            for name, width in widths.items():
                rows = max(min(_ROWS, _ROW_ELEMENTS // width), 16)
                result.requests[name, INPUT] = replace(self._request(name, INPUT), rows=rows)
        if self.settings.sensitivity.enabled:
            result.sensitive = list(widths)
            if not widths:
                raise QgateError("sensitivity quantizes linear layers, and no layer is linear.")

    # Panels ------------------------------------------------------------------------------------

    def _panels(
        self,
        setting: str,
        patterns: str | Sequence[str] | None,
        otherwise: Panels | Callable[[], Panels],
    ) -> Panels:
        """Return layers by pattern without those that a selection leaves out; a note says where it
        leaves none. `otherwise` are panels of another analysis, filtered already."""
        if patterns is None and isinstance(otherwise, dict):
            return otherwise
        panels = otherwise() if patterns is None and callable(otherwise) else {}
        for pattern in (patterns,) if isinstance(patterns, str) else patterns or ():
            names = matching_modules(self.root, pattern, setting)
            panels[pattern] = [n for n in names if not isinstance(self._module(n), _HOLDERS)]
            if not panels[pattern]:
                raise QgateError(
                    f"{setting} {pattern!r} matches only lists of modules, which have no forward: "
                    f"{listed(names, 20)}."
                )
        if self.selected is not None:
            every = [name for names in panels.values() for name in names]
            if not self.selected & set(every):
                chosen = list(self.view.layer_selection.patterns or ())
                self.emptied.append(
                    f"layer_selection.patterns {chosen} leave no layer of "
                    f"{setting} {list(panels)}: it has {listed(every, 20)}."
                )
            panels = {p: [n for n in names if n in self.selected] for p, names in panels.items()}
        return {pattern: names for pattern, names in panels.items() if names}

    def _linears(self) -> Panels:
        """Return the linear layers of the blocks, or of the model without its head."""
        head = head_of(self.root)
        names = [
            name
            for name, module in self.root.named_modules()
            if kind_of(module) == "linear" and self.part.search(name) and name not in head
        ]
        blocks = self.result.blocks
        inside = [n for n in names if any(f"{n}.".startswith(f"{b}.") for b in blocks)]
        return {LINEAR: inside or names} if inside or names else self._blocks_or_linears()

    def _blocks_or_linears(self) -> Panels:
        """Return the blocks, or the linear layers of a model without any."""
        if self.result.blocks:
            return {BLOCKS: list(self.result.blocks)}
        names = [n for n, m in self.root.named_modules() if kind_of(m) in ("linear", "conv")]
        if not names:
            every = [n for n, _ in self.root.named_modules() if n]
            raise QgateError(
                f"{type(self.root).__name__} has no linear layers and no list of blocks: name "
                "modules by regular expressions (magnitude.patterns, outlier.pattern). The first "
                f"names are {listed(every, 20) or 'none'}."
            )
        return {LINEAR: names}

    # Requests ----------------------------------------------------------------------------------

    def _add_panels(self, kind: str, panels: Panels, role: str, **changes: Any) -> None:
        self.result.panels[kind] = panels
        for name in (name for names in panels.values() for name in names):
            self.result.requests[name, role] = replace(self._request(name, role), **changes)

    def _add_weights(self, magnitude: Panels) -> None:
        patterns = self.view.magnitude.weight.patterns
        panels = self._panels("magnitude.weight.patterns", patterns, magnitude)
        having = {
            pattern: [n for n in names if weight_table(self._module(n)) is not None]
            for pattern, names in panels.items()
        }
        if not any(having.values()):
            names = [n for layer_names in panels.values() for n in layer_names]
            raise QgateError(
                f"magnitude.weight.patterns: none of {listed(names, 20)} has a weight."
            )
        self._add_panels(
            "magnitude_weight", {p: names for p, names in having.items() if names}, WEIGHT
        )

    def _request(self, name: str, role: str) -> LayerRequest:
        """Return the request of a module so far."""
        reduction = _REDUCED[self.view.magnitude.reduce_dim]
        plain = LayerRequest(
            reduced=tuple(dict.fromkeys(("token", "channel", reduction))),
            formats=tuple(self.settings.formats),
            seed=self.settings.data.seed,
        )
        return self.result.requests.get((name, role), plain)

    def _module(self, name: str) -> nn.Module:
        return self.root.get_submodule(name)


def _role(own: Any) -> str:
    return INPUT if own.is_input else OUTPUT
