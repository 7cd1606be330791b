"""The page for agents and the page about its JSON: commands that exist, fields that exist, files written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from qgate.cli import main, parse_call
from qgate.kernel_checks.verdicts import STATUSES
from tests.results.schema_files import MADE

ROOT = Path(__file__).resolve().parents[2]
SKILL = (ROOT / "docs" / "agents" / "SKILL.md").read_text()
JSON = (ROOT / "docs" / "agents" / "json.md").read_text()
PAGE = Path(".agents/skills/qgate/SKILL.md")
FIELDS = set(MADE["check"]()["$defs"]["record"]["properties"])
INSTEAD = {"MODULE:REFERENCE": "torch:mm", "FILE.py:KERNEL": "k.py:f", "FORMAT": "mxfp8"}
Capsys = pytest.CaptureFixture[str]


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table that begins with a line."""
    lines = text[text.index(head) :].splitlines()[2:]
    table = lines[
        : next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    ]
    assert table, head
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_that_is_written_is_that_of_the_documentation() -> None:
    assert (ROOT / "qgate" / "starter" / "SKILL.md.txt").read_text() == SKILL, (
        "cp docs/agents/SKILL.md qgate/starter/SKILL.md.txt"
    )
    head = SKILL.split("---")[1].strip().splitlines()
    assert [line.partition(":")[0] for line in head] == ["name", "description"]
    assert len(head[1]) < 1024


def test_its_commands_are_commands(capsys: Capsys) -> None:
    words = re.findall(r"`(qgate [^`]+)`", SKILL)
    commands = [re.sub("|".join(INSTEAD), lambda match: INSTEAD[match[0]], text) for text in words]
    calls = [shlex.split(command)[1:] for command in commands]
    calls = [argv for argv in calls if len(argv) > 1]  # others are named, not shown
    assert {argv[0] for argv in calls} >= {"check", "checkpoint", "show", "help", "baselines"}
    for argv in calls:
        if argv[0] == "help":
            with pytest.raises(SystemExit, match="0"):
                parse_call(argv)
        else:
            parse_call(argv)
    with pytest.raises(SystemExit):
        parse_call(["check", "k.py:f", "--reference", "torch:mm"])
    capsys.readouterr()


def test_its_verdicts_have_the_statuses_of_the_command() -> None:
    table = rows(SKILL, "| verdict | status |")
    assert {cells[0].strip("`"): int(cells[1]) for cells in table} == STATUSES


def test_the_fields_that_pages_name_exist_and_all_are_named() -> None:
    table = rows(JSON, "| field | holds |")
    named = {name for cells in table for name in re.findall(r"`(\w+)`", cells[0])}
    assert named <= FIELDS
    elsewhere = {"verdict", "cause", "exit_status", "kind"}  # in the text above the table
    assert all(f"`{name}`" in JSON or f'"{name}"' in JSON for name in elsewhere)
    assert FIELDS - named - elsewhere == {"kernel", "like", "details", "notes"}
    for name in ("smallest_defect", "largest", "input", "worst", "cause", "repeat", "shapes"):
        assert f"`{name}" in SKILL
        assert name in FIELDS


def test_init_agents_writes_one_page(here: Path, capsys: Capsys) -> None:
    assert main(["init", "--agents", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would be written:\n  {PAGE}\n"
    assert list(here.iterdir()) == []
    assert main(["init", "--agents"]) == 0
    assert PAGE.read_text() == SKILL
    assert [path for path in here.rglob("*") if path.is_file()] == [here / PAGE]
    assert f"git add {PAGE}" in capsys.readouterr().out
    assert main(["init", "--agents"]) == 0
    assert capsys.readouterr().out.startswith(f"unchanged:\n  {PAGE}\n")


def test_a_page_that_was_changed_is_replaced_by_force_alone(capsys: Capsys) -> None:
    assert main(["init", "--agents"]) == 0
    PAGE.write_text("mine")
    assert main(["init", "--agents"]) == 0
    assert PAGE.read_text() == "mine"
    assert "differs; --force replaces it" in capsys.readouterr().out
    assert main(["init", "--agents", "--force"]) == 0
    assert PAGE.read_text() == SKILL


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ci", "github"], "--agents writes one page and nothing else: leave out --ci"),
        (["--suites", "task"], "--agents writes one page and nothing else"),
        (["missing"], "there is no folder 'missing': make it first."),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str], complaint: str, here: Path, capsys: Capsys
) -> None:
    assert main(["init", "--agents", *words]) == 2
    assert complaint in capsys.readouterr().err
    assert list(here.iterdir()) == []
