"""Print a script that lets a shell complete commands and options.

  eval "$(qgate completion bash)"     in ~/.bashrc
  eval "$(qgate completion zsh)"      in ~/.zshrc, after compinit

The script has all names in it, so that completing starts no Python; print it again after an update.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator

from qgate.project.options import OPTIONS

_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
_qgate() {{
  local at="" word names=""
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$at $word" in
      {commands}) at="$at $word" ;;
    esac
  done
  case "$at" in
{names}
  esac
  case "$at $before" in
{choices}
  esac
  COMPREPLY=($(compgen -W "$names" -- "$current"))
}}
complete -o default -F _qgate qgate
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def run(args: argparse.Namespace) -> int:
    sys.stdout.write((_ZSH if args.shell == "zsh" else "") + script(args.top))
    return 0


def script(top: argparse.ArgumentParser) -> str:
    """Write the script for all commands of a parser."""
    commands, names, choices = [], [], []
    first = [path.strip() for path, _ in _parsers(top, "") if path.count(" ") == 1]
    for path, parser in _parsers(top, ""):
        if path:
            commands.append(shlex.quote(path))
        words: list[str] = [*first] if path == " help" else []
        for action in parser._actions:
            options = [name for name in action.option_strings if name.startswith("--")]
            words += options if action.option_strings else map(str, action.choices or ())
            if options and action.choices:
                patterns = "|".join(shlex.quote(f"{path} {name}") for name in options)
                choices.append(f"    {patterns}) names={_quoted(action.choices)} ;;")
        words += [f"--{name}" for name in OPTIONS] if parser.get_default("forwards") else []
        names.append(f"    {shlex.quote(path)}) names={_quoted(words)} ;;")
    return _SCRIPT.format(
        commands="|".join(commands), names="\n".join(names), choices="\n".join(choices)
    )


def _quoted(words: Iterable[object]) -> str:
    return shlex.quote(" ".join(map(str, words)))


def _parsers(
    at: argparse.ArgumentParser, path: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield path, at
    for action in at._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                yield from _parsers(parser, f"{path} {name}")
