"""Show the help of qgate or of one command.

qgate help
qgate help sweep
qgate help dumps compare
"""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="COMMAND", help="a command, and its verb if it has verbs"
    )


def run(args: argparse.Namespace) -> int:
    args.top.parse_args([*args.words, "--help"])
    return 0
