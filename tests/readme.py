"""The README as a program: its fenced blocks, found and run.

`sh` is for the two set-up commands, which CI runs; `python` runs as it stands, and is a file for
the commands below if it begins with the comment of a name (`# test_gemm.py`); `console` is commands
after `$ ` and what they print. A block in any other language is only read. In expected
output, a line `…` stands for any lines and a `…` inside a line for any text.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from qgate.cli import main as qgate_main
from tests.campaigns.forked import ran

SET_UP = "Set up"
COMMANDS = ("qgate", "pytest", "python")
FILE = re.compile(r"# ([\w.]+\.py)")
ANY = "…"
INSTEAD = {
    **dict.fromkeys(("bash", "shell", "zsh", "shell-session", "sh-session"), "console"),
    **dict.fromkeys(("py", "python3", "pycon"), "python"),
}
SECONDS = 300


class ReadmeError(Exception):
    """The README cannot be read as a program; the message gives the line."""


@dataclass(frozen=True)
class Block:
    """One fenced block: the language, the `##` heading it stands under, the line of its fence."""

    language: str
    heading: str
    line: int
    text: str

    @property
    def first_line(self) -> str:
        return next((line for line in self.text.splitlines() if line.strip()), "empty")


@dataclass(frozen=True)
class Command:
    """One command of a console block and what it should print."""

    words: tuple[str, ...]
    expected: tuple[str, ...]
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order."""
    block_list = []
    heading = ""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        fence = re.match(r"( *)(`{3,}|~{3,})\s*([^\s`{]*)[^`]*$", line)
        if title := re.match(r"##?\s+(.*?)[\s#]*$", line):
            heading = title[1]
        if not fence:
            continue
        indent, mark, language = fence.groups()
        inside = []
        for _, following in lines:
            if re.fullmatch(rf" *{mark[0]}{{{len(mark)},}}\s*", following):
                break
            inside.append(following.removeprefix(indent))
        else:
            raise ReadmeError(f"line {number}: the block {mark}{language} has no end.")
        body = "".join(f"{content_line}\n" for content_line in inside)
        block_list.append(Block(language.lower(), heading, number, body))
    return block_list


def violations(found: list[Block]) -> list[str]:
    """Why blocks cannot be run or would silently not be run; empty where all is well."""
    bad = []
    try:
        set_up_commands(found)
    except ReadmeError as error:
        bad.append(str(error))
    for block in found:
        if block.language == "sh" and block.heading != SET_UP:
            bad.append(f"line {block.line}: sh outside {SET_UP!r} is not run: use console.")
        elif block.language in INSTEAD:
            instead = INSTEAD[block.language]
            bad.append(f"line {block.line}: {block.language} is not run: use {instead}.")
        elif block.language == "console":
            try:
                console_commands(block)
            except ReadmeError as error:
                bad.append(str(error))
    return bad


def set_up_commands(found: list[Block]) -> tuple[str, str]:
    """The two commands a newcomer copies, each one line."""
    set_ups = [block for block in found if block.language == "sh" and block.heading == SET_UP]
    if len(set_ups) != 2:
        lines = ", ".join(str(block.line) for block in set_ups) or "none"
        raise ReadmeError(
            f"{len(set_ups)} sh blocks under '## {SET_UP}' (lines: {lines}) instead of two."
        )
    for block in set_ups:
        if len(block.text.splitlines()) != 1 or not block.text.strip():
            raise ReadmeError(f"line {block.line}: a set-up command is one line.")
    return set_ups[0].text.strip(), set_ups[1].text.strip()


def run_python(block: Block) -> None:
    """Run a python block on its own; its errors carry the README's line numbers."""
    code = compile("\n" * block.line + block.text, "README.md", "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})


def prose(text: str) -> list[str]:
    """Return the words of a page without its blocks, tables, pictures and addresses of links."""
    text = re.sub(
        r"^(`{3,}).*?^\1$|<picture>.*?</picture>", "", text, flags=re.DOTALL | re.MULTILINE
    )
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    return re.sub(r"\]\([^)]*\)", "]", "\n".join(lines)).split()


def run_notebook(text: str) -> list[object]:
    """Run the cells of a notebook from top to bottom, and return what each ends with, as shown."""
    names: dict[str, object] = {"__name__": "__main__"}
    results = []
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), f"cell {number}")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            code = compile(ast.Expression(last.value), f"cell {number}", "eval", dont_inherit=True)
            results.append(eval(code, names))
    return results


def files(page: list[Block], block: Block) -> dict[str, str]:
    """The files that python blocks above a block show, by name."""
    return {
        name[1]: above.text
        for above in page
        if above.language == "python" and above.line < block.line
        if (name := FILE.fullmatch(above.first_line))
    }


def follow(page: list[Block], folder: Path) -> None:
    """Do what a tutorial says, in one folder: write its files, change them, run its commands."""
    for block in page:
        if block.language == "python":
            written = FILE.fullmatch(block.first_line)
            assert written, f"line {block.line}: a file of a tutorial begins with its name"
            (folder / written[1]).write_text(block.text, encoding="utf-8")
        elif block.language == "diff":
            _change(block, folder)
        elif block.language == "console":
            run_console(block, folder)


def _change(block: Block, folder: Path) -> None:
    """Replace the lines after `-` in the file that the diff names by those after `+`."""
    (name,) = re.findall(r"^--- (\S+)$", block.text, re.MULTILINE)
    lines = [line for line in block.text.splitlines() if not line.startswith(("---", "+++"))]
    old, new = (
        "".join(f"{line[1:]}\n" for line in lines if line[0] in (" ", sign)) for sign in "-+"
    )
    text = (folder / name).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"line {block.line}: {name} does not have the lines to change"
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")


def console_commands(block: Block) -> list[Command]:
    """The commands of a console block with the lines that follow each of them."""
    commands: list[Command] = []
    expected: list[str] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            words = _words(line[2:], number)
            expected = []
            commands.append(Command(words, (), number))
        elif not commands:
            raise ReadmeError(f"line {number}: a console block starts with '$ ' and a command.")
        else:
            expected.append(line)
            commands[-1] = Command(commands[-1].words, tuple(expected), commands[-1].line)
    if not commands:
        raise ReadmeError(f"line {block.line}: a console block without a command.")
    return commands


def _words(command: str, line: int) -> tuple[str, ...]:
    """A command split as a shell would split it; there is no shell to understand more."""
    splitter = shlex.shlex(command, posix=True, punctuation_chars=True)
    splitter.whitespace_split = True
    try:
        words = tuple(splitter)
    except ValueError as error:
        raise ReadmeError(f"line {line}: {command}: {error}.") from None
    if not words or words[0] not in COMMANDS:
        raise ReadmeError(f"line {line}: {command}: commands are {', '.join(COMMANDS)}.")
    operators = [word for word in words if word and set(word) <= set("();<>|&")]
    if operators:
        raise ReadmeError(f"line {line}: {command}: {operators[0]!r} needs a shell, there is none.")
    return words


def run_console(block: Block, folder: Path) -> None:
    """Run a console block's commands in a folder, one after the other.

    A command may end with an error only where the README shows some of what it prints, so that a
    crash does not hide behind `…`.
    """
    for command in console_commands(block):
        status, printed = _run(command.words, folder)
        expected = _trimmed(command.expected)
        prompt = f"README.md:{command.line}: $ {shlex.join(command.words)}"
        comparison = "\n".join(["it printed:", *printed, "", "the README says:", *expected])
        if not matches(expected, printed):
            raise AssertionError(f"{prompt} prints something else\n{comparison}")
        if status and not any(line.replace(ANY, "").strip() for line in expected):
            raise AssertionError(f"{prompt} ends with exit status {status}\n{comparison}")


def _run(words: tuple[str, ...], folder: Path) -> tuple[int, list[str]]:
    """Exit status and lines of a command as a user with this interpreter's programs sees it."""
    settings = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "COV_"))
    }
    programs = str(Path(sys.executable).parent)
    settings |= {
        "PATH": os.pathsep.join([programs, settings.get("PATH", os.defpath)]),
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "PYTHONUTF8": "1",
    }
    program = shutil.which(words[0], path=settings["PATH"])
    if program is None:
        raise AssertionError(f"there is no program {words[0]!r} in {programs}")
    if words[1:] == ("--version",):
        done = subprocess.run(
            [program, *words[1:]], cwd=folder, env=settings, capture_output=True, encoding="utf-8",
            timeout=SECONDS, check=False,
        )  # fmt: skip
        return done.returncode, _trimmed((done.stdout + done.stderr).splitlines())
    ended = ran(functools.partial(_program, words, folder, settings), folder)
    return ended.status, _trimmed(ended.said.splitlines())


def _program(words: tuple[str, ...], folder: Path, settings: dict[str, str]) -> int:
    """Do what a program does, in a fork of this process, which has loaded torch."""
    os.environ.clear()
    os.environ.update(settings)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = [*words]
    sys.path.remove(str(folder))  # programs do not look for modules where they are run
    main = {"qgate": qgate_main, "pytest": pytest.main, "python": _run_script}[words[0]]
    try:
        return int(main(list(words[1:])))
    except SystemExit as end:
        return int(end.code or 0)


def _run_script(words: list[str]) -> int:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _trimmed(lines: list[str] | tuple[str, ...]) -> list[str]:
    """Without spaces at line ends and without empty lines at the end: nobody sees them."""
    trimmed = [line.rstrip() for line in lines]
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    return trimmed


def matches(expected: list[str], printed: list[str]) -> bool:
    """Whether printed lines are the expected ones, with `…` for what may vary."""
    reached = {0}
    for is_gap, group in groupby(expected, key=lambda line: line.strip() == ANY):
        if is_gap:
            reached = set(range(min(reached), len(printed) + 1))
            continue
        for line in group:
            pattern = ".*".join(re.escape(part) for part in line.split(ANY))
            reached = {
                index + 1
                for index in reached
                if index < len(printed) and re.fullmatch(pattern, printed[index])
            }
        if not reached:
            return False
    return len(printed) in reached
