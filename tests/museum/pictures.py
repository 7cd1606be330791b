"""Pictures of exhibits: where the elements of a result are wrong, and by how much."""

from __future__ import annotations

from html import escape

import torch
from torch import Tensor

from qgate.expected.derived import find_axes
from tests.museum.exhibit import Exhibit, Function

STEPS = (1e-6, 1e-4, 1e-2, 1e-1, 1.0)
"""Errors relative to the RMS of the reference, at which the shade changes."""
NAMES = ("none", "< 10⁻⁶", "< 10⁻⁴", "< 1 %", "< 10 %", "< 100 %", "more")
CELLS = 48
"""Most cells along a side; larger results are pooled by their largest error."""
SIDE, GAP, TOP, LEGEND = 240, 24, 34, 696
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.s0 { fill: none } .frame { fill: none; stroke: #8c959f }
.s1 { fill: #ddf4ff } .s2 { fill: #b6e3ff } .s3 { fill: #80ccff }
.s4 { fill: #f4a259 } .s5 { fill: #d1495b } .s6 { fill: #6e0b2a }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .frame { stroke: #6e7681 }
.s1 { fill: #0c2d4a } .s2 { fill: #104a7a } .s3 { fill: #1f6feb }
.s4 { fill: #c9762b } .s5 { fill: #e5535f } .s6 { fill: #ffb3c1 } }
"""


def draw_exhibit(exhibit: Exhibit) -> str:
    """Draw the errors of the right and of the faulty implementation, element by element."""
    if exhibit.options.get("invariant"):
        panels = [
            ("right: alone − in the batch", _alone(exhibit, exhibit.right)),
            ("faulty: alone − in the batch", _alone(exhibit, exhibit.faulty)),
        ]
    else:
        reference = exhibit.reference(exhibit.draw(0))
        right = exhibit.result(exhibit.right, exhibit.draw(0))
        faulty = exhibit.result(exhibit.faulty, exhibit.draw(0))
        panels = [
            ("right − unquantized", _levels(right, reference, reference)),
            ("faulty − unquantized", _levels(faulty, reference, reference)),
            ("faulty − right", _levels(faulty, right, reference)),
        ]
    width = max(len(panels) * (SIDE + GAP), LEGEND) + GAP
    height = TOP + SIDE + 56
    body = [
        _panel(title, levels, GAP + number * (SIDE + GAP))
        for number, (title, levels) in enumerate(panels)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(exhibit.source)}: {escape(exhibit.defect)}</title>",
            f"<style>{STYLE}</style>",
            *body,
            _legend(TOP + SIDE + 30),
            "</svg>",
            "",
        ]
    )


def _alone(exhibit: Exhibit, kernel: Function) -> Tensor:
    """Compare every row computed alone with the same row of the batch."""
    arguments = exhibit.draw(0)
    batch = exhibit.result(kernel, arguments)
    axis = next(
        axis
        for axis in find_axes(exhibit.like, arguments)
        if axis.output is not None and axis.dimensions[0][0] == 0
    )
    rows = [
        exhibit.result(kernel, tuple(axis.take(arguments, torch.tensor([row]))))
        for row in range(axis.length)
    ]
    assert axis.output is not None
    return _levels(torch.cat(rows, axis.output), batch, batch)


def _levels(actual: Tensor, expected: Tensor, reference: Tensor) -> Tensor:
    """Return the shade of each cell of a picture: 0 for no error, 6 for the worst."""
    rms = reference.double().square().mean().sqrt()
    error = ((actual.double() - expected.double()).abs() / rms).nan_to_num(torch.inf, torch.inf)
    levels = torch.bucketize(error, torch.tensor(STEPS, dtype=torch.float64), right=True) + 1
    levels = torch.where(error == 0, 0, levels)
    levels = levels.reshape(-1, levels.shape[-1]) if levels.dim() != 1 else levels[None]
    pooled = torch.nn.functional.adaptive_max_pool2d(
        levels[None].double(), (min(CELLS, levels.shape[0]), min(CELLS, levels.shape[1]))
    )
    return pooled[0].int()


def _panel(title: str, levels: Tensor, left: float) -> str:
    """Draw runs of cells of one shade as rectangles."""
    rows, columns = levels.shape
    height, width = SIDE / rows, SIDE / columns
    parts = [f'<text x="{left}" y="{TOP - 12}">{escape(title)}</text>']
    for row in range(rows):
        start = 0
        for column in range(1, columns + 1):
            if column < columns and levels[row, column] == levels[row, start]:
                continue
            if int(levels[row, start]):
                parts.append(
                    f'<rect class="s{int(levels[row, start])}" x="{left + start * width:.5g}" '
                    f'y="{TOP + row * height:.5g}" width="{(column - start) * width:.4g}" '
                    f'height="{height:.4g}"/>'
                )
            start = column
    parts.append(f'<rect class="frame" x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}"/>')
    return "\n".join(parts)


def _legend(top: float) -> str:
    parts = [f'<text x="{GAP}" y="{top}">error / RMS:</text>']
    for level, name in enumerate(NAMES):
        x_offset = GAP + 84 + level * 84
        parts.append(
            f'<rect class="s{level}" x="{x_offset}" y="{top - 10}" width="12" height="12"/>'
            f'<rect class="frame" x="{x_offset}" y="{top - 10}" width="12" height="12"/>'
            f'<text x="{x_offset + 16}" y="{top}">{escape(name)}</text>'
        )
    return "\n".join(parts)
