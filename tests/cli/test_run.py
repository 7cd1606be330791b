"""`qgate run`: which suites pytest gets, with which words, and whose status comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from qgate.cli import main
from qgate.cli import run as command
from qgate.project.run_words import RECEIPT

Started = Callable[..., list[str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a folder of suites, where the command is run."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "test_a.py").write_text("def test_a(): pass\n")
    (tmp_path / "qgate.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return the words that pytest would be started with."""

    def words(*argv: str, status: int = 0) -> list[str]:
        commands: list[list[str]] = []

        def note(line: list[str], environment: Mapping[str, str]) -> int:
            Path(environment[RECEIPT]).write_text(json.dumps({"exit": status}))
            commands.append(line)
            return status

        monkeypatch.setattr(command, "_finished", note)
        assert main([*argv]) == status
        (line,) = commands
        start = [sys.executable, "-m", "pytest", "-p", "qgate.plugin.closed_pipes"]
        assert line[:5] == start
        return line[5:]

    return words


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ("run", "suites"),
        ("run --mode 2-1 -n 2 --co", "suites --mode 2-1 -n 2 --co"),
        ("run suites/test_a.py -k int8", "suites/test_a.py -k int8"),
        ("run elsewhere --maxfail 1", "elsewhere --maxfail 1"),
        ("run -x suites/test_a.py::test_a", "-x suites/test_a.py::test_a"),
        ("run --ignore suites/test_a.py", "suites --ignore suites/test_a.py"),
        ("run --mode=suites", "suites --mode=suites"),
        ("run --color=never -q", "suites --color=no -q"),
        ("run --color always", "suites --color yes"),
        ("run --color yes", "suites --color yes"),
        ("run -k never", "suites -k never"),
        ("--quiet run", "suites --quiet"),
        ("--color never run -x", "suites -x --color=no"),
    ],
)
@pytest.mark.usefixtures("project")
def test_pytest_gets_the_suites_and_every_other_word(
    typed: str, passed: str, started: Started
) -> None:
    assert started(*typed.split()) == passed.split()


def test_suites_are_found_from_below_and_by_the_settings(
    project: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    (project / "src").mkdir()
    monkeypatch.chdir(project / "src")
    assert started("run") == [str(Path("..", "suites"))]
    (project / "suites").rename(project / "gates")
    (project / "qgate.toml").write_text('suites = ["gates/test_a.py", "gates"]\n')
    assert started("run", "-x") == [
        *(str(Path("..", s)) for s in ("gates/test_a.py", "gates")),
        "-x",
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("", ["suites' does not exist", "qgate run PATH", "`qgate init`"]),
        ('suites = "gone"', ["names the suites", "gone'", "qgate.toml"]),
        ("suites = 3", ["suites = 3 is not allowed; it is a path or a list of paths"]),
        ("suite = 'x'", ["unknown key 'suite'. Did you mean suites"]),
    ],
)
def test_missing_suites_are_one_line(
    settings: str, words: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "suites").rename(project / "elsewhere")
    (project / "qgate.toml").write_text(settings)
    assert main(["run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("qgate run: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_the_status_is_that_of_the_program() -> None:
    def ended(code: str) -> int:
        return command._finished([sys.executable, "-c", code], os.environ)

    assert [ended(f"raise SystemExit({status})") for status in (0, 1, 5)] == [0, 1, 5]
    assert ended("import os; os.kill(os.getpid(), 9)") == 128 + 9


def test_what_ends_the_command_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def stopped(process: subprocess.Popen[bytes]) -> int:
        begun.append(process)
        monkeypatch.undo()
        raise SystemExit(143)

    monkeypatch.setattr(subprocess.Popen, "wait", stopped)
    with pytest.raises(SystemExit):
        command._finished([sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
    assert begun[0].returncode == -signal.SIGTERM


@pytest.mark.parametrize("words", [[], ["--gate-from", "HEAD"]], ids=["plain", "gates of a base"])
def test_a_command_that_is_terminated_leaves_no_program(words: list[str], project: Path) -> None:
    scratch = project / "scratch"
    scratch.mkdir()
    begun = project / "begun"
    text = f"""
import pathlib, time, pytest

@pytest.mark.qgate
def test_a():
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(600)
"""
    (project / "suites" / "test_a.py").write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for line in (["init", "-q"], ["add", "suites", "qgate.toml"], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *line], check=True)
    program = [sys.executable, "-m", "qgate", "run", *words, "-p", "no:cacheprovider"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE) as process:
        while not begun.exists() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        process.communicate()  # to the end of all that hold the pipe
    assert process.returncode == 128 + signal.SIGTERM
    assert begun.exists()
    assert list(scratch.glob("qgate-scratch-*")) == []


def test_a_program_that_handles_ctrl_c_says_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, interrupts = subprocess.Popen.wait, [KeyboardInterrupt]

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if interrupts:
            raise interrupts.pop()
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    assert command._finished([sys.executable, "-c", "raise SystemExit(2)"], os.environ) == 2


def test_pytest_itself_runs_and_its_status_comes_back(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "suites" / "test_b.py").write_text("def test_b(): assert 1 == 2\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert main(["run", "-p", "qgate.plugin", "-rf", "--tb=no"]) == 1
    assert "1 failed, 1 passed" in capfd.readouterr().out
