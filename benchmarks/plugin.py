"""What the plugin costs a pytest run that has nothing to do with it.

    python benchmarks/plugin.py [--rounds 15] [--most 1.3]

Runs one empty test in a new process, with the plugin and without, in turn, in a folder of its own,
and without any other plugin.
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
    """Return the processor time of one run, which other programs on the machine hardly move."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--most", type=float, help="exit with 1 if the ratio is larger")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_it.py").write_text("def test_it(): pass\n")
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        plugin = ("-p", "qgate.plugin")
        seconds(folder, *plugin)
        pairs = [(seconds(folder, *plugin), seconds(folder)) for _ in range(args.rounds)]
    more = [1000 * (with_ - without) for with_, without in pairs]
    with_, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"processor time with the plugin {with_:.3f} s, without {without:.3f} s (medians of "
        f"{args.rounds}): {with_ / without:.2f} times"
    )
    print(f"more per pair: median {statistics.median(more):.0f} ms, least {min(more):.0f} ms")
    sys.exit(args.most is not None and with_ / without > args.most)


if __name__ == "__main__":
    main()
