"""Each action of a command that writes files is one of the campaigns, and has a closed pipe."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.campaigns.cases import Benches, temporary
from tests.campaigns.forked import ran
from tests.campaigns.kills import campaign
from tests.campaigns.moments import limited
from tests.campaigns.scenarios import SCENARIOS, Command
from tests.cli.test_closed_pipes import PLAIN
from tests.cli.test_options import LEAVES
from tests.cli.test_shared_options import JSON
from tests.shares import share

Leaves = Mapping[tuple[str, ...], argparse.ArgumentParser]

# Commands that write no file.
LOOKS = {
    "baselines list", "baselines verify", "check", "doctor", "dumps compare", "dumps info", "dumps ls",
    "dumps verify", "dumps watch", "show modes",
}  # fmt: skip
# Actions whose files are written by others than the command's own process.
ELSEWHERE = {
    "run": "pytest, as in `gates` and `update`; --gate-from is in tests/cli/test_base_gates.py",
    "baselines accept --commit": "git, after `accept`",
}
# Options that say what is read, where, in which words, or who is asked first.
NO_ACTIONS = {
    "--accept-plan", "--allow-partial", "--attention-weights", "--baselines", "--config",
    "--dir", "--dry-run", "--exit-code", "--format", "--help", "--into", "--json",
    "--output-dir", "--partial", "--quiet", "--recipe", "--results", "--same", "--same-weights",
    "--steps", "--text", "--tokens", "--trust-remote-code", "--verbose", "--watch-underflow", "-v",
}  # fmt: skip
_FILE = re.compile(r"DIR|FILE|FOLDER|OUT|PATH|.*\.json")


def actions(leaves: Leaves) -> set[str]:
    """Name commands that write files, and their options that make them write others."""
    names = set()
    for words, parser in leaves.items():
        command = " ".join(words)
        if command in LOOKS:
            continue
        names.add(command)
        for option in parser._actions:
            is_file = isinstance(option.metavar, str) and _FILE.fullmatch(option.metavar)
            writes = re.search(r"\b(also files|writes?)\b", option.help or "")
            if option.option_strings and (option.nargs == 0 or is_file or writes):
                names |= {f"{command} {option.option_strings[-1]}"} - {
                    f"{command} {name}" for name in NO_ACTIONS
                }
    return names


def tried() -> set[str]:
    """Name the actions that scenarios do."""
    names = set()
    for scenario in SCENARIOS.values():
        if not isinstance(scenario.verb, Command):
            continue
        words = scenario.verb.words
        (leaf,) = [leaf for leaf in LEAVES if words[: len(leaf)] == leaf]
        options = LEAVES[leaf]._option_string_actions
        names.add(" ".join(leaf))
        names |= {
            f"{' '.join(leaf)} {options[word].option_strings[-1]}"
            for word in words
            if word in options
        }
    return names


def test_each_action_of_a_command_is_disturbed() -> None:
    assert actions(LEAVES) - tried() - ELSEWHERE.keys() == set()
    assert ELSEWHERE.keys() <= actions(LEAVES) - tried()
    assert {" ".join(words) for words in LEAVES} >= LOOKS


def test_an_action_that_is_in_no_campaign_is_named() -> None:
    verb = argparse.ArgumentParser()
    verb.add_argument("--keep", metavar="FILE", help="the figures")
    verb.add_argument("--overwrite", action="store_true", help="if they are there")
    verb.add_argument("--how", metavar="WORD", help="write them in this way")
    verb.add_argument("--limit", metavar="N", help="figures to print")
    new = {f"measure{option}" for option in ("", " --keep", " --overwrite", " --how")}
    assert actions({**LEAVES, ("measure",): verb}) - tried() - ELSEWHERE.keys() == new


def test_each_command_has_a_closed_pipe() -> None:
    lines = [f"{line} " for line in [*JSON, *PLAIN]]
    piped = tried() | {name for name in map(" ".join, LEAVES) if _begins(name, lines)}
    assert {" ".join(words) for words in LEAVES} - piped == {"run"}  # in a test of its own


def _begins(name: str, lines: list[str]) -> bool:
    return any(line.startswith(f"{name} ") for line in lines)


@share(2)
@pytest.mark.parametrize("name", ["write a configuration", "export", "init a workflow"])
def test_what_a_kill_leaves_is_mended_by_the_same_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "")
    monkeypatch.setattr("tempfile.tempdir", None)
    temporary(tmp_path)
    (tally,) = campaign(Benches(tmp_path, seed=1), [name], 12, lambda _: None)
    assert tally.failures == []
    assert tally.seen["killed"] >= 6


@pytest.mark.parametrize("size", [29, 1000, 3000])
def test_an_export_that_the_disk_has_no_room_for_is_a_sentence(size: int, tmp_path: Path) -> None:
    export = SCENARIOS["export"]
    assert ran(export.prepare, tmp_path).status == 0

    def fault() -> None:
        sys.dont_write_bytecode = True  # which would be cut off, too
        limited(size)()

    ended = ran(export.verb, tmp_path, fault)
    assert ended.status == 2, ended.said
    assert "File too large" in ended.said
    assert len(ended.said.splitlines()) == 1
    assert ran(export.verb, tmp_path).status == 0
