"""Actual against reference as a density: what is right lies on the diagonal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from qgate.page.plots import _axes
from qgate.page.plots._axes import BOTTOM, HEIGHT, LEFT, TOP, WIDTH
from qgate.page.plots._findings import density_finding
from qgate.page.plots.svg import box, brief, color, document, group, label, number, numbers, path
from qgate.results.pictures import ErrorPicture

SIDE = BOTTOM - TOP
MOST_SHADES = 6


def density(picture: ErrorPicture) -> str:
    """How often actual and reference have which values, darker where more often."""
    cells, size = picture["density"]["cells"], picture["density"]["size"]
    edge = picture["density"]["edge"]
    x = _asinh(edge, LEFT, LEFT + SIDE, "reference / rms")
    y = _asinh(edge, BOTTOM, TOP, "actual / rms")
    triples = sorted(zip(cells[1::3], cells[0::3], cells[2::3], strict=True))
    bounds = shades(max((count for _, _, count in triples), default=1))
    corner = numbers([LEFT + SIDE, TOP])
    diagonal = path(
        f"M{number(LEFT)} {number(BOTTOM)}L{corner}",
        stroke=color("red"),
        stroke_dasharray="4 3",
        fill="none",
    )
    inside = _cells(triples, bounds, size) + diagonal
    said = (
        f"{sum(cells[2::3]):,} elements; both axes in units of the reference's rms, "
        f"{brief(picture['rms'])}."
    )
    body = _axes.frame(x, y, inside) + _key(bounds, LEFT + SIDE + 22)
    return document(WIDTH, HEIGHT, density_finding(picture), said, body)


def _cells(triples: Sequence[tuple[int, int, int]], bounds: Sequence[int], size: int) -> str:
    """Strokes in units of cells, one path for each shade, neighbors in a row as one."""
    pieces: list[list[str]] = [[] for _ in bounds]
    for shade, row, first, length in _runs(triples, bounds):
        pieces[shade].append(f"M{first} {row}h{length}")
    drawn = "".join(
        path("".join(pieces[at]), stroke_opacity=_opacity(at, len(bounds)), data_from=bound)
        for at, bound in enumerate(bounds)
    )
    unit = SIDE / size
    move = f"translate({LEFT:g} {BOTTOM - unit / 2:.5g})scale({unit:.5g} {-unit:.5g})"
    blue = color("blue")
    return group(drawn, transform=move, stroke=blue, shape_rendering="crispEdges", fill="none")


def _runs(
    triples: Sequence[tuple[int, int, int]], bounds: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Neighbors of one shade in one row: shade, row, first column, columns."""
    keyed = [
        (row, column - at, sum(count >= bound for bound in bounds) - 1, column)
        for at, (row, column, count) in enumerate(triples)
    ]
    found = []
    for (row, _, shade), run in groupby(keyed, key=lambda each: each[:3]):
        columns = [column for *_, column in run]
        found.append((shade, row, columns[0], len(columns)))
    return found


def _key(bounds: Sequence[int], left: float) -> str:
    words = label(left, TOP + 9, "elements in a cell", fill="muted")
    for at, bound in enumerate(bounds):
        line = TOP + 27 + 16 * at
        upper = bounds[at + 1] - 1 if at + 1 < len(bounds) else None
        shown = _axes.short_count(bound)
        if upper is None:
            shown += " or more"
        elif upper > bound:
            shown += f" to {_axes.short_count(upper + 1)}"
        words += path(
            box(left, line - 10, 14, 12),
            fill=color("blue"),
            fill_opacity=_opacity(at, len(bounds)),
        )
        words += label(left + 20, line, shown)
    line = TOP + 33 + 16 * len(bounds)
    sample = f"M{numbers([left, line])}l14-9"
    words += path(sample, stroke=color("red"), stroke_dasharray="4 3")
    return words + label(left + 20, line, "actual = reference")


def _asinh(edge: float, start: float, end: float, name: str) -> _axes.Axis:
    """Linear near zero and logarithmic far from it, as the cells are."""
    reach = math.sinh(edge) or 1.0
    if reach < 2.5:
        ticks = _axes.linear(-reach, reach, start, end, most=5).ticks
    else:
        largest = math.floor(math.log10(reach) + 1e-3)
        # As far apart as labels need, and none where they would run into the one of zero.
        room = SIDE / 2 / math.asinh(reach)
        step = max(1, math.ceil(34 / (room * math.log(10))))
        powers = [p for p in range(largest, -1, -step) if room * math.asinh(10.0**p) >= 18]
        above = [(10.0**p, f"{10**p}" if p < 4 else f"1e{p}") for p in powers]
        ticks = (*((-v, f"−{text}") for v, text in above), (0.0, "0"), *above[::-1])
    return _axes.Axis("asinh", -reach, reach, start, end, ticks, name)


def shades(most: int) -> list[int]:
    """The counts from which on a cell is darker: 1, 3, 10, 30 or 1, 10, 100 or coarser yet."""
    third = [1]
    while third[-1] * 3 <= most:
        third.append(third[-1] * 3 if str(third[-1])[0] == "1" else third[-1] // 3 * 10)
    if len(third) <= MOST_SHADES:
        return third
    tens = [10**p for p in range(len(str(most)))]
    return tens[:: -(-len(tens) // MOST_SHADES)]


def _opacity(at: int, shade_count: int) -> str:
    return f"{0.28 + 0.72 * at / (shade_count - 1):.2f}" if shade_count > 1 else "1"
