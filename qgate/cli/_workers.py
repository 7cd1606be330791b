"""The options that say who computes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qgate.cli._numbers import from_one

if TYPE_CHECKING:
    from qgate.engine import Workers


def add_workers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--jobs", type=from_one, metavar="N", help="processes (default 1; of Ray, all its cores)")
    add(
        "--engine",
        default="local",
        metavar="E",
        help="local (default), ray, or ray://host:port of a cluster",
    )
    add(
        "--gpus-per-task",
        type=float,
        default=0.0,
        metavar="X",
        help="of the GPUs of a Ray cluster, for each item (default 0)",
    )


def workers_from(args: argparse.Namespace) -> Workers:
    """What the options say, checked."""
    from qgate.engine import Workers

    return Workers(args.engine, args.jobs, args.gpus_per_task)
