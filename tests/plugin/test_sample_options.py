"""--text, --tokens and --calib-text of a run: what models run on, and files that cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qgate.models import language

TEXT = language.text("training", 4000)
SHORT = ("--model=tiny-llama", "--mode=int8", "--samples=2", "--seqlen=64", "--calib-samples=2")
RUN = ("suites", *SHORT, "--calib-seqlen=64", "-q", "-p", "no:cacheprovider")
OWN = """
def test_samples(model):
    (file, calibration) = open("expected").read().split()
    content, more = open(file, "rb").read(), open(calibration, "rb").read()
    assert all(bytes(row[0].tolist()) in content for row in model.inputs)
    assert all(bytes(row[0].tolist()) in more for row in model.calibration_samples())
    assert [tuple(row.shape) for row in model.inputs] == [(1, 64)] * 2
"""


@pytest.fixture
def home(pytester: pytest.Pytester) -> Path:
    """A project with a suite that looks at its samples, a text, another one, and token ids."""
    pytester.mkdir("suites")
    pytester.mkdir("data")
    (pytester.path / "suites" / "test_own.py").write_text(OWN)
    data = pytester.path / "data"
    (data / "mine.txt").write_text(TEXT)
    (data / "other.txt").write_text(TEXT[:2000].upper())
    np.save(data / "ids.npy", np.frombuffer(TEXT.encode(), dtype=np.uint8)[:512])
    np.save(data / "floats.npy", np.ones(300, dtype=np.float32))
    np.save(data / "large.npy", np.arange(300))
    (data / "short.txt").write_text("too short")
    return pytester.path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--text", "data/mine.txt", "--calib-text", "data/other.txt"], "mine other"),
        (["--tokens", "data/ids.npy"], "mine mine"),
        (["--tokens", "data/ids.npy", "--calib-text", "data/other.txt"], "mine other"),
    ],
)
@pytest.mark.parametrize("place", ["command", "file"])
def test_a_run_on_files(
    place: str,
    options: list[str],
    expected: str,
    home: Path,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are relative to the command where it names them, and to the project in its settings."""
    own, calibration = expected.split()
    folder, paths = home, RUN
    if place == "file":
        options = _in_file(home, options)
        folder, paths = pytester.mkdir("below"), ("../suites", *RUN[1:])
        monkeypatch.chdir(folder)
    (folder / "expected").write_text(f"{home}/data/{own}.txt {home}/data/{calibration}.txt")
    result = pytester.runpytest_inprocess(*paths, *options)
    result.assert_outcomes(passed=1)


def _in_file(home: Path, options: list[str]) -> list[str]:
    """Write options as settings of the project; none is left for the command line."""
    keys = [name.removeprefix("--").replace("-", "_") for name in options[::2]]
    lines = [f'{key} = "{value}"\n' for key, value in zip(keys, options[1::2], strict=True)]
    (home / "qgate.toml").write_text("".join(lines))
    return []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "data/gone.txt"], "data/gone.txt' cannot be read: No such file"),
        (["--calib-text", "data"], "data' cannot be read: Is a directory"),
        (["--text", "data/ids.npy"], "data/ids.npy' is not text in UTF-8"),
        (["--tokens", "data/gone.npy"], "data/gone.npy"),
        (["--tokens", "data/mine.txt"], "data/mine.txt"),
        (["--tokens", "data/floats.npy"], "token ids are whole numbers"),
        (["--tokens", "data/ids.npy", "--text", "data/mine.txt"], "give one of them"),
    ],
)
@pytest.mark.parametrize("place", ["command", "file"])
def test_a_bad_file_stops_the_whole_run(
    place: str, options: list[str], says: str, home: Path, pytester: pytest.Pytester
) -> None:
    options = _in_file(home, options) if place == "file" else options
    result = pytester.runpytest_inprocess(*RUN, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str()
    lines = [line for line in result.stderr.str().splitlines() if line]
    assert len(lines) == 1, lines
    assert says in lines[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "data/short.txt"], "2 samples of 64 tokens are more than the text has"),
        (["--tokens", "data/large.npy"], "takes token ids from 0 to 255"),
    ],
)
def test_a_file_that_does_not_fit_the_model_stops_it_too(
    options: list[str], says: str, home: Path, pytester: pytest.Pytester
) -> None:
    (home / "suites" / "test_gates.py").write_text(
        "def test_gate(gate, mode, layer): gate.layer(mode, layer)\n"
    )
    result = pytester.runpytest_inprocess(*RUN, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str()
    assert result.stderr.str().count(says) == 1


def test_the_command_of_a_failure_has_the_files(home: Path, pytester: pytest.Pytester) -> None:
    (home / "suites" / "test_own.py").write_text("def test_gate(gate): gate.reference()\n")
    result = pytester.runpytest_inprocess(*RUN, "--text", "data/mine.txt")
    assert result.ret != pytest.ExitCode.OK
    assert "--text data/mine.txt" in result.stdout.str()


def test_a_bad_file_of_a_project_leaves_its_other_tests_alone(
    home: Path, pytester: pytest.Pytester
) -> None:
    (home / "qgate.toml").write_text('text = "gone.txt"\n')
    (home / "test_other.py").write_text("def test_it(): pass\n")
    pytester.runpytest_inprocess("test_other.py").assert_outcomes(passed=1)


def test_a_callable_that_takes_no_text_says_so(home: Path, pytester: pytest.Pytester) -> None:
    (home / "own.py").write_text(
        "import qgate, torch\n"
        "def build(samples):\n"
        "    return qgate.Model(torch.nn.Linear(8, 8), [torch.randn(4, 8)], 'own')\n"
    )
    (home / "suites" / "test_own.py").write_text("def test_gate(gate, mode): gate.outputs(mode)\n")
    result = pytester.runpytest_inprocess(
        *RUN, "--model", "own.py:build", "--text", "data/mine.txt"
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--text would change nothing, as own.py:build has no such" in result.stderr.str()
