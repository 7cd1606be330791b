"""Steps of color of heat maps: how many times its limit a value is."""

from __future__ import annotations

from bisect import bisect_left

from qgate.charts.palette import HEAT_LIGHT

# Times the limit where a step of color ends: what passed has the three palest.
_EDGES = (0.5, 0.9, 1.0, 1.2, 2.0, 5.0, 20.0)
assert len(_EDGES) == len(HEAT_LIGHT) - 1


def margin_step(margin: float) -> int:
    """Return the step of color of a value by how many times its limit it is."""
    return bisect_left(_EDGES, margin)


def margin_legend() -> list[str]:
    """Return, for each step, the margins in it."""
    return [*(f"≤ {edge:g}×" for edge in _EDGES), f"> {_EDGES[-1]:g}×"]
