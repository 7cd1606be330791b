"""What the page of a run costs: to make, to keep, and until it can be used.

    python benchmarks/report.py [--gates 2000] [--failing 60] [--plots worst] [--rounds 7]

The records are made up (two comparisons per gate, pictures of every kind). In use is a page once it
has answered: from the start of the navigation in headless Chromium to the count of rows after a
choice in its filter, which also has to come within a frame of the next one. Each round has a
browser context of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qgate.page.pages import page
from qgate.page.runs import read_run
from tests.browser import chromium
from tests.page.gate_records import write_results

_ANSWER = """() => new Promise(done => {
  const choice = document.querySelector('select[name=verdict]');
  const before = performance.now();
  choice.value = 'failed';
  choice.dispatchEvent(new Event('input', { bubbles: true }));
  const output = document.querySelector('output');
  new MutationObserver(() => requestAnimationFrame(() => setTimeout(
    () => done([performance.now(), performance.now() - before])))).observe(
      output, { childList: true, characterData: true, subtree: true });
})"""
_SORT = """() => new Promise(done => {
  const before = performance.now();
  [...document.querySelectorAll('#all-gates thead button')].pop().click();
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - before)));
})"""


def in_use(path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds per round: until all is loaded, until it has answered, a filter, a sorting."""
    times: dict[str, list[float]] = {"loaded": [], "in use": [], "filter": [], "sort": []}
    with chromium() as browser:
        for _ in range(rounds + 1):
            context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
            shown = context.new_page()
            shown.goto(path.as_uri(), wait_until="load")
            loaded = shown.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
            used, answer = shown.evaluate(_ANSWER)
            shown.click("form button[type=reset]")
            told = (loaded, used, answer, shown.evaluate(_SORT))
            for name, value in zip(times, told, strict=True):
                times[name].append(value / 1000)
            context.close()
    return {name: each[1:] for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gates", type=int, default=2000)
    parser.add_argument("--failing", type=int, default=60)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--plots", choices=("failed", "worst", "all", "none"), default="worst")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = write_results(
            folder / "results.jsonl", args.gates, failing=args.failing, layers=args.layers
        )
        made: dict[str, list[float]] = {"read": [], "make": []}
        for _ in range(3):
            start = time.perf_counter()
            run = read_run(results)
            between = time.perf_counter()
            html = page(run, plots=args.plots)
            made["read"].append(between - start)
            made["make"].append(time.perf_counter() - between)
        path = folder / "report.html"
        path.write_text(html, encoding="utf-8")
        times = in_use(path, args.rounds)
        print(
            f"{args.gates:,} gates, {args.failing} failing, plots {args.plots}: "
            f"{path.stat().st_size / 1e6:.2f} MB from {results.stat().st_size / 1e6:.1f} MB"
        )
    rows = [
        [name, statistics.median(each), min(each), max(each)]
        for name, each in {**made, **times}.items()
    ]
    print(tabulate(rows, headers=["seconds", "median", "least", "most"], floatfmt=".3f"))


if __name__ == "__main__":
    main()
