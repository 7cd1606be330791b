"""Options for the processes that compute, and numbers as options take them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qgate.cli._settings import add_settings, setting
from qgate.loading import LateModule
from qgate.settings import Setting

if TYPE_CHECKING:
    from qgate import engine
else:
    engine = LateModule("qgate.engine")


from_one, from_zero = Setting("", kind=int, low=1).typed, Setting("", kind=float, low=0).typed
"""Readers of a whole number from 1, and of a number from 0."""


def add_limit(parser: argparse.ArgumentParser, default: int, noun: str) -> None:
    about = f"{noun} to print (default {default})"
    parser.add_argument("--limit", type=from_one, default=default, metavar="N", help=about)


def add_workers(parser: argparse.ArgumentParser, *settings: str, **earlier: str) -> None:
    """Add `--jobs` and `--set`, for these settings and those of workers."""
    add = parser.add_argument
    add(
        "--jobs",
        type=from_one,
        metavar="N",
        help="processes to use (default 1; on Ray, with --set engine=ray, all cores)",
    )
    add_settings(parser, *settings, "engine", "gpus-per-task", **earlier)


def workers_from(args: argparse.Namespace) -> engine.Workers:
    """Return the checked workers of the options."""
    return engine.Workers(setting(args, "engine"), args.jobs, setting(args, "gpus-per-task"))
