"""What pages of 2,000 gates, comparisons, tensors or layers cost in the browser.

    python benchmarks/pages.py [--count 2000] [--rounds 5]

Records are made up. Of each page in headless Chromium: megabytes, the processor time of its main
thread until it is loaded and drawn, which other programs hardly change, and seconds by Navigation
Timing, the least of all rounds: until it can be used (domInteractive: it is parsed and its scripts
ran) and until it is loaded; then until it is drawn, by the clock, the start of the tab included.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qgate.activation_stats.page import page as activations_page
from qgate.checkpoints.page import page as checkpoint_page
from qgate.drawing.page import page as dump_page
from qgate.engines.page import page as engines_page
from qgate.page.comparisons import ComparedRun, compare
from qgate.page.pages import page as gate_page
from qgate.page.reports import write_comparison
from qgate.page.runs import run_of_records
from qgate.sweeps.page import page as sweep_page
from tests.activation_stats import activation_records
from tests.browser import chromium
from tests.checkpoints import checkpoint_records
from tests.drawing import dump_records
from tests.engines import engine_records
from tests.page.gate_records import made_header, made_records, made_run
from tests.sweeps.test_page import entry

_DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def _repeated(records: list[Any], count: int, names: dict[str, str]) -> list[Any]:
    """Return so many records, the first ones again and again under other names."""
    return [
        {**records[n % len(records)], **{name: text.format(n) for name, text in names.items()}}
        for n in range(count)
    ]


def _compared(count: int) -> str:
    runs, sides = [], []
    for name, failing in (("a", 20), ("b", 60)):
        header, records = made_header(), list(made_records(count, failing=failing, layers=50))
        runs.append(run_of_records(header, records, name))
        sides.append(ComparedRun(name, header, records))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r.html")
        write_comparison(path, runs, compare(*sides), plots="none")
        return path.read_text(encoding="utf-8")


def _sweep(count: int) -> str:
    entries = [entry(number, sqnr_db=float(number)) for number in range(count)]
    return sweep_page(entries, [(each["tensor"], None) for each in entries], "", {})


def _dump(count: int) -> str:
    analysis: Any = dict(dump_records.normal_record())
    names = {"title": "L0 m.{} forward input", "module": "m.{}"}
    return dump_page({**analysis, "tensors": _repeated(analysis["tensors"], count, names)}, [], [])


def _activations(count: int) -> str:
    record: Any = dict(activation_records.usual())
    layers = _repeated(record["layers"], count, {"module": "model.layers.{}.mlp"})
    return activations_page({**record, "layers": layers}, [], [], {})


def _checkpoint(count: int) -> str:
    record = checkpoint_records.hostile()
    record.findings, record.notes, record.recipe = record.findings[:5], [], []
    record.weights = [
        dataclasses.replace(
            record.weights[n % len(record.weights)], name=f"layers.{n // 7}.w{n % 7}.weight",
            format="int8 per row", method="", matched="name",
        )
        for n in range(count)
    ]  # fmt: skip
    return checkpoint_page(record, [])


PAGES: dict[str, Callable[[int], str]] = {
    "gates": lambda count: gate_page(made_run(count, failing=60, layers=50)),
    "gates, all drawn": lambda count: gate_page(
        made_run(count, failing=60, layers=50), plots="all"
    ),
    "two runs": _compared,
    "sweep": _sweep,
    "dump": _dump,
    "activations": _activations,
    "checkpoint": _checkpoint,
    "engines": lambda _count: engines_page(engine_records.hostile(), []),
}


_TIMING = """() => {
  const timing = performance.getEntriesByType("navigation")[0];
  return [timing.domInteractive / 1000, timing.loadEventEnd / 1000];
}"""


def opening(browser: Browser, path: Path) -> tuple[float, float, float, float]:
    """Return processor seconds of the main thread, and seconds until usable, loaded and drawn."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True)
    page = context.new_page()
    tools = context.new_cdp_session(page)
    tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    start = time.perf_counter()
    page.goto(path.as_uri())
    page.evaluate(_DRAWN)
    seconds = time.perf_counter() - start
    metrics = tools.send("Performance.getMetrics")["metrics"]
    interactive, loaded = page.evaluate(_TIMING)
    context.close()
    busy = next(each["value"] for each in metrics if each["name"] == "TaskDuration")
    return busy, interactive, loaded, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for name, make in PAGES.items():
            path = Path(folder, "page.html")
            path.write_text(make(args.count), encoding="utf-8")
            times = [opening(browser, path) for _ in range(args.rounds)]
            busy, *seconds = zip(*times, strict=True)
            rows.append(
                [name, path.stat().st_size / 1e6, statistics.median(busy), *map(min, seconds)]
            )
    heads = ["page", "MB", "processor (s)", "usable (s)", "loaded (s)", "drawn (s)"]
    print(tabulate(rows, headers=heads, floatfmt=".2f"))


if __name__ == "__main__":
    main()
