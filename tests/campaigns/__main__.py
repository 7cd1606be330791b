"""Faults on purpose, and what they leave.

  python -m tests.campaigns kills --count 1000 --seed 1
  python -m tests.campaigns kills --only update,sweep --count 200
  python -m tests.campaigns disk --count 480

Every case is a real verb in a folder of its own that is disturbed, judged by the bytes that are
there, and followed by the same verb once more. Exit status: 0 if no case failed, 1 if one did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # children cannot use the threads of their parent

os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
os.environ["QGATE_ALLOW_CI_UPDATE"] = "1"  # baselines of a folder that is thrown away
sys.dont_write_bytecode = True
CAMPAIGNS = (
    "bytes", "each", "kills", "starts", "disk", "closed", "pairs", "clocks", "slow", "workers", "long",
    "pipes", "links", "share",
)  # fmt: skip
_ON_A_DISK = ("disk", "closed", "share")


def main() -> int:
    import importlib

    from tabulate import tabulate

    from tests.campaigns.cases import Benches, temporary
    from tests.campaigns.disk import small_disk
    from tests.campaigns.scenarios import SCENARIOS

    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("campaign", choices=CAMPAIGNS)
    add(
        "--count",
        "--gates",
        type=int,
        default=1000,
        metavar="N",
        help="cases, over all scenarios (1000)",
    )
    add("--seed", type=int, default=1, metavar="N")
    add("--first", type=int, default=1, metavar="STEP", help="each: go on from this step")
    add("--only", metavar="NAMES", help=f"scenarios, with commas: {', '.join(SCENARIOS)}")
    add("--home", type=Path, metavar="DIR", help="where cases are; kept, with what failed")
    add("--json", type=Path, metavar="FILE", help="the table as data")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(SCENARIOS)
    if args.home and args.home.exists() and any(args.home.iterdir()):
        parser.error(f"--home {args.home}: it is not empty")
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(f"tests.campaigns.{args.campaign}")
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:7.1f} s  {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        home = args.home or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        temporary(home)
        with small_disk(home / "disk", args.campaign in _ON_A_DISK) as disk:
            tallies = module.campaign(
                Benches(home, args.seed, disk, args.first), names, args.count, say
            )
    kinds = list(dict.fromkeys(kind for seen_tally in tallies for kind in seen_tally.seen))
    rows = [[tally.name, tally.cases, *(tally.seen[k] for k in kinds)] for tally in tallies]
    rows.append(["all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))])
    print(tabulate(rows, headers=["scenario", "cases", *kinds]))
    failures = [
        f"{failed_tally.name}: {text}" for failed_tally in tallies for text in failed_tally.failures
    ]
    for text in failures[:40]:
        print(text)
    print(f"{sum(e.cases for e in tallies)} cases, {len(failures)} failed, seed {args.seed}, "
          f"{time.monotonic() - begun:.0f} s")  # fmt: skip
    if args.json:
        summaries = [
            {"name": t.name, "cases": t.cases, "seen": t.seen, "failures": t.failures}
            for t in tallies
        ]
        args.json.write_text(json.dumps(summaries, indent=1))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
