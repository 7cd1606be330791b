"""Runs that last: ten thousand gates in one session of pytest, a hundred thousand records of a dump.

Time and memory are taken at every tenth of the way; both per gate and per record have to stay what
they were at the beginning, and the report has to open in a browser.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

from tests.campaigns.cases import Benches, Progress, Tally
from tests.campaigns.scenarios import MODEL, ROOT

# What is most for "flat": the last three tenths against the first three after the start.
MOST_TIMES, MOST_BYTES_TIMES = 1.5, 1.5
_PARTS = 10
RECORDS_PER_GATE = 10

_SUITE = """
import pytest
import torch
import qgate
from qgate.gate.measuring.pictures import error_picture
from qgate.gate import Measured

def made(case):
    random = torch.Generator().manual_seed(case)
    x = torch.randn(32, 64, generator=random)
    y = qgate.quantize(x, "int8")
    values = qgate.stats.errors(y, x).metrics()
    return [
        Measured(site=f"layers.{case}:{kind}", layer=f"layers.{case}", scope="forward", order=case,
                 nonfinite=0, values=values, pictures=(error_picture([(y, x)]),))
        for kind in ("input", "output")
    ]

@pytest.mark.parametrize("case", range(GATES))
def test_case(gate, mode, case):
    gate(made(case), mode)
"""
_CONFTEST = """
import time
from pathlib import Path

GATES, BEGUN, SEEN = {gates}, time.monotonic(), [0]

def pytest_runtest_logreport(report):
    if report.when != "call":
        return
    SEEN[0] += 1
    if SEEN[0] % (GATES // {parts}) == 0:
        status = Path("/proc/self/status").read_text()
        kilobytes = int(status.partition("VmRSS:")[2].split()[0])
        with open("figures", "a") as file:
            file.write(f"{{SEEN[0]}} {{time.monotonic() - BEGUN:.3f}} {{kilobytes}}\\n")
"""
_MEASURED = """
import resource, sys
from qgate.cli import main
status = main(sys.argv[1:])
print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
sys.exit(status)
"""


def campaign(benches: Benches, _: list[str], count: int, say: Progress) -> list[Tally]:
    return [
        *_gates(benches.home / "gates", count, say),
        _records(benches.home / "records", RECORDS_PER_GATE * count, say),
    ]


def _gates(folder: Path, count: int, say: Progress) -> list[Tally]:
    (folder / "suites").mkdir(parents=True)
    (folder / "suites" / "test_long.py").write_text(_SUITE.replace("GATES", str(count)))
    (folder / "own.py").write_text(MODEL)
    (folder / "seed").write_text("0")
    (folder / "conftest.py").write_text(_CONFTEST.format(gates=count, parts=_PARTS))
    (folder / "pyproject.toml").write_text("[tool.qgate]\n")
    tallies = []
    for label, more in (("update", ["--update-baselines"]), ("gates", [])):
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "suites", "--model", "own:build", "--mode",
                   "int8", "-q", "-p", "no:cacheprovider", "--tb=no", *more]  # fmt: skip
        done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True,
                              text=True, check=False)  # fmt: skip
        say(f"{label}: {time.monotonic() - begun:.0f} s, {(done.stdout.splitlines() or [''])[-1]}")
        tally = Tally(f"{label} of {count} gates", cases=count)
        figures = folder / "figures"
        tally.failures += _judged(figures, "gates", say)
        figures.unlink(missing_ok=True)
        page = folder / "qgate-out" / "report.html"
        tally.failures += _opened(page, say) if page.exists() else [done.stdout[-2000:]]
        tallies.append(tally)
    return tallies


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def _judged(figures: Path, what: str, say: Progress) -> list[str]:
    """Whether the last parts cost what the first ones did; the figures are said."""
    lines = figures.read_text().splitlines() if figures.exists() else []
    rows = [[float(word) for word in line.split()] for line in lines]
    if len(rows) < _PARTS:
        return [f"only {len(rows)} of {_PARTS} parts were reached"]
    table_rows = []
    for before, now in zip([[0.0, 0.0, 0.0], *rows], rows, strict=False):
        span = now[0] - before[0]
        grown = (now[2] - before[2]) / span if before[2] else float("nan")
        table_rows.append([int(now[0]), 1e3 * (now[1] - before[1]) / span, now[2] / 1024, grown])
    headers = [what, "ms each", "MB", "KB more each"]
    say("\n" + tabulate(table_rows, headers=headers, floatfmt=("", ".2f", ".0f", ".2f")))
    problems = []
    for column, most, unit in ((1, MOST_TIMES, "ms"), (3, MOST_BYTES_TIMES, "KB")):
        early = sum(row[column] for row in table_rows[1:4]) / 3
        late = sum(row[column] for row in table_rows[-3:]) / 3
        if late > most * max(early, 0.2):
            problems.append(
                f"{unit} per {what[:-1]} grow: {early:.2f} at first, {late:.2f} at last"
            )
    return problems


def _opened(page: Path, say: Progress) -> list[str]:
    from tests.browser import chromium, opened

    begun = time.monotonic()
    with chromium() as browser:
        started = time.monotonic()
        with opened(browser, page) as view:
            title = view.page.title()
            rows = view.page.locator("tr").count()
            seconds = time.monotonic() - started
            complaints = list(view.complaints)
    say(f"{page.name}: {page.stat().st_size / 1e6:.1f} MB, {rows} rows, opened in {seconds:.1f} s "
        f"(browser {started - begun:.1f} s), title {title!r}")  # fmt: skip
    return [f"{page}: {text}" for text in complaints] + ([] if title else [f"{page} has no title"])


def _records(folder: Path, count: int, say: Progress) -> Tally:
    """Collected from a training that goes on and on; then checked and drawn."""
    import torch

    import qgate
    from tests.collecting.collected import network, train

    folder.mkdir(parents=True)
    figures = folder / "figures"
    per_step = 69
    steps = -(-count // per_step)
    model = network()
    torch.set_num_threads(1)
    begun = time.monotonic()
    with qgate.collect(model, folder / "dump", iterations=steps):
        for part in range(_PARTS):
            train(model, steps * (part + 1) // _PARTS - steps * part // _PARTS)
            now = Path("/proc/self/status").read_text()
            kilobytes = int(now.partition("VmRSS:")[2].split()[0])
            reached = per_step * (steps * (part + 1) // _PARTS)
            with figures.open("a") as file:
                file.write(f"{reached} {time.monotonic() - begun:.3f} {kilobytes}\n")
    tally = Tally(f"a dump of {per_step * steps} records", cases=per_step * steps)
    tally.failures += _judged(figures, "records", say)
    for words in (("dumps", "verify", "dump"), ("dumps", "draw", "dump", "--no-plots")):
        begun = time.monotonic()
        done = subprocess.run([sys.executable, "-c", _MEASURED, *words], cwd=folder, text=True,
                              env=_environment(), capture_output=True, check=False)  # fmt: skip
        output_end = done.stdout.strip()[-160:]
        say(f"qgate {' '.join(words)}: {time.monotonic() - begun:.1f} s, {output_end}")
        if done.returncode:
            tally.failures.append(f"{words}: {done.stdout[-300:]}{done.stderr[-500:]}")
    tally.failures += _opened(folder / "draw" / "index.html", say)
    return tally
