"""Clean runs, each of one mode of one model, in every way that must not matter: none may be red.

  python -m tests.campaigns.clean_runs --count 1000 --log clean.jsonl
  python -m tests.campaigns.clean_runs --served --count 200 --log served.jsonl
  python -m tests.campaigns.clean_runs --python /path/to/other/bin/python

Each run draws its mode, the number of threads, the instructions that torch and its libraries may use,
the kernels (sums in parts, last bits, eager attention, numbers below the normal ones flushed, other
batches), the order of the tests and the number of processes. What is in the log is not run again.
With --served the modes are those of caches, attention and experts, half of them with the relations;
from run 55 on also those of weights as served and of states. Modes whose scales are made of the
whole batch have no relations.
The last table has, by kind of limit, how near a clean run came to it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
# What other processors would compute with; MKL and oneDNN choose by themselves otherwise.
INSTRUCTIONS = {
    "own": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "sse4.2": {
        "ATEN_CPU_CAPABILITY": "default",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "reproducible": {"MKL_CBWR": "COMPATIBLE"},
}
ARITHMETIC = ("own", "split-sums", "last-bits", "eager-attention", "flushed", "batches-of-3")
OF_MODES = ("canary", "gradients", "layer_outputs", "outputs", "reference", "task")
OF_MODELS = ("activations", "overflow", "scaling")
# Modes of what serving quantizes beside weights and inputs, which "all" leaves out.
RELATIONS = ("relations",)
# By the number of the first run that draws from them: runs that are recorded stay what they were.
SERVED = {
    0: {"tiny-llama": "kv-*,attn-*", "tiny-moe": "experts-mxfp4,experts-fp8"},
    55: {
        "tiny-llama": "kv-*,attn-*,served-*",
        "tiny-moe": "experts-*",
        "tiny-mamba": "state-*",
    },
}
ALL = {0: {"tiny-llama": "all", "tiny-mamba": "all"}}
# Their scales are made of the whole batch, so that the relations are red by design.
_MADE_OF_BATCH = ("served-nvfp4", "experts-nvfp4")
Tables = dict[int, dict[str, list[str]]]
_SHOWN = 3000


@dataclass(frozen=True)
class Way:
    """How one run is made; it follows from its number and the seed."""

    number: int
    model: str
    mode: str
    suites: tuple[str, ...]
    threads: int
    instructions: str
    arithmetic: str
    processes: int
    order: int

    @classmethod
    def drawn(cls, number: int, seed: int, tables: Tables, served: bool = False) -> Way:
        draw = random.Random(f"{seed}/{number}")
        modes = tables[max(first for first in tables if first <= number)]
        model = draw.choice(list(modes))
        mode = draw.choice(modes[model])
        kinds = [k for k in ARITHMETIC if k != "eager-attention" or model != "tiny-mamba"]
        # What is measured of a model is the same in all of its modes.
        more, share = (RELATIONS, 0.5) if served else (OF_MODELS, 0.2)
        is_longer = draw.random() < share and not mode.startswith(_MADE_OF_BATCH)
        suites = OF_MODES + (more if is_longer else ())
        # The other process of a relation has no plugin with other kernels.
        kinds = ["own"] if suites[-1:] == RELATIONS else kinds
        return cls(
            number,
            model,
            mode,
            suites,
            draw.choice((1, 1, 2, 3)),
            draw.choice(list(INSTRUCTIONS)),
            draw.choice(kinds),
            draw.choice((0, 0, 0, 0, 2)),
            draw.randrange(10**6),
        )

    def command(self, python: str) -> list[str]:
        files = [f"suites/test_{name}.py" for name in self.suites]
        spread = ["-n", str(self.processes), "--dist", "loadfile"] if self.processes else []
        plugins = ["-p", "tests.campaigns.other_arithmetic", "-p", "no:cacheprovider"]
        chosen = ["--model", self.model, "--mode", self.mode, "--plots", "none", "--no-report"]
        return [python, "-m", "pytest", *files, "-q", *plugins, *chosen, *spread]

    def environment(self) -> dict[str, str]:
        count, order = str(self.threads), str(self.order)
        variables = {
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "OMP_WAIT_POLICY": "PASSIVE",
            "QGATE_TEST_ORDER": order,
            "QGATE_TEST_ARITHMETIC": self.arithmetic,
            "PYTHONHASHSEED": order,
            "PYTHONPATH": str(ROOT),
        }
        outer = {name: value for name, value in os.environ.items() if name != "CI"}
        return {**outer, **INSTRUCTIONS[self.instructions], **variables}

    def words(self) -> str:
        """Return what is drawn, in the fewest words."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        spread = f", -n {self.processes}" if self.processes else ""
        return (
            f"{self.model} {self.mode}, {self.arithmetic}, {self.instructions}, {threads}{spread}"
        )


def made(way: Way, python: str) -> dict[str, Any]:
    """Make a run in a folder that has the suites and the baselines, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="clean-") as folder:
        home = Path(folder)
        for name in ("conftest.py", "suites", "baselines", "pyproject.toml"):
            (home / name).symlink_to(ROOT / name)
        started = time.monotonic()
        done = subprocess.run(
            way.command(python),
            cwd=home,
            env=way.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = round(time.monotonic() - started, 1)
        results = home / "qgate-out" / "results.jsonl"
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    records = [json.loads(line) for line in lines]
    text = f"{done.stdout[-_SHOWN:]}\n{done.stderr[-_SHOWN:]}" if done.returncode else ""
    if not any("checks" in record for record in records):
        text = f"no results were left\n{text}"
    run = {"way": asdict(way), "status": done.returncode, "text": text, "seconds": seconds}
    return {**run, "nearest": nearest(records)}


def nearest(records: list[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """Return by suite, scope, kind and metric how near the nearest check came to its limit."""
    closest: dict[str, tuple[float, str]] = {}
    for record in records:
        for check in record.get("checks", []):
            kind = " ".join((record["suite"], check["scope"], check["kind"], check["metric"]))
            times = check["times"]
            if isinstance(times, float) and times >= closest.get(kind, (0.0, ""))[0]:
                closest[kind] = (times, f"{record['model']} {record['mode']} {check['site']}")
    return closest


def earlier(
    log: Path | None, seed: int, tables: Tables, served: bool = False
) -> dict[int, dict[str, Any]]:
    """Read the runs of a log that were drawn in the same way; a line cut off is left out."""
    runs = {}
    lines = log.read_text(encoding="utf-8").splitlines() if log and log.exists() else []
    for line in lines:
        try:
            run = json.loads(line)
        except json.JSONDecodeError:
            continue
        way = Way.drawn(run["way"]["number"], seed, tables, served)
        if json.loads(json.dumps(asdict(way))) == run["way"]:
            runs[way.number] = run
    return runs


def all_modes(served: bool) -> Tables:
    """Return the modes of each model that have accepted errors, by the first run to draw them."""
    from qgate.models import load
    from qgate.modes.setups import ModelSetup

    return {
        first: {
            model: [
                mode.name
                for mode in ModelSetup(model).select(query, load(model))
                if (ROOT / "baselines" / model / "accepted" / f"{mode.name}.txt").is_file()
            ]
            for model, query in queries.items()
        }
        for first, queries in (SERVED if served else ALL).items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.clean_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=1000, metavar="N")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="number of the first run")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--served", action="store_true", help="caches, attention, experts, states")
    parser.add_argument("--python", default=sys.executable, metavar="PATH")
    parser.add_argument("--log", type=Path, metavar="FILE", help="runs, a line each; resumes")
    args = parser.parse_args()
    tables = all_modes(args.served)
    runs = earlier(args.log, args.seed, tables, args.served)
    numbers = range(args.first, args.first + args.count)
    for number in numbers:
        if number in runs:
            continue
        way = Way.drawn(number, args.seed, tables, args.served)
        runs[number] = run = made(way, args.python)
        if args.log:
            with args.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(run) + "\n")
        mark = f"RED ({run['status']})" if run["text"] else "green"
        print(f"{number}/{numbers[-1]} {mark}  {run['seconds']:.1f} s  {way.words()}", flush=True)
    runs = {number: runs[number] for number in numbers}
    closest: dict[str, tuple[float, str]] = {}
    for run in runs.values():
        for kind, pair in run["nearest"].items():
            closest[kind] = max(closest.get(kind, (0.0, "")), tuple(pair))
    rows = [[*kind.split(" ", 3), times, where] for kind, (times, where) in sorted(closest.items())]
    heads = ["suite", "scope", "limit", "metric", "of the limit", "where"]
    print(tabulate(rows, headers=heads, floatfmt=".2g"))
    counts = Counter(
        (run["way"]["arithmetic"], run["way"]["instructions"]) for run in runs.values()
    )
    print(tabulate([[*names, count] for names, count in sorted(counts.items())]))
    red = [run for run in runs.values() if run["text"]]
    for run in red:
        print(json.dumps(run["way"]), run["text"], sep="\n")
    print(f"{len(runs)} clean runs, {len(red)} red, seed {args.seed}")
    return bool(red)


if __name__ == "__main__":
    raise SystemExit(main())
