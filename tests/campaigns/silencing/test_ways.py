"""No way of a pull request silences the gates unseen, but those that docs/threats.md tells of."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from qgate.cli import _receipts, main
from tests.campaigns.forked import ran
from tests.campaigns.silencing.ways import COMPLETE, KERNEL, WAYS, Files, Outcome
from tests.cli.base_repository import begin, forked, write
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

THREATS = Path(__file__).parents[3] / "docs" / "threats.md"
MOST_GREEN = {"plain": 8, "from_base": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory.mktemp("base"), COMPLETE)


@pytest.fixture
def pull_request(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone whose kernel is wrong in its second layer."""
    folder = tmp_path / "clone"
    shutil.copytree(base, folder, symlinks=True)
    monkeypatch.setattr("qgate.cli._base_gates._pytest", forked)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GITHUB_ACTIONS", "")
    monkeypatch.chdir(folder)
    write(base, folder, {"kernel.py": KERNEL})
    return folder


def plain_status(folder: Path, words: Sequence[str] = ("suites", "-q")) -> int:
    """Return the status of `qgate run`, with a fork of this process in place of a new one."""
    with _receipts.requested() as receipt:

        def verb() -> int:
            os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", _receipts.RECEIPT: str(receipt)}
            # As an entry point is: before addopts, which may switch it off.
            arguments = [*words, "-p", "no:cacheprovider"]
            return int(pytest.main(arguments, plugins=["qgate.plugin"]))

        ended = ran(verb, folder)
        print(ended.said)
        assert "INTERNALERROR" not in ended.said
        return _receipts.settled_status(ended.status, receipt, words)


def from_base_status(_folder: Path) -> int:
    return main(["run", "--gate-from", "main", "-q"])


def outcome(status: int) -> Outcome:
    return "green" if status == 0 else "red"


@share(32)
@pytest.mark.parametrize("name", WAYS)
def test_a_plain_run_sees_it(base: Path, pull_request: Path, name: str) -> None:
    write(base, pull_request, WAYS[name].files)
    assert outcome(plain_status(pull_request)) == WAYS[name].plain


@share(48)
@pytest.mark.parametrize("name", WAYS)
def test_gates_of_the_base_see_it(base: Path, pull_request: Path, name: str) -> None:
    write(base, pull_request, WAYS[name].files)
    assert outcome(from_base_status(pull_request)) == WAYS[name].from_base


@proof
@pytest.mark.parametrize(("files", "expected"), [({}, "red"), ({"kernel.py": None}, "green")])
def test_without_a_way_the_kernel_decides(
    base: Path, pull_request: Path, files: Files, expected: Outcome
) -> None:
    if files:
        shutil.copy(base / "kernel.py", pull_request / "kernel.py")
    assert outcome(plain_status(pull_request)) == expected


def test_every_green_way_is_told() -> None:
    text = " ".join(THREATS.read_text(encoding="utf-8").split())
    for kind, most in MOST_GREEN.items():
        green = [name for name, way in WAYS.items() if getattr(way, kind) == "green"]
        assert len(green) <= most
        assert [name for name in green if f"**{name}**" not in text] == []
    assert f"{len(WAYS)} ways" in text


@always
@pytest.mark.parametrize("words", [["--collect-only"], ["--help"], ["suites", "--setup-plan"]])
def test_a_command_that_runs_nothing_needs_no_receipt(tmp_path: Path, words: list[str]) -> None:
    assert _receipts.settled_status(0, tmp_path / "none", words) == 0
    assert _receipts.settled_status(0, tmp_path / "none", ["suites"]) == 1


def test_a_receipt_says_the_last_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = tmp_path / "receipt.json"
    for text, status in (('{"exit": 0}', 0), ('{"exit": 5}', 5), ("{", 1), ("[]", 1)):
        receipt.write_text(text)
        assert _receipts.settled_status(0, receipt, ["suites"]) == status
        assert _receipts.settled_status(3, receipt, ["suites"]) == 3
    with contextlib.suppress(FileNotFoundError):
        receipt.unlink()
    assert "pytest ended before its gates were judged" in capsys.readouterr().err
