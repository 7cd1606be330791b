"""From settings to what is looked at: modules by role, and what is asked of each.

Everything is checked here, before the first forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from qgate.activation_stats.layer_stats import Ask, OutlierRule
from qgate.activation_stats.settings import ActivationSettings
from qgate.capture.flowing import INPUT, OUTPUT, WEIGHT, compiled, listed, matching
from qgate.errors import QgateError
from qgate.models.model import blocks_of, head_of
from qgate.models.sites import is_transposed_linear, kind_of

LINEAR, BLOCKS = "linear layers", "blocks"
BINS = 50
_PERCENTILES = (0.0, 0.01, 1.0, 25.0, 50.0, 75.0, 99.0, 99.99, 100.0)
_ROWS = 256
_ROW_ELEMENTS = 2**19
_REDUCED: dict[int | None, Any] = {-1: "token", -2: "channel", 0: "all", None: "all"}
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass
class ActivationPlan:
    """asks by (module, role), panels by kind of picture and pattern, and the linear layers that
    are smoothed and quantized alone."""

    asks: dict[tuple[str, str], Ask] = field(default_factory=dict)
    panels: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    smoothed: list[str] = field(default_factory=list)
    sensitive: list[str] = field(default_factory=list)
    blocks: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    def roles(self) -> dict[str, list[str]]:
        """Roles that flow, by module."""
        found: dict[str, list[str]] = {}
        for module, role in self.asks:
            if role != WEIGHT:
                found.setdefault(module, []).append(role)
        return found


def layer_number(name: str) -> int | None:
    found = _NUMBER.search(name)
    return int(found[1]) if found else None


def kind_in(root: nn.Module, name: str, blocks: Sequence[str]) -> str:
    return "block" if name in blocks else kind_of(root.get_submodule(name))


def weight_table(module: nn.Module) -> Tensor | None:
    """A weight as output by input features; None where a module has none of its own."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or not weight.numel():
        return None
    weight = weight.detach()
    if is_transposed_linear(module):
        return weight.T
    return weight.reshape(1, -1) if weight.dim() < 2 else weight.flatten(1)


def plan_of(root: nn.Module, settings: ActivationSettings, part: str = "") -> ActivationPlan:
    """What a model is looked at for; `part` finds the modules that count where nothing is said."""
    return _Planner(root, settings, part).plan()


class _Planner:
    def __init__(self, root: nn.Module, settings: ActivationSettings, part: str) -> None:
        self.root, self.settings, self.part = root, settings, compiled(part, "part")
        self.found = ActivationPlan(blocks=blocks_of(root, self.part))
        self.selected = self._selection()
        self.emptied: list[str] = []
        view = settings.visualization
        own = view.outlier
        self.rule = OutlierRule(
            threshold=own.threshold,
            floor=own.floor,
            top=own.top_n,
            channel_ratio=own.channel_ratio,
            persistence=own.persistence,
        )

    def plan(self) -> ActivationPlan:
        view = self.settings.visualization
        on = view.enabled
        magnitude = self._panels("magnitude.patterns", view.magnitude.patterns, self._linears)
        if on.magnitude_input:
            self._look("magnitude_input", magnitude, INPUT)
        if on.magnitude_output:
            self._look("magnitude_output", magnitude, OUTPUT)
        if on.magnitude_weight:
            own = view.magnitude.weight.patterns
            weights = magnitude if own is None else self._panels("magnitude.weight.patterns", own)
            self._look_at_weights(weights)
        if on.outlier_layer_wise or on.outlier_position or on.outlier_token:
            pattern = None if view.outlier.pattern is None else (view.outlier.pattern,)
            panels = self._panels("outlier.pattern", pattern, self._outer)
            if panels:
                self._look("outliers", panels, OUTPUT, outliers=self.rule)
            for (module, role), ask in self.found.asks.items():
                if role != WEIGHT:
                    self.found.asks[module, role] = replace(ask, outliers=self.rule)
        if on.distribution:
            role = INPUT if view.distribution.is_input else OUTPUT
            panels = self._own("distribution.patterns", view.distribution.patterns, magnitude)
            self._look("distribution", panels, role, bins=BINS)
        if on.percentile_range:
            self._percentiles(magnitude)
        if on.heatmap_3d:
            self._heat_maps(magnitude)
        self._advice(magnitude)
        if self.emptied and not self.found.asks:
            raise QgateError(self.emptied[0])
        self.found.notes += dict.fromkeys(self.emptied)
        if not self.found.asks and not self.found.sensitive:
            raise QgateError(
                "there is nothing to look at: every analysis is switched off "
                "(visualization.enabled, smoothing.enabled, sensitivity.enabled)."
            )
        return self.found

    def _percentiles(self, magnitude: dict[str, list[str]]) -> None:
        """Of the layers that are drawn, because a histogram per channel is not small."""
        own = self.settings.visualization.percentile_range
        panels = self._own("percentile_range.patterns", own.patterns, magnitude)
        shown = {p: evenly(names, own.num_layers_to_show) for p, names in panels.items()}
        for pattern, names in panels.items():
            if len(shown[pattern]) < len(names):
                self.found.notes.append(
                    f"percentiles of channels are of {len(shown[pattern])} of {len(names)} layers "
                    f"of {pattern!r}, evenly spaced (percentile_range.num_layers_to_show)."
                )
        role = INPUT if own.is_input else OUTPUT
        wanted = {"percentiles": _PERCENTILES, "absolute": own.use_abs}
        self._look("percentile_range", shown, role, **wanted)

    def _heat_maps(self, magnitude: dict[str, list[str]]) -> None:
        own = self.settings.visualization.heatmap_3d
        first = dict(list(magnitude.items())[:1])
        given = None if own.pattern is None else (own.pattern,)
        panels = self._own("heatmap_3d.pattern", given, first)
        few = {p: names[: max(own.num_2d_layers, 1)] for p, names in panels.items()}
        self._look("heat_map", few, INPUT if own.is_input else OUTPUT, heat_map=own.sample_idx)

    def _advice(self, magnitude: dict[str, list[str]]) -> None:
        names = list(dict.fromkeys(name for each in magnitude.values() for name in each))
        linear = [n for n in names if kind_of(self.root.get_submodule(n)) == "linear"]
        linear = [n for n in linear if weight_table(self.root.get_submodule(n)) is not None]
        if self.settings.smoothing.enabled:
            self.found.smoothed = linear
            if not linear:
                self.found.notes.append("no layer is linear, so there is no smoothing advice.")
            for name in linear:
                table = weight_table(self.root.get_submodule(name))
                width = table.shape[-1] if table is not None else 1
                rows = max(min(_ROWS, _ROW_ELEMENTS // width), 16)
                self._look("smoothing", {"": [name]}, INPUT, rows=rows)
            self.found.panels.pop("smoothing", None)
        if self.settings.sensitivity.enabled:
            self.found.sensitive = linear
            if not linear:
                raise QgateError("sensitivity quantizes linear layers, and no layer is linear.")

    # Patterns ----------------------------------------------------------------------------------

    def _selection(self) -> set[str] | None:
        patterns = self.settings.visualization.layer_selection.patterns
        if not patterns:
            return None
        return {n for p in patterns for n in matching(self.root, p, "layer_selection.patterns")}

    def _panels(
        self, what: str, patterns: Sequence[str] | None, default: Any = None
    ) -> dict[str, list[str]]:
        """Layers by pattern; what a selection leaves out is out, with a note if that is all."""
        found: dict[str, list[str]] = {}
        if patterns is None:
            label, names = default()
            found[label] = names
        else:
            for pattern in patterns:
                names = matching(self.root, pattern, what)
                ran = [n for n in names if not isinstance(self._module(n), _HOLDERS)]
                if not ran:
                    raise QgateError(
                        f"{what} {pattern!r} matches only lists of modules, which have no forward: "
                        f"{listed(names)}."
                    )
                found[pattern] = ran
        if self.selected is not None:
            kept = {
                pattern: [name for name in names if name in self.selected]
                for pattern, names in found.items()
            }
            if not any(kept.values()):
                self.emptied.append(
                    "layer_selection.patterns "
                    f"{list(self.settings.visualization.layer_selection.patterns or ())} leave no "
                    f"layer of {what} {list(found)}: it has "
                    f"{listed([n for names in found.values() for n in names])}."
                )
            found = kept
        return {pattern: names for pattern, names in found.items() if names}

    def _own(
        self, what: str, patterns: Sequence[str] | None, otherwise: dict[str, list[str]]
    ) -> dict[str, list[str]]:
        return otherwise if patterns is None else self._panels(what, patterns)

    def _module(self, name: str) -> nn.Module:
        return self.root.get_submodule(name)

    def _linears(self) -> tuple[str, list[str]]:
        """Of the blocks; of the whole model, without its head, where there are no blocks."""
        head = head_of(self.root)
        names = [
            name
            for name, module in self.root.named_modules()
            if kind_of(module) == "linear" and self.part.search(name) and name not in head
        ]
        inside = [n for n in names if any(f"{n}.".startswith(f"{b}.") for b in self.found.blocks)]
        if not (inside or names):
            return self._outer()
        return LINEAR, inside or names

    def _outer(self) -> tuple[str, list[str]]:
        """The blocks, or the linear layers of a model without any."""
        if self.found.blocks:
            return BLOCKS, list(self.found.blocks)
        names = [n for n, m in self.root.named_modules() if kind_of(m) in ("linear", "conv")]
        if not names:
            every = [n for n, _ in self.root.named_modules() if n]
            raise QgateError(
                f"{type(self.root).__name__} has no linear layers and no list of blocks: name "
                "modules by regular expressions (magnitude.patterns, outlier.pattern). The first "
                f"names are {listed(every) or 'none'}."
            )
        return LINEAR, names

    # Asks --------------------------------------------------------------------------------------

    def _look(self, kind: str, panels: dict[str, list[str]], role: str, **wanted: Any) -> None:
        self.found.panels[kind] = panels
        for names in panels.values():
            for name in names:
                ask = self.found.asks.get((name, role)) or self._ask()
                self.found.asks[name, role] = replace(ask, **wanted)

    def _look_at_weights(self, panels: dict[str, list[str]]) -> None:
        having = {
            pattern: [n for n in names if weight_table(self._module(n)) is not None]
            for pattern, names in panels.items()
        }
        if not any(having.values()):
            names = [n for each in panels.values() for n in each]
            raise QgateError(f"magnitude.weight.patterns: none of {listed(names)} has a weight.")
        self._look("magnitude_weight", {p: names for p, names in having.items() if names}, WEIGHT)

    def _ask(self) -> Ask:
        wanted = _REDUCED[self.settings.visualization.magnitude.reduce_dim]
        reduced = tuple(dict.fromkeys(("token", "channel", wanted)))
        seed = self.settings.data.seed
        return Ask(reduced=reduced, formats=tuple(self.settings.formats), seed=seed)


def evenly(names: list[str], most: int) -> list[str]:
    """At most so many, the first and the last among them."""
    if len(names) <= most:
        return names
    if most == 1:
        return names[:1]
    return [names[round(k * (len(names) - 1) / (most - 1))] for k in range(most)]
