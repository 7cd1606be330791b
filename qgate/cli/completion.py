"""Print a script that lets a shell complete commands, options, and names of modes and formats.

  qgate completion bash > ~/.local/share/bash-completion/completions/qgate
  eval "$(qgate completion zsh)"      in ~/.zshrc, after compinit

The script contains all names, so that completion does not start Python; print it again after an
update.
Without the package bash-completion, write eval "$(qgate completion bash)" into ~/.bashrc.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from qgate.loading import LateModule
from qgate.models.naming import TINY_NAMES
from qgate.project.gate_kinds import known_options

if TYPE_CHECKING:
    from qgate import formats
    from qgate.modes import selection
else:
    formats, selection = LateModule("qgate.formats"), LateModule("qgate.modes.selection")

_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
# bash splits --mode=int8 at the sign; of int8,mx the last name is completed.
_SCRIPT = """\
_qgate() {{
  local at="" word names="" listed=""
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$current" = "=" ]; then current=""
  elif [ "$before" = "=" ]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$at $word" in
      {commands}) at="$at $word" ;;
    esac
  done
  case "$at" in
{names}
  esac
  case "$at $before" in
{values}
  esac
  case "$current" in
    *,*) listed="${{current%,*}},"; current="${{current##*,}}" ;;
  esac
  COMPREPLY=($(compgen -P "$listed" -W "$names" -- "$current"))
}}
complete -o default -F _qgate qgate
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=("bash", "zsh"), metavar="SHELL", help="the shell: bash or zsh"
    )


def run(args: argparse.Namespace) -> int:
    sys.stdout.write((_ZSH if args.shell == "zsh" else "") + script(args.top))
    return 0


def script(top: argparse.ArgumentParser) -> str:
    """Write the script for all commands of a parser."""
    modes, known_formats = [*selection.names(), *selection.GROUPS], formats.names()
    models = [*TINY_NAMES, "hf:", "mamba:"]
    of_options = {"mode": modes, "reference": modes, "model": models}
    of_options |= {"format": known_formats, "elem-format": known_formats}
    of_words = {
        " modes": modes, " show mode": modes, " show model": models, " formats": known_formats
    }  # fmt: skip
    commands, names = [], []
    values: dict[str, list[str]] = {}  # what may follow, and after which words
    verbs = {path: _verbs(parser) for path, parser in _parsers(top, "")}
    for path, parser in _parsers(top, ""):
        if path:
            commands.append(shlex.quote(path))
        words = [*verbs[""]] if path == " help" else [*of_words.get(path, [])]
        with_value: dict[str, Iterable[object]] = {}
        for action in parser._actions:
            options = [name for name in action.option_strings if name.startswith("--")]
            words += options if action.option_strings else map(str, action.choices or ())
            if action.nargs != 0:
                with_value |= {
                    name: action.choices or of_options.get(name[2:], []) for name in options
                }
        if parser.get_default("forwards"):
            for name, option in known_options().items():
                words.append(f"--{name}")
                if option.kind is not bool:
                    choices = option.kind if isinstance(option.kind, tuple) else ()
                    with_value[f"--{name}"] = choices or of_options.get(name, [])
        names.append(f"    {shlex.quote(path)}) names={_quoted(words)} ;;")
        # After an option whose value has no list of names, files are completed.
        for option_name, its_values in with_value.items():
            values.setdefault(_quoted(its_values), []).append(f"{path} {option_name}")
    for path, its_verbs in verbs.items():
        if path and its_verbs:
            values.setdefault(_quoted(its_verbs), []).append(f" help{path}")
    return _SCRIPT.format(
        commands="|".join(commands),
        names="\n".join(names),
        values="\n".join(
            f"    {'|'.join(map(shlex.quote, before))}) names={following} ;;"
            for following, before in values.items()
        ),
    )


def _quoted(words: Iterable[object]) -> str:
    return shlex.quote(" ".join(map(str, words)))


def _verbs(parser: argparse.ArgumentParser) -> list[str]:
    """List the commands below a command, or all of the top."""
    choices = [action.choices for action in parser._actions
               if isinstance(action, argparse._SubParsersAction)]  # fmt: skip
    return [*choices[0]] if choices else []


def _parsers(
    at: argparse.ArgumentParser, path: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield path, at
    for action in at._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                yield from _parsers(parser, f"{path} {name}")
