"""Mode × layer: where the error is, as a table that reads without its colors.

A cell is colored by the logarithm of the error, says it in decibels, and links to the row of its
worst gate; a failing one is outlined and crossed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qgate.charts.page_parts import scroll, section
from qgate.charts.page_style import HEAT_LIGHT, LIGHT_COLORS, heat_colors
from qgate.page.runs import EVERYWHERE, Growth, LayerError, RecordedGate, Run
from qgate.text import for_html as text
from qgate.text import shortened

_STEPS = len(HEAT_LIGHT)
STYLE = """
.scroll.maps { max-height: min(85vh, 60rem); width: max-content; max-width: 100%; }
table.heat { border-collapse: separate; border-spacing: 0; width: auto; font-size: .8rem; }
table.heat :is(td, th) { min-width: 0; padding: 0; border: 0; border-right: 1px solid var(--paper);
  border-bottom: 1px solid var(--paper); text-align: center; vertical-align: middle;
  overflow-wrap: normal; white-space: nowrap; }
table.heat td { height: 28px; min-width: 34px; background: var(--card); }
table.heat td.none { background: none; }
table.heat tbody th { position: sticky; left: 0; background: var(--paper); text-align: right;
  padding: 0 8px; z-index: 1; max-width: 40vw; overflow: hidden; text-overflow: ellipsis; }
table.heat thead th { position: sticky; top: 0; background: var(--paper); padding: 3px 4px;
  z-index: 2; font-weight: 600; vertical-align: bottom; }
table.heat thead td { position: sticky; left: 0; top: 0; background: var(--paper); z-index: 3; }
table.heat thead th.long span { writing-mode: vertical-rl; transform: rotate(180deg); }
table.heat td a { display: block; padding: 5px 4px; color: inherit; text-decoration: none;
  font-variant-numeric: tabular-nums; }
table.heat td a:focus-visible { outline: 3px solid var(--ink); outline-offset: -1px;
  position: relative; z-index: 4; }
table.heat td:is(.bad, .open) { box-shadow: inset 0 0 0 2px var(--fail),
  inset 0 0 0 3px var(--paper); }
table.heat td.open { box-shadow: inset 0 0 0 2px var(--warn), inset 0 0 0 3px var(--paper); }
td.bad a::before { content: "\\2715\\a0" / ""; } td.open a::before { content: "?\\a0" / ""; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; padding: 0; margin: 6px 0 10px;
  list-style: none; font-size: .85rem; color: var(--dim); align-items: center; }
.legend span { display: inline-block; min-width: 30px; padding: 1px 5px; margin-right: 5px;
  text-align: center; border: 1px solid var(--line); }
.legend .bad { box-shadow: inset 0 0 0 2px var(--fail); }
.legend .open { box-shadow: inset 0 0 0 2px var(--warn); }
@media print { .scroll.maps { width: auto; } table.heat td { height: auto; min-width: 22px; }
  table.heat :is(thead th, thead td, tbody th) { position: static; }
  table.heat td a { padding: 2px 1px; }
  table.heat { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  table.heat.many { table-layout: fixed; width: 100%; font-size: 4.5pt; }
  table.heat.many thead td { width: 7%; } table.heat.many tbody th { padding: 0 2px; }
  table.heat.many thead th { padding: 0; } table.heat.many td a::before { content: none; }
  table.heat.many td { min-width: 0; }
  .legend { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
_KEY = (
    "A number is the signal over the error in dB, −10·log10 of the relative MSE, of the error that "
    "a layer carries; where that was not measured, of the one made in it, then of its sweep, its "
    "outputs and its gradients. A cell leads to the row of its worst gate; the arrow keys walk."
)


@dataclass(frozen=True)
class _Scale:
    """Equal steps of the logarithm; the few errors beyond are in the first and the last one."""

    low: float
    high: float

    @classmethod
    def of(cls, errors: Iterable[float | None]) -> _Scale | None:
        known = sorted(math.log10(e) for e in errors if e is not None and 0 < e < math.inf)
        if not known:
            return None
        # A reference at 1e-14 or a mode gone wild would leave one color for all the others.
        low, high = (known[round(share * (len(known) - 1))] for share in (0.05, 0.98))
        return cls(low, high) if high - low > 0.1 else cls(low - 0.5, high + 0.5)

    def step(self, error: float) -> int:
        if error <= 0:
            return 0
        share = (math.log10(error) - self.low) / (self.high - self.low)
        return min(max(int(share * _STEPS), 0), _STEPS - 1)

    def edge(self, step: int) -> float:
        return self.low + (self.high - self.low) * step / _STEPS


def heat_maps(run: Run) -> str:
    """One map per model, all on one scale."""
    if not run.spots:
        return ""
    scale = _Scale.of(spot.error for spot in run.spots)
    models = list(dict.fromkeys(spot.model for spot in run.spots))
    maps = []
    for model in models:
        spots = [spot for spot in run.spots if spot.model == model]
        title = f"<h3>{text(shortened(model, 90))}</h3>\n" if len(models) > 1 else ""
        maps.append(title + _map(model, spots, run.growth, scale))
    about = f"<p class='about'>{_KEY if scale else 'No gate measured a relative MSE.'}</p>"
    return section("map", "Modes and layers", f"{about}\n{_legend(scale)}\n{chr(10).join(maps)}")


def map_fragment(run: Run, link: Callable[[RecordedGate], str], most: int) -> str:
    """The same for a page that is not ours, with its looks, in light colors; `link` is the address
    of a gate there. Empty where there would be a single cell, or more of them than `most`."""
    if not 1 < len(run.spots) <= most:
        return ""
    html = heat_maps(run)
    for gate in {spot.gate.number: spot.gate for spot in run.spots}.values():
        html = html.replace(f"href='#{gate.anchor}'", f"href='{text(link(gate))}'")
    hidden = ".qgate-map .unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; "
    hidden += "clip-path: inset(50%); }"
    colors = f".qgate-map {{ {LIGHT_COLORS} color: var(--ink); }}\n{heat_colors('.qgate-map ')}"
    return f"<div class='qgate-map'><style>{STYLE}{colors}{hidden}</style>{html}</div>"


def _legend(scale: _Scale | None) -> str:
    items = []
    if scale is not None:
        # Close together, one digit would not tell them apart.
        digits = int(scale.high - scale.low < 0.3 * _STEPS)
        for step in range(_STEPS):
            edges = (scale.edge(step), scale.edge(step + 1))
            low, high = (f"{10**edge:.{digits}e}".replace("e-0", "e-") for edge in edges)
            middle = _signed(-5 * sum(edges))
            said = f"{low} to {high}"
            if step in (0, _STEPS - 1):
                said = f"below {high}" if step == 0 else f"above {low}"
            items.append(f"<li><span class='h{step}'>{middle}</span>{said}</li>")
    items.append("<li><span class='bad'>✕</span>a gate failed</li>")
    items.append("<li><span class='open'>?</span>nothing accepted yet</li>")
    items.append("<li><span>✓</span>passed, no relative MSE</li>")
    return f"<ul class='legend' aria-label='Colors: relative MSE'>{''.join(items)}</ul>"


def _map(
    model: str, spots: Sequence[LayerError], growth: Sequence[Growth], scale: _Scale | None
) -> str:
    layers = _in_order({spot.layer for spot in spots}, [g for g in growth if g.model == model])
    modes = sorted({spot.mode for spot in spots}, key=natural)
    at = {(spot.mode, spot.layer): spot for spot in spots}
    heads = "".join(_head(layer) for layer in layers)
    rows = []
    for mode in modes:
        cells = "".join(_cell(at.get((mode, layer)), scale) for layer in layers)
        rows.append(
            f"<tr><th scope='row'{_title(mode, 28)}>{text(shortened(mode, 28))}</th>{cells}"
        )
    many = " many" if len(layers) > 40 else ""
    table = (
        f"<table class='heat{many}'><caption class='unseen'>{text(model)}: error by mode and layer"
        f"</caption>\n<thead><tr><td></td>{heads}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n"
        "</tbody>\n</table>"
    )
    box = scroll(table, f"modes and layers of {shortened(model, 60)}")
    return box.replace("class='scroll'", "class='scroll maps'", 1)


def _head(layer: str) -> str:
    """A number says enough of `layers.12`; the whole name is there to hover and to hear."""
    number = re.fullmatch(r"layers\.(\d+)", layer)
    shown = number[1] if number else shortened(layer, 22)
    long = "" if len(shown) < 4 else " class='long'"
    name = f" abbr='{text(layer)}' title='{text(layer)}'" if shown != layer else ""
    return f"<th scope='col'{long}{name}><span>{text(shown)}</span></th>"


def _title(name: str, most: int) -> str:
    return f" title='{text(name)}'" if len(name) > most else ""


def _cell(spot: LayerError | None, scale: _Scale | None) -> str:
    if spot is None:
        return "<td class=none>"
    state = "" if not spot.failed else "open" if spot.gate.is_new else "bad"
    kind = [f"h{scale.step(spot.error)}"] if spot.error is not None and scale else []
    kinds = " ".join([*kind, *([state] if state else [])])
    said = {"": "", "bad": "failed", "open": "new"}[state]
    told = f"{spot.scope} relative MSE {spot.error:.1e}" if spot.error is not None else "no error"
    many = f"; {spot.failed} of {spot.gates} failed" if spot.failed else f"; {spot.gates} passed"
    shown = _decibels(spot.error) or ("" if state else "✓")
    heard = f"<i class=unseen>{said}</i>" if said else ""
    opening = f"<td class='{kinds}'>" if kinds else "<td>"
    return f"{opening}<a href='#{spot.gate.anchor}' title='{text(told + many)}'>{shown}{heard}</a>"


def _decibels(error: float | None) -> str:
    if error is None:
        return ""
    return "∞" if error == 0 else _signed(-10 * math.log10(error))


def _signed(value: float) -> str:
    return f"{round(value)}".replace("-", "−")


def _in_order(layers: set[str], growth: Sequence[Growth]) -> list[str]:
    """As they are executed where that was measured, the others by number, then by name."""
    known = max((line.layers for line in growth), key=len, default=())
    place = {layer: number for number, layer in reversed([*enumerate(known)])}
    end = len(known)
    last = (EVERYWHERE, "")
    return sorted(layers, key=lambda layer: (layer in last, place.get(layer, end), natural(layer)))


def natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """`layers.10` after `layers.9`; names without a number last."""
    parts = re.split(r"(\d{1,18})", name)
    keys = [(int(p), "") if p.isascii() and p.isdigit() else (-1, p) for p in parts]
    return len(parts) == 1, keys
