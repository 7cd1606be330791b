"""The plots of gates inside the page, within a budget of bytes: a page has to open everywhere.

What does not fit is not drawn at all, and the page says so and how to get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qgate.charts.page_parts import drawing, figures
from qgate.page.plots.growth import error_growth
from qgate.page.plots.panels import panels_of
from qgate.page.plots.svg import LIGHT
from qgate.page.plots.svg import STYLE as COLORS
from qgate.page.runs import Growth, RecordedGate
from qgate.results.pictures import Plots
from qgate.text import for_html as text
from qgate.text import shortened

BUDGET = 5_500_000
_WIDE = 640.0
# What is shown of gates that passed.
_SMALL = ("error_histogram", "density", "sweep", "magnitudes")
STYLE = """
.panels { display: grid; gap: 12px; margin: 10px 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); }
.panels figure { padding: 6px; background: var(--paper); }
.panels svg.plot { width: 100%; max-width: 460px; }
figure.growth { max-width: 900px; background: var(--paper); overflow-x: auto; margin: 0 0 12px; }
figure.growth svg.plot { width: 100%; max-width: none; min-width: 520px; }
.near .panels { grid-template-columns: repeat(auto-fit, minmax(min(100%, 230px), 1fr));
  margin: 4px 0 14px; }
.near .panels svg.plot { max-width: 320px; }
@media print { .panels, .near .panels { grid-template-columns: repeat(4, 1fr); gap: 6px; } }
"""


@dataclass
class Panels:
    """Draws what is wanted while the budget lasts; `problems` are what could not be drawn."""

    plots: Plots
    left: int
    problems: list[str] = field(default_factory=list)
    left_out: int = 0

    def of_gate(self, gate: RecordedGate, *, small: bool = False) -> str:
        """The panels of a gate's worst comparison, or why there are none; `small` are a few."""
        if self.plots == "none":
            return ""
        if not gate.record.get("pictures"):
            return ""
        if self.left <= 0:
            self.left_out += 1
            return (
                "<p class='about'>Its plots were left out, since the page is full of those of "
                "worse gates. Run the gate alone for a page with its plots.</p>"
            )
        shown = self._drawn(gate, small)
        size = sum(len(each.encode()) for each in shown)
        if size > self.left:
            # Nothing is drawn any more: what follows is less bad, and drawing takes time.
            self.left = 0
            return self.of_gate(gate, small=small)
        self.left -= size
        return figures(shown, "panels")

    def _drawn(self, gate: RecordedGate, small: bool) -> list[str]:
        try:
            panels, problems = panels_of(gate.record)
        # A record of a stranger may hold anything; a plot less is no reason to have no page.
        except Exception as error:
            self.problems.append(f"{gate.node}: {type(error).__name__}: {error}")
            return []
        self.problems += [f"{gate.node}: {problem}" for problem in problems]
        if small:
            panels = [panel for panel in panels if panel.kind in _SMALL]
        return [drawing(panel.svg, panel.kind) for panel in panels]

    def growth(self, lines: Sequence[Growth]) -> str:
        """The error over depth, a plot per model with all its modes; made of numbers that every
        run has, it is drawn where no pictures are wanted too."""
        shown = []
        for model in dict.fromkeys(line.model for line in lines):
            try:
                svg = error_growth([line for line in lines if line.model == model], width=_WIDE)
            except Exception as error:
                self.problems.append(f"error over depth: {type(error).__name__}: {error}")
                continue
            self.left -= len(svg.encode())
            name = f"<figcaption>{text(shortened(model, 90))}</figcaption>"
            shown.append(
                "<figure class='growth' tabindex='0' role='group' aria-label='error over depth'>"
                f"{name}{svg}</figure>"
            )
        return "\n".join(shown)

    def style(self) -> str:
        """The colors of plots, in light, in dark and on paper."""
        return f"{COLORS}@media print{{.plot{{{LIGHT}}}}}"

    def told(self) -> str:
        """What could not be drawn, for the notes of the page."""
        shown = [f"<li>Not drawn: {text(problem)}</li>" for problem in self.problems[:20]]
        more = len(self.problems) - len(shown)
        return "".join(shown) + (f"<li>{more:,} more could not be drawn.</li>" if more else "")
