"""Write the help of all commands as data of their parsers: argparse's own layout depends on Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def help_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A parser's descriptions and arguments, then those of its commands."""
    yield f"== {parser.prog}"
    for text in (parser.description, parser.epilog):
        yield from (f"  {line}" for line in (text or "").splitlines())
    nested = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            nested = action.choices
            for choice in action._choices_actions:
                yield f"  command {choice.dest}: {choice.help}"
        elif action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            yield f"  {_described(action)}"
    for subparser in nested.values():
        yield from help_lines(subparser)


def _described(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or action.dest
    parts = [names, f"metavar {action.metavar}" if action.metavar else "", str(action.help or "")]
    if action.choices is not None:
        parts.append(f"choices {', '.join(map(str, action.choices))}")
    if action.default not in (None, False, argparse.SUPPRESS):
        parts.append(f"default {action.default}")
    if action.required and action.option_strings:
        parts.append("required")
    return " | ".join(part for part in parts if part)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """All commands and verbs, as they are typed after `qgate`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                below = list(commands_of(subparser))
                yield from [f"{name} {verb}" for verb in below] or [name]
