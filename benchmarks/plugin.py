"""What the plugin costs a pytest run that has nothing to do with it.

    python benchmarks/plugin.py [--rounds 15]

Runs one empty test in a new process, with the plugin and without, in turn, in a folder of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(folder: Path, *options: str) -> float:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


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
