"""The `qgate` command as a newcomer meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from qgate.cli import _formats as command
from qgate.cli import main
from qgate.formats import FORMATS
from qgate.storage.files import scratch_folder
from tests.shares import proof, share

Capsys = pytest.CaptureFixture[str]


def test_help_says_what_qgate_is_and_what_it_can(capsys: Capsys) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "quantized numerics are worse than their format allows" in text
    assert "formats" in text
    with pytest.raises(SystemExit) as stop:
        main(["show", "formats", "--help"])
    assert stop.value.code == 0
    assert "qgate show formats mxfp4 --plot mxfp4.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["activations", "layers calibrate", "layers capture", "show modes"]
)
def test_help_of_a_command_that_takes_a_model_says_how_to_name_it(
    command: str, capsys: Capsys
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert "hf:PATH=NAME" in capsys.readouterr().out


def test_the_table_names_every_format_with_its_figures(capsys: Capsys) -> None:
    assert main(["show", "formats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for fmt in FORMATS:
        row = next(line.split() for line in lines if line.startswith(f"{fmt.name} "))
        assert row[1] == str(fmt.bits)
        assert command.number(fmt.max) in row
        assert command.number(fmt.min_normal) in row
    assert max(map(len, lines)) <= 132


@share(8)
@pytest.mark.parametrize("name", FORMATS.names())
def test_every_format_can_be_shown_and_drawn(name: str, tmp_path: Path, capsys: Capsys) -> None:
    picture = tmp_path / "values.png"
    assert main(["show", "formats", name, "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(name)
    assert command.number(FORMATS.get(name).max) in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["values.png"]


def test_the_value_table_of_hif8_is_the_published_one(capsys: Capsys) -> None:
    main(["show", "formats", "hif8"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "0x" in line]
    assert rows[0] == ["0x00", "0", *(f"2^{e}" for e in range(-22, -15))]
    assert rows[13] == ["0x68", "4096", "6144", "8192", "12288", "16384", "24576", "32768", "Inf"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["show", "formats", "hif9"], ["'hif9'", "hif8"]),
        (["show", "formats", "hif8", "--plot", "x.pgn"], ["'x.pgn'", ".png"]),
        (["show", "formats", "hif8", "--plot", "nowhere/x.png"], ["nowhere"]),
        (["show", "formats", "--plot", "x.png"], ["x.png", "NAME"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    argv: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capsys,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in ["qgate show formats:", *words])
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    from PIL.Image import Image

    def full(_: Image, name: str, **__: object) -> None:
        Path(name).write_bytes(b"half a pict")
        raise OSError(28, "No space left on device")

    old = tmp_path / "int8.png"
    old.write_bytes(b"yesterday's")
    monkeypatch.setattr(Image, "save", full)
    assert main(["show", "formats", "int8", "--plot", str(old)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("int8.png", b"yesterday's")]


def test_a_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "qgate", "show", "formats"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (448.0, "448"),
        (0.0, "0"),
        (-0.0, "-0"),
        (2.0**-9, "2^-9"),
        (1.5 * 2.0**-12, "1.5*2^-12"),
        (-(2.0**-9), "-2^-9"),
        (float("inf"), "Inf"),
        (float("nan"), "NaN"),
        (2.0**127, "2^127"),
    ],
)
def test_numbers_are_short_and_exact(value: float, text: str) -> None:
    assert command.number(value) == text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["dumsp", "x"], ["qgate: ", "'dumsp'", "Did you mean dumps?", "Allowed: activations,"]),
        (["dumps", "wacht"], ["qgate dumps: ", "'wacht'", "Did you mean watch?"]),
        (["dumps", "draw"], ["qgate dumps draw: ", "required: DIR."]),
        (["dumps"], ["qgate dumps: ", "required: VERB: draw, ls, info, verify, compare"]),
        (
            ["dumps", "ls", "d", "--jsn"],
            ["qgate dumps ls: ", "Did you mean --json?", "`qgate dumps ls --help`"],
        ),
        (["help", "dumsp"], ["'dumsp'", "Did you mean dumps?"]),
        (
            ["--colour", "never", "formats"],
            ["qgate: unrecognized arguments: --colour. Did you mean --color?"],
        ),
        (["dumps", "draw", "d", "--ouput-dir", "x"], ["--ouput-dir", "Did you mean --output-dir?"]),
        (["run", "--gate-frmo", "main"], ["qgate run: ", "Did you mean --gate-from?"]),
        (["activations", "--modle", "x"], ["qgate activations: ", "Did you mean --model?"]),
        (
            ["layers", "compare", "2-1", "--refernce=0"],
            ["--refernce=0", "Did you mean --reference?"],
        ),
        (
            ["layers", "compare", "2-1", "2-2"],
            ["qgate layers compare: unrecognized arguments: 2-2."],
        ),
        (["layers", "capture", "--mode", "0", "--samples", "x"], ["--samples", "'x'"]),
        (
            ["layers", "capture", "--mode", "0", "--set", "calib_arithmetic=bf16"],
            ["calib_arithmetic = 'bf16'", "one of fp32, fp16"],
        ),
    ],
)
def test_a_typo_is_one_line_with_the_nearest_name_and_where_help_is(
    argv: list[str], words: list[str], capsys: Capsys
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert all(word in error for word in words), error
    assert error.endswith("--help` shows what it takes.\n")


def test_an_error_of_the_system_names_the_file_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def refuse(_args: object) -> int:
        raise PermissionError(13, "Permission denied", str(tmp_path / "x"))

    monkeypatch.setattr(command, "run", refuse)
    assert main(["show", "formats"]) == 2
    assert capsys.readouterr().err == (
        f"qgate show formats: '{tmp_path / 'x'}': Permission denied; name a file or folder that you "
        "may read and write.\n"
    )


def test_a_format_of_a_family_is_shown_by_its_name(capsys: Capsys) -> None:
    assert main(["show", "formats", "binary4p2ue"]) == 0
    text = capsys.readouterr().out
    assert "unsigned" not in text
    assert text.startswith("binary4p2ue\n")
    assert "0x8" in text
    assert "Inf" in text
    assert main(["show", "formats"]) == 0
    assert "binary{K}p{P}" in capsys.readouterr().out
    assert main(["show", "formats", "binary9p3se"]) == 2
    assert "K from 3 to 8" in capsys.readouterr().err


@proof
def test_python_without_docstrings_loads_the_commands_and_the_plugin(tmp_path: Path) -> None:
    """`python -OO` leaves none, and pytest loads the plugin in every run."""
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    options = ["-q", "-p", "qgate.plugin"]
    code = f"import qgate.cli, pytest; qgate.cli.parser(); raise SystemExit(pytest.main({options}))"
    done = subprocess.run(
        [sys.executable, "-OO", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize(
    "words", [["--help"], ["show", "modes"], ["report", "nothing"]], ids=" ".join
)
def test_a_closed_stream_is_no_traceback(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """Python has no stream where a command was started with `>&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    try:
        status = main(words)
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == (2 if words[0] == "report" else 0)
    assert "Traceback" not in capsys.readouterr().err


@share(2)
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_run_with_closed_streams_is_the_run(closed: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        "def test_it():\n"
        "    os.write(1, b'')\n"
        "    os.write(2, b'')\n"
        "    open('seen', 'w').close()\n"
    )
    run = subprocess.run(
        ["sh", "-c", f'exec "$0" -m qgate run test_it.py {closed}', sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert (tmp_path / "seen").exists()


def test_sigterm_ends_a_command_with_its_folders_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_args: object) -> int:
        with scratch_folder():
            assert any(tmp_path.iterdir())
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return 0

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("qgate.cli.show.run", run)
    # Ray leaves a handler of its own in a process that has used it.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as stop:
            main(["show", "modes"])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    assert stop.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


_INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

# A shell starts what runs in its background deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from qgate.__main__ import main
sys.meta_path.insert(0, Interrupting())
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["qgate.cli", "qgate.text.printing", "qgate.cli.sweep"])
def test_ctrl_c_before_the_command_begins_is_one_line(module: str) -> None:
    words = [sys.executable, "-c", _INTERRUPTED, module]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "\nqgate: interrupted\n")


@pytest.mark.parametrize(
    ("name", "program"), [("run", "qgate show formats"), ("arguments", "qgate")]
)
def test_ctrl_c_ends_a_command_with_one_line_of_its_name(
    name: str, program: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def interrupted(_args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, name, interrupted)
    assert main(["show", "formats"]) == 130
    assert capsys.readouterr().err == f"\n{program}: interrupted\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free.",
         "qgate show formats: the memory of GPU 0 (79.11 GiB, 1.20 GiB free; 2.00 GiB more wanted) is too small for qgate show formats."),
        ("CUDA error: device-side assert triggered", "while qgate show formats ran or earlier: nothing runs on that device"),
    ],
    ids=["memory", "assert"],
)  # fmt: skip
def test_an_error_of_a_device_is_one_sentence(
    text: str, words: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> int:
        raise (torch.OutOfMemoryError if "memory" in text else RuntimeError)(text)

    monkeypatch.setattr(command, "table", lambda: fails(None))
    assert main(["show", "formats"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
