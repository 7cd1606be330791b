"""Commands whose verbs are modules: each with a docstring, `arguments(parser)` and `run(args)`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import ModuleType


def add_verbs(
    parser: argparse.ArgumentParser, modules: Mapping[str, ModuleType]
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add a verb for each module, whose docstring is its help."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in modules.items():
        about = (module.__doc__ or "").strip()
        summary = about.partition("\n")[0].rstrip(".")
        verb = verbs.add_parser(
            name,
            help=f"{summary[:1].lower()}{summary[1:]}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(verb)
    return verbs
