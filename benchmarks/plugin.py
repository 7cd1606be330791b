"""What the plugin costs a pytest run that has nothing to do with it.

    python benchmarks/plugin.py [--rounds 15]

Runs one empty test in a new process, with the plugin and without, in turn, in a folder of its own.
Seconds are those of the processor, which other processes change less than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def seconds(folder: Path, *options: str) -> float:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    start = children_seconds()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return children_seconds() - start


def children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_it.py").write_text("def test_it(): pass\n")
        seconds(folder)
        pairs = [
            (seconds(folder), seconds(folder, "-p", "no:qgate.plugin")) for _ in range(args.rounds)
        ]
    more = [1000 * (with_ - without) for with_, without in pairs]
    with_, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"with the plugin {with_:.3f} s, without {without:.3f} s (medians of {args.rounds})")
    print(f"more per pair: median {statistics.median(more):.0f} ms, least {min(more):.0f} ms")


if __name__ == "__main__":
    main()
