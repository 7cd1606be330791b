"""What results of many gates cost: CPU time and peak memory of a report, a merge and a comparison.

    python benchmarks/results.py [--gates 50000]

The records are made up, two comparisons per gate. Each command runs in a process of its own; CPU
time is that of the process, so other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.page.gate_records import write_results

COMMANDS = {
    "report": ("a", "--output", "report.html"),
    "comparison": ("a", "b", "--output", "comparison.html"),
    "merge": ("a", "--merge", "merged"),
}


def measured(arguments: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Return CPU seconds and MB at the peak of one `qgate report`."""
    command = [sys.executable, "-m", "qgate", "report", *arguments]
    environment = {**os.environ, "PYTHONPATH": sys.path[0]}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gates", type=int, default=50_000)
    gates = parser.parse_args().gates
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in ("a", "b"):
            (folder / run).mkdir()
            write_results(folder / run / "results.jsonl", gates, failing=60)
        rows = [(of, *measured(arguments, folder)) for of, arguments in COMMANDS.items()]
    print(tabulate(rows, [f"{gates:,} gates", "CPU s", "peak MB"], floatfmt=".0f"))


if __name__ == "__main__":
    main()
