"""Walk the tables of promises.md: the commands of a row run, and what it promises is there.

In the last column a file or folder in code exists afterwards, and any other code is text of the
output or of a file of the row; `…` in it is any text. A picture can be opened and shows something.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgate.cli import main
from tests.seeds.inputs import write_inputs
from tests.seeds.page import PAGE, PROMISES, Row, make_page, rows_of
from tests.shares import share

_SETTING = re.compile(r"[A-Z_]+=\S*")


ROWS = rows_of(PROMISES.read_text(encoding="utf-8"))


class Workplace:
    """A folder with the inputs, in which each command runs once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_inputs(folder)

    @functools.cache  # noqa: B019
    def run(self, command: str) -> tuple[int, str]:
        """Run a command of qgate with its settings of the environment; return status and output."""
        words = shlex.split(command)
        settings = [word for word in words if _SETTING.fullmatch(word)]
        assert words[len(settings)] == "qgate", f"{command}: only qgate is run here"
        output = io.StringIO()
        with (
            contextlib.chdir(self.folder),
            _environment(dict(word.split("=", 1) for word in settings)),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                status = main(words[len(settings) + 1 :])
            except SystemExit as end:
                status = int(end.code or 0)
        return status, output.getvalue()

    def problems(self, row: Row) -> list[str]:
        """List what a row promises and its commands do not give."""
        statuses, outputs = zip(*map(self.run, row.commands), strict=True)
        problems = []
        if statuses[-1] != row.status or any(statuses[:-1]):
            problems.append(f"exit status {statuses}: {outputs[-1][-500:]}")
        patterns, texts = row.promised()
        content = [*outputs]
        for pattern in patterns:
            files = sorted(self.folder.glob(pattern))
            if not any(path.is_file() or any(path.iterdir()) for path in files):
                problems.append(f"no file {pattern}")
            for path in files:
                if path.suffix == ".png":
                    problems += [] if _shows_something(path) else [f"{path.name} shows nothing"]
                elif path.suffix not in ("", ".npy", ".pt", ".safetensors"):
                    content.append(path.read_text(encoding="utf-8"))
        plain = "\n".join(" ".join(text.split()) for text in content)
        for text in texts:
            text_pattern = ".{0,400}?".join(map(re.escape, " ".join(text.split()).split("…")))
            if not re.search(text_pattern, plain):
                problems.append(f"no text {text!r}")
        return problems


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables, and take back whatever a program changes in them."""
    before = dict(os.environ)
    try:
        os.environ.update(settings)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _shows_something(picture: Path) -> bool:
    from PIL import Image

    with Image.open(picture) as image:
        return min(image.size) > 100 and len(image.convert("RGB").getcolors(2**24) or []) > 5


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("seeds"))


@share(8, by=("row.document",), unit="row.command")
@pytest.mark.parametrize("row", [row for row in ROWS if row.commands], ids=lambda row: row.feature)
def test_a_row_gives_what_it_promises(row: Row, workplace: Workplace) -> None:
    assert workplace.problems(row) == []


def test_every_row_has_commands_or_a_reason() -> None:
    assert len({row.document for row in ROWS}) == 5
    assert len({(row.document, row.feature) for row in ROWS}) == len(ROWS) > 100
    for row in ROWS:
        assert any(row.promised()) if row.commands else len(row.promise.split()) > 4, row.feature


def test_the_page_is_made_from_the_promises() -> None:
    new_page = make_page(PROMISES.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == new_page, "run python -m tests.seeds.page --write"


def test_a_page_has_a_row_for_each_program() -> None:
    page = make_page(
        "# P\n\n## One tool\n\nIts document.\n\n| the document | command | what is there |\n|---|---|---|\n"
        "| a | `qgate x` | `d/1.png`: `text`. It is small |\n| b | `A=1 qgate x -y` | `d/2.png` |\n"
        "| c | none | It is not needed. |\n"
    )
    assert "| `qgate x` | a; b |\n\n* **c**: It is not needed.\n" in page


# Planted rows --------------------------------------------------------------------------------------


def planted(promise: str, *commands: str) -> Row:
    return Row("planted", "feature", commands or ("qgate show formats fp4_e2m1",), promise)


def test_a_promise_that_is_not_kept_is_a_problem(workplace: Workplace) -> None:
    (workplace.folder / "empty").mkdir(exist_ok=True)
    (workplace.folder / "notes.txt").write_text("one\n  two")
    assert workplace.problems(planted("`fp4_e2m1`, `tensor1.pt`, `notes.txt`: `one t…o`")) == []
    for promise, problem in {
        "`fp4_e2m9`": "no text 'fp4_e2m9'",
        "`nowhere/*.png`": "no file nowhere/*.png",
        "`empty/`": "no file empty/",
        "`notes.txt`: `two one`": "no text 'two one'",
    }.items():
        assert workplace.problems(planted(promise)) == [problem]
    (status,) = workplace.problems(
        planted("`fp4_e2m1`", "qgate show formats fp4_e2m1", "qgate show formats x")
    )
    assert status.startswith("exit status (0, 2): qgate show formats: unknown format 'x'")
    assert workplace.problems(planted("exit status 2", "qgate show formats x")) == []


def test_an_empty_picture_is_a_problem(workplace: Workplace) -> None:
    from PIL import Image

    Image.new("RGB", (300, 200), "white").save(workplace.folder / "white.png")
    assert workplace.problems(planted("`white.png`")) == ["white.png shows nothing"]
