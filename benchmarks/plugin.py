"""What the plugin costs a pytest run that has nothing to do with it.

    python benchmarks/plugin.py [--rounds 15] [--most 1.3]

Runs one empty test in a new process, with the plugin and with an empty one, in turn, in a folder of
its own. Either is named by -p, for which pytest reads the entry points of all packages, as it does
in every run that loads plugins by itself.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def seconds(folder: Path, *options: str) -> float:
    """Return the processor time of one run, which other programs on the machine hardly move."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
        (folder / "empty.py").touch()
        plugin, empty = ("-p", "qgate.plugin"), ("-p", "empty")
        seconds(folder, *plugin)
        pairs = [(seconds(folder, *plugin), seconds(folder, *empty)) for _ in range(args.rounds)]
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
