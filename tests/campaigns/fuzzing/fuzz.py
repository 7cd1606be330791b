"""The long runs, by hand: python -m tests.campaigns.fuzzing.fuzz [--cases N] [--seed N] [TARGET ...].

With `--coverage` choices are steered by atheris (pip install atheris), which sees which lines of the
house they reach. What is found is printed as the target and the choices in hexadecimal, shortened.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.campaigns.fuzzing.target import Target, run_case, warmed

QGATE = Path(__file__).parents[3] / "qgate"
MEMORY = Path("/dev/shm")  # where a folder goes at once: on a disk that takes half of the time
# Imported before lines are counted: none of them reads a file.
BEFORE = ("qgate._version", "qgate.errors", "qgate.plugin.plain_imports")


def shortened(target: Target, data: bytes, wrong: str, folder: Path) -> bytes:
    """Fewer and smaller choices that come to the same."""
    kind = wrong.split(" ")[0]

    def same(candidate: bytes) -> bool:
        return run_case(target, candidate, folder).wrong.split(" ")[0] == kind

    for step in (16, 8, 4, 2, 1):
        while len(data) > step and same(data[:-step]):
            data = data[:-step]
    for at in range(len(data)):
        smaller = data[:at] + b"\0" + data[at + 1 :]
        if data[at] and same(smaller):
            data = smaller
    return data


def run(target: Target, cases: int, seed: int, folder: Path) -> dict[str, bytes]:
    """What was found, by what is wrong."""
    random_ = random.Random(f"{seed} {target.name}")
    warmed(target)
    failures: dict[str, bytes] = {}
    refused = collections.Counter[str]()
    begin = time.monotonic()
    for _ in range(cases):
        data = random_.randbytes(random_.choice((4, 8, 12, 24, 64)))
        outcome = run_case(target, data, folder)
        refused[outcome.said.partition(":")[0] or "read"] += 1
        kind = outcome.wrong
        if kind and not any(_alike(kind, failure) for failure in failures):
            failures[kind] = shortened(target, data, kind, folder) if "took" not in kind else data
            print(f"FOUND {target.name!r} {failures[kind].hex()}\n      {kind}", flush=True)
    spent = time.monotonic() - begin
    counts = ", ".join(f"{word} {count}" for word, count in refused.most_common())
    print(
        f"{target.name}: {cases} cases in {spent:.1f} s ({counts}), {len(failures)} found",
        flush=True,
    )
    return failures


def _alike(one: str, other: str) -> bool:
    return one.split(":")[0] == other.split(":")[0] and one.split(": ")[-1] == other.split(": ")[-1]


def steer(target: Target, cases: int, seed: int, folder: Path) -> int:
    """The same with atheris, in a process of its own, which it ends; the exit status of that."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        _steer_here(target, cases, seed, folder)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # atheris ends the process; the folder is its parent's


def _steer_here(target: Target, cases: int, seed: int, folder: Path) -> None:
    import atheris

    warmed(target)
    if unseen := unseen_modules():
        raise AssertionError(f"cases are not steered by what they reach in {', '.join(unseen)}")
    failures: list[str] = []
    begin = time.monotonic()
    count = refused = 0

    def one(data: bytes) -> None:
        nonlocal count, refused
        count += 1
        outcome = run_case(target, data, folder)
        refused += bool(outcome.said)
        if outcome.wrong and not any(_alike(outcome.wrong, failure) for failure in failures):
            failures.append(outcome.wrong)
            print(f"FOUND {target.name!r} {data.hex()}\n      {outcome.wrong}", flush=True)
        if count == cases:
            spent = time.monotonic() - begin
            print(f"{target.name}: {cases} cases in {spent:.1f} s, {refused} refused, "
                  f"{len(failures)} found", flush=True)  # fmt: skip

    options = (
        f"-runs={cases}",
        f"-seed={seed + 1}",
        "-max_len=64",
        "-len_control=0",
        "-verbosity=0",
        "-print_final_stats=1",
    )
    atheris.Setup([sys.argv[0], *options, "-rss_limit_mb=0", "-timeout=60"], one)
    atheris.Fuzz()


def instrument_imports() -> None:
    """Count what is reached in qgate, for good: much of it is imported where it is first used."""
    import atheris

    # qgate's own finder comes first in line when it is imported, and would hide all after it.
    name = "qgate.plugin.plain_imports"
    spec = importlib.util.spec_from_file_location(name, QGATE / "plugin" / "plain_imports.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    atheris.instrument_imports(include=["qgate"]).__enter__()


def unseen_modules() -> list[str]:
    """List modules of qgate that were imported without their lines being counted."""
    return sorted(
        name
        for name, module in sys.modules.items()
        if name.startswith("qgate.")
        and name not in BEFORE
        and module.__file__ is not None  # a folder without code of its own
        and not type(module.__loader__).__module__.startswith("atheris")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", action="store_true")
    args = parser.parse_args()
    if args.coverage:
        instrument_imports()
    from tests.campaigns.fuzzing.table import TARGETS

    if odd := [name for name in args.targets if name not in TARGETS]:
        parser.error(f"no target {odd[0]!r}; there are {', '.join(TARGETS)}")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        os.chdir(folder)
        for name in args.targets or TARGETS:
            if args.coverage:
                if steer(TARGETS[name], args.cases, args.seed, Path(folder)):
                    return 1
            else:
                run(TARGETS[name], args.cases, args.seed, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
