"""Every option of every command, given what nobody should give it: an answer, never a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgate.cli import main, parser
from tests.shares import share

HOSTILE = (
    "", " ", "-1", "0", "nan", "inf", "1e999", "9" * 5000, "x" * 5000, "\0", "a\nb", "\x1b[31m",
    "../../../etc", "::error::x", "%s{0}", "*", "[", "(?:", "a=b=c", ",", ":", "://", "foo://x/y",
    "é\udcff", "{}", "[1", "null",
)  # fmt: skip
# Options take turns: all of them with all of these take minutes (EACH = 1).
EACH = 6
# What starts another program, or makes a folder of the name it is given.
_ELSEWHERE = {"collect", "init"}
# A file of any name, for which a model is calibrated first.
_WORK = {("layers", "calibrate", "calibration")}


def leaves(
    at: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command with its words."""
    below = [action for action in at._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield path, at
    for action in below:
        for name, sub in action.choices.items():
            yield from leaves(sub, (*path, name))


PARSER = parser()
LEAVES = dict(leaves(PARSER))


def needed(command: argparse.ArgumentParser, but: argparse.Action) -> list[str]:
    """The least that has to be said beside an option; files are not there."""
    words = []
    for action in command._actions:
        if action is but or isinstance(action, argparse._HelpAction):
            continue
        word = str(next(iter(action.choices))) if action.choices else "missing"
        if not action.option_strings and action.nargs not in ("?", "*", argparse.REMAINDER):
            words.append(word)
        elif action.option_strings and action.required:
            words += [action.option_strings[-1], *([] if action.nargs == 0 else [word])]
    return words


def answered(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as end:
        return int(end.code or 0)


@share(4)
@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_option_answers(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qgate.cli.parser", lambda: PARSER)
    command = LEAVES[words]
    tried = 0
    for number, action in enumerate(command._actions):
        if isinstance(action, argparse._HelpAction) or action.nargs == 0:
            continue
        if (*words, action.dest) in _WORK:
            continue
        for value in HOSTILE[number % EACH :: EACH]:
            option = [f"{action.option_strings[-1]}={value}"] if action.option_strings else [value]
            argv = [*words, *needed(command, action), *option]
            if words[0] in _ELSEWHERE and not action.option_strings:
                continue
            try:
                status = answered(argv)
            except Exception as error:
                raise AssertionError(f"{argv}: {type(error).__name__}: {error}") from error
            captured = capsys.readouterr()
            assert status in ((0, 1, 2, 3) if words == ("check",) else (0, 1, 2)), argv
            assert "\x1b[31m" not in captured.out + captured.err, argv
            assert "Traceback" not in captured.err, argv
            tried += 1
    assert tried or all(a.nargs == 0 for a in command._actions), "a command without anything to say"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("part")]
