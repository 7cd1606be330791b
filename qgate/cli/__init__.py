"""The `qgate` command. Every module of this package without an underscore is one subcommand.

A subcommand has a docstring (its help), `arguments(parser)` and `run(args) -> int`. What does its
work is a `LateModule`, so that `qgate --help` answers at once. One that reads options it has not
declared sets `takes_more`, and finds them in `args.more`. Every command has `--quiet` and
`--color`; one that lists or decides something has `--json`. What nobody reads any more, as after
`| head -1`, is dropped: the work and the status stay.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import pkgutil
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from qgate._version import __version__
from qgate.cli._console import add_console_options, console
from qgate.cli._moved import COMMANDS
from qgate.device_errors import in_sentences
from qgate.devices import wait_calmly
from qgate.errors import QgateError, sentence_of, unknown
from qgate.interruptions import ended_by_signals
from qgate.loading import explained_imports
from qgate.storage.streams import prepare_streams
from qgate.text import for_terminal, one_line
from qgate.text.printing import print_line, print_text

_ABOUT = """\
Fail a pull request when quantized numerics are worse than their format allows.

  qgate doctor                            check what is installed here
  qgate init --ci github                  write suites (test files), settings and a workflow
  qgate run --mode mxfp8                  run the suites in one mode (one way to quantize)
  qgate sweep act.pt                      find the format and the scale that suit a tensor
  qgate checkpoint CHILD --parent PARENT  check a quantized checkpoint, without running it
"""


GROUPS = {
    "gate": ("run", "report", "baselines", "check"),
    "look": ("sweep", "activations", "layers", "collect", "dumps", "show"),
    "checkpoints": ("checkpoint", "engines"),
    "maintenance": ("init", "doctor"),
}
"""The commands by what they are for, as `qgate --help` lists them; those of others come last."""
_Verbs = argparse._SubParsersAction
_MISSING = "the following arguments are required"


class CommandParser(argparse.ArgumentParser):
    """A command parser whose errors are one line: the problem, the nearest name, the help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        text = for_terminal(one_line(message))
        verbs = [action for action in self._actions if isinstance(action, _Verbs)]
        if verbs and verbs[0].required and message.startswith(_MISSING):
            text = f"{text}: {', '.join(verbs[0].choices)}"
        end = "" if text.endswith((".", "?")) else "."
        status = self.get_default("usage_status") or 2
        self.exit(status, f"{self.prog}: {text}{end} `{self.prog} --help` shows what it takes.\n")

    def format_help(self) -> str:
        """Write the help; that of the command line lists its commands in groups."""
        verbs = [action for action in self._actions if isinstance(action, _Verbs)]
        if not verbs or verbs[0].dest != "command":
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        listed = {choice.dest: choice for choice in verbs[0]._choices_actions}
        grouped = {name for names in GROUPS.values() for name in names}
        ungrouped = tuple(name for name in listed if name not in grouped)
        for title, names in {**GROUPS, "others": ungrouped}.items():
            formatter.start_section(title)
            formatter.add_arguments([listed[name] for name in names if name in listed])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(action for action in self._actions if action is not verbs[0])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, _Verbs) and action.dest == "command" and value in COMMANDS:
            raise argparse.ArgumentError(
                None, f"`qgate {value}` is no command any more: use `{COMMANDS[value]}`"
            )
        if action.choices is not None and value not in action.choices:
            error = unknown("choice", value, map(str, action.choices))
            raise argparse.ArgumentError(action, str(error))

    def check_first(self, words: Sequence[str]) -> None:
        """Refuse an unknown option before the command, which would hide what the command is."""
        name = words[0].partition("=")[0] if words else ""
        if name.startswith("-") and not any(
            option.startswith(name) for option in self._option_string_actions
        ):
            self.refuse([words[0]])

    def refuse_misspelled(self, words: Sequence[str]) -> None:
        """Refuse words of a command that takes others, if they are nearly options of its own."""
        options = [name for name in self._option_string_actions if name.startswith("--")]
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and difflib.get_close_matches(name, options, n=1, cutoff=0.8):
                self.refuse([word])

    def refuse(self, more: Sequence[str]) -> NoReturn:
        """Name undeclared arguments, and the options that are nearest to them."""
        options = [name for name in self._option_string_actions if name.startswith("--")]
        words = [word.partition("=")[0] for word in more if word.startswith("-")]
        near = [name for word in words for name in difflib.get_close_matches(word, options, n=1)]
        hint = f". Did you mean {' and '.join(near)}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(more)}{hint}")


def parser() -> CommandParser:
    """Build the whole command line."""
    top = CommandParser(
        prog="qgate",
        description=_ABOUT,
        epilog="`qgate help COMMAND` shows the options of a command, with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"qgate {__version__}"
    top.add_argument("--version", "-V", action="version", version=version)
    top.set_defaults(top=top)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"qgate.cli.{info.name}")
            about = (module.__doc__ or "").strip()
            sub = commands.add_parser(
                info.name,
                help=about.partition("\n")[0].rstrip("."),
                description=about,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            module.arguments(sub)
            sub.set_defaults(run=module.run)
    _add_shared(top)
    return top


def _add_shared(at: argparse.ArgumentParser) -> None:
    """Add the options of every command, unless it hands those of that name to another program."""
    if not at.get_default("forwards"):
        add_console_options(at)
    for action in at._actions:
        if isinstance(action, _Verbs):
            for choice in action._choices_actions:
                sub = action.choices[choice.dest]
                sub.description = sub.description or _as_sentence(choice.help or "")
                _add_shared(sub)


def _as_sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it did its work, 2 if its arguments cannot be used."""
    try:
        args = parse_call(argv)
    except KeyboardInterrupt:
        return _end_interrupted("qgate")
    return run_call(args)


def parse_call(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the words of a command; those of this process unless others are given."""
    wait_calmly()
    prepare_streams()
    top = parser()
    words = sys.argv[1:] if argv is None else argv
    for word in words:
        if "\0" in word:
            top.error(f"{ascii(word)[:80]} has a NUL character, which no name and no file can have")
    if list(words[:1]) == ["help"]:
        words = [*words[1:], "--help"]
    top.check_first(words)
    args, more = top.parse_known_args(words)
    args.more = more
    if more and not getattr(args, "takes_more", False):
        args.parser.refuse(more)
    return args


def _signals_of(command: str) -> tuple[int, ...]:
    """Return the signals that end a command; programs that it runs have their own ways to end."""
    if command == "collect":
        return ()
    return (signal.SIGTERM,) if command == "run" else (signal.SIGTERM, signal.SIGINT)


def run_call(args: argparse.Namespace) -> int:
    """Run a command that was parsed, and turn its errors into one line and a status."""
    try:
        if args.command is None:
            args.top.print_help()
            return 0
        with (
            ended_by_signals(_signals_of(args.command)),
            console(args),
            in_sentences(args.parser.prog),
            explained_imports(),
        ):
            status = int(args.run(args))
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        return _end_interrupted(args.parser.prog)
    except (QgateError, OSError) as error:
        print_line(f"{args.parser.prog}: {sentence_of(error)}", file=sys.stderr)
        return 2


def _end_interrupted(program: str) -> int:
    """Say that Ctrl-C ended a program, also where it is pressed again meanwhile."""
    with contextlib.suppress(KeyboardInterrupt):
        print_text(f"\n{program}: interrupted", file=sys.stderr)
    return 130
