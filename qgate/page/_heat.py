"""Map of modes and layers: how near to a limit each is, its error, and how many gates failed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from urllib.parse import urlencode

from qgate.charts.pages import margin_legend, margin_step
from qgate.page._texts import nearness_text
from qgate.page.runs import EVERYWHERE, Growth, LayerError, RecordedGate, Run
from qgate.text import one_line, shortened

Link = Callable[[RecordedGate], str]


def heat_view(run: Run, link: Link | None = None) -> dict[str, object] | None:
    """Return one map per model, colored by margins; `link` returns the address of a gate.

    On the page of the run itself, where there is no `link`, a mode leads to its rows.
    """
    if not run.layer_errors:
        return None
    address = link or (lambda gate: f"#{gate.anchor}")
    maps = []
    for model in dict.fromkeys(error.model for error in run.layer_errors):
        errors = [error for error in run.layer_errors if error.model == model]
        growth = [line for line in run.growth if line.model == model]
        layers = _in_order({error.layer for error in errors}, growth)
        at = {(error.mode, error.layer): _cell(error, address) for error in errors}
        modes = sorted({error.mode for error in errors}, key=natural)
        rows = [
            (
                mode,
                "" if link else f"#show&{urlencode({'mode': one_line(mode)})}",
                [at.get((mode, layer)) for layer in layers],
            )
            for mode in modes
        ]
        # A number says enough of `layers.12`.
        numbers = [re.fullmatch(r"layers\.(\d+)", layer) for layer in layers]
        heads = [
            (layer, number[1] if number else shortened(layer, 22))
            for layer, number in zip(layers, numbers, strict=True)
        ]
        maps.append({"model": model, "heads": heads, "rows": rows})
    return {"legend": margin_legend(), "maps": maps}


def _cell(cell: LayerError, link: Link) -> dict[str, str]:
    state = "" if not cell.failed else "open" if cell.gate.is_new else "bad"
    error = ""
    step = "" if cell.gate.is_new else f"h{margin_step(cell.gate.margin)}"
    text = "" if state else "✓"
    if cell.error is not None:
        error = f"{cell.scope} relative MSE {cell.error:.1e}"
        text = "∞" if cell.error == 0 else f"{round(-10 * math.log10(cell.error))}"
    gates = f"{cell.failed} of {cell.gates} failed" if cell.failed else f"{cell.gates} passed"
    return {
        "kinds": f"{step} {state}".strip(),
        "link": link(cell.gate),
        "title": f"{error or 'no error'}; {nearness_text(cell.gate)}; {gates}",
        "text": text.replace("-", "−"),
        "heard": {"": "", "bad": "failed", "open": "new"}[state],
    }


def _in_order(layers: set[str], growth: Sequence[Growth]) -> list[str]:
    """Sort layers as they were executed where that is known, then by number and name."""
    executed = max((line.layers for line in growth), key=len, default=())
    positions = {layer: number for number, layer in reversed([*enumerate(executed)])}
    end = len(executed)
    last = (EVERYWHERE, "")
    return sorted(
        layers, key=lambda layer: (layer in last, positions.get(layer, end), natural(layer))
    )


def natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return a sort key: `layers.10` after `layers.9`, names without a number last."""
    parts = re.split(r"(\d{1,18})", name)
    keys = [(int(p), "") if p.isascii() and p.isdigit() else (-1, p) for p in parts]
    return len(parts) == 1, keys
