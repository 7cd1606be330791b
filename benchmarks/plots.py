"""What pictures cost: every registered one of sweeps, dumps and activations, drawn into a PNG.

    python benchmarks/plots.py [--rounds 3] [--most 12] [--only TEXT]

The records are made up in the size of real ones. A panel is one pair of axes with data; bars of
colors and boxes of text are none. The time is that of the processor, for building, laying out and
writing, since what else runs on a shared machine would count otherwise; the least
of the rounds counts, the first drawing of each family warms up fonts and caches and is shown apart.
The budget is 0.1 s per panel in the mean.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BUDGET = 0.1
_ASIDE = """
import sys
from qgate.cli import main
assert main(["sweep", sys.argv[1], "--no-plots", "--quiet", "--output-dir", sys.argv[2]]) == 0
print(len([name for name in sys.modules if name.split(".")[0] == "matplotlib"]))
"""


@dataclass
class Cost:
    """Of one picture, in seconds."""

    name: str
    panels: int
    seconds: float
    kilobytes: float

    @property
    def per_panel(self) -> float:
        return self.seconds / max(self.panels, 1)


def jobs() -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Name and what draws it; what draws returns the figure, or None where there is nothing."""
    from qgate.activation_stats.plots.pictures import pictures
    from qgate.activation_stats.settings import ViewSettings
    from qgate.charts.sheet import DPI
    from qgate.drawing.plots.pictures import PICTURES
    from qgate.sweeps.plots import PICTURES as SWEEPS
    from tests.activation_stats import activation_records
    from tests.drawing import dump_records
    from tests.sweeps import sweep_records

    for record in sweep_records.realistic():
        for each in SWEEPS:
            if each.kind == record["kind"]:
                yield f"sweeps/{each.stem}", _drawing(each.draw, record, DPI)
    for size, record in (
        ("4 layers", dump_records.normal_record()),
        ("100 layers", dump_records.many_tensors()),
    ):
        for each in PICTURES:
            yield f"dumps/{each.path} ({size})", _drawing(each.draw, record, DPI)
    for size, record in (
        ("5 layers", activation_records.usual()),
        ("80 layers", activation_records.large()),
    ):
        look = ViewSettings()
        for each in pictures(record, look):

            def draw(path: Path, each: Any = each, look: ViewSettings = look) -> Any:
                sheet = each.sheet()
                if sheet is not None:
                    each.write(sheet, [path], dpi=look.dpi, page=True)
                return sheet and sheet.figure

            yield f"activations/{each.name} ({size})", draw


def _drawing(draw: Any, record: Any, dpi: int) -> Callable[[Path], Any]:
    from qgate.charts.figure import save

    def drawn(path: Path) -> Any:
        with np.errstate(all="ignore"):
            sheet = draw.build(record)
        if sheet is not None:
            save(sheet.figure, path, dpi=dpi)
        return sheet and sheet.figure

    return drawn


def panels_of(figure: Any) -> int:
    return sum(1 for a in figure.axes if a.has_data() and a.get_label() != "<colorbar>")


def measure(rounds: int, only: str) -> tuple[list[Cost], float]:
    """All pictures there are something to draw for, and what the first of all took."""
    costs, first = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.png"
        for name, draw in jobs():
            if only not in name:
                continue
            times, figure = [], None
            for _ in range(rounds + (not costs)):
                start = time.process_time()
                figure = draw(path)
                times.append(time.process_time() - start)
            if figure is not None:
                first = first or times[0]
                costs.append(Cost(name, panels_of(figure), min(times), path.stat().st_size / 1000))
    return costs, first


def not_wanted() -> int:
    """How many modules of matplotlib a sweep without plots loads."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.save(torch.randn(64, 64), Path(folder) / "x.pt")
        done = subprocess.run(
            [sys.executable, "-c", _ASIDE, f"{folder}/x.pt", f"{folder}/out"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=12, help="so many of the slowest are named")
    parser.add_argument("--only", default="", help="pictures with this in their names")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    costs, first = measure(args.rounds, args.only)
    rows = []
    for family in ("sweeps", "dumps", "activations", ""):
        mine = [each for each in costs if each.name.startswith(family)]
        if not mine:
            continue
        panels = sum(each.panels for each in mine)
        worst = max(mine, key=lambda each: each.per_panel)
        rows.append(
            [
                family or "all",
                len(mine),
                panels,
                1000 * sum(each.seconds for each in mine) / panels,
                1000 * worst.per_panel,
                1000 * statistics.mean(each.seconds for each in mine),
                1000 * max(each.seconds for each in mine),
                statistics.mean(each.kilobytes for each in mine),
            ]
        )
    head = ["", "pictures", "panels", "ms/panel", "worst", "ms/picture", "worst", "kB"]
    print(tabulate(rows, headers=head, floatfmt=".0f"))
    print()
    slow = sorted(costs, key=lambda each: -each.per_panel)[: args.most]
    table = [[e.name, e.panels, 1000 * e.per_panel, 1000 * e.seconds] for e in slow]
    print(tabulate(table, headers=["slowest", "panels", "ms/panel", "ms"], floatfmt=".0f"))
    mean = sum(each.seconds for each in costs) / sum(each.panels for each in costs)
    print(f"\nmean {mean:.3f} s per panel, {BUDGET:g} s allowed: {_verdict(mean <= BUDGET)}")
    print(f"the first picture of a process: {first:.2f} s; modules of matplotlib that a sweep")
    loaded = not_wanted()
    print(f"without plots loads: {loaded}: {_verdict(loaded == 0)}")


def _verdict(held: bool) -> str:
    return "held" if held else "NOT HELD"


if __name__ == "__main__":
    main()
