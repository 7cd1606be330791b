"""Commands and options of earlier versions, and what does their work now.

Whoever types one gets one error with what to use instead. Nothing here works any more.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NoReturn

COMMANDS = {
    "formats": "qgate show formats",
    "modes": "qgate show modes",
    "vectors": "qgate show vectors",
    "capture": "qgate layers capture",
    "compare": "qgate layers compare",
    "calibrate": "qgate layers calibrate",
    "draw": "qgate dumps draw",
    "results": "qgate report RESULTS ... --merge DIR",
}


class _MovedOption(argparse.Action):
    """An option of an earlier version, which no help lists and which is always an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, *_values: object, **_named: object
    ) -> NoReturn:
        option = next(reversed(self.option_strings))
        parser.error(f"{option} is no option any more: use {self.metavar}")


def add_moved(parser: argparse.ArgumentParser, replacements: Mapping[str, str]) -> None:
    """Refuse options of earlier versions with what to use instead."""
    for option, replacement in replacements.items():
        parser.add_argument(
            option, action=_MovedOption, nargs="?", default=argparse.SUPPRESS,
            help=argparse.SUPPRESS, metavar=replacement,
        )  # fmt: skip
