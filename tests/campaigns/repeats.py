"""Runs of qgate's own tests beside processes that are always busy: which tests are red at times.

  python -m tests.campaigns.repeats --count 100            every file that starts processes, waits or serves
  python -m tests.campaigns.repeats --count 5 --whole      all tests
  python -m tests.campaigns.repeats --count 20 tests/engine/test_running.py

Each run draws a share of its own of the cases that take long. Exit status: 0 if no test was red.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from qgate.text.wording import counted
from tests.campaigns.scenarios import ROOT

# What the tests of a file use if they start processes or threads, wait for others, or ask a server.
_DELICATE = re.compile(
    r"\b(subprocess|multiprocessing|threading|socket|ray|os\.fork|os\.kill|time\.sleep|run_python"
    r"|run_qgate|jobs|bucket|server|Workers|runpytest)\b|https?://(localhost|127)"
)


def delicate_files() -> list[str]:
    """Return the files of tests that start processes or threads, wait, or touch a network."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        path.relative_to(ROOT).as_posix()
        for path in paths
        if _DELICATE.search(path.read_text(encoding="utf-8"))
    ]


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processors busy with nothing."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def red_tests(paths: Sequence[str], seed: str) -> list[str]:
    """Run the tests once, with two workers, and return the names of those that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-n", "2", "--dist", "loadfile", "--case-seed", seed, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    red = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not red:
        red = [f"status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"]
    if red:
        print(done.stdout.partition(" FAILURES ")[2][:20_000], file=sys.stderr)
    return red


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.repeats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="FILE")
    parser.add_argument("--whole", action="store_true", help="all tests and suites")
    parser.add_argument("--count", type=int, default=5, metavar="N", help="runs (5)")
    parser.add_argument("--beside", type=int, default=2, metavar="N", help="busy processes (2)")
    parser.add_argument("--seed", default="repeats", metavar="TEXT", help="of the shares")
    args = parser.parse_args(arguments)
    paths = args.paths or ([] if args.whole else delicate_files())
    print(counted(len(paths), "file") if paths else "all files", flush=True)
    red: Counter[str] = Counter()
    with busy(args.beside):
        for number in range(1, args.count + 1):
            begun = time.monotonic()
            failed = red_tests(paths, f"{args.seed}-{number}")
            red.update(failed)
            seconds = time.monotonic() - begun
            print(f"run {number} of {args.count}: {seconds:.0f} s, {len(failed)} red", flush=True)
    for name, times in red.most_common():
        print(f"red {times} of {args.count} times: {name}")
    return bool(red)


if __name__ == "__main__":
    sys.exit(main())
