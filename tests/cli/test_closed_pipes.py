"""`| head -1`: a command whose reader has ended does all of its work, and ends with its own status."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qgate.cli import main
from qgate.storage.streams import prepare_streams
from tests.baselines.building import recorded
from tests.campaigns.forked import ran
from tests.campaigns.pipes import without_reader
from tests.cli.test_shared_options import JSON
from tests.cli.test_shared_options import place as place
from tests.cli.test_shared_options import prepared as prepared
from tests.shares import share


def status_of(line: str, folder: Path, *numbers: int) -> tuple[int, str]:
    ended = ran(lambda: main(line.split()), folder, without_reader(*numbers))
    return ended.status, ended.said


def damage_baselines(folder: Path) -> None:
    (folder / "baselines").unlink()
    recorded(folder / "baselines")
    path = next((folder / "baselines").rglob("*.txt"))
    path.write_bytes(path.read_bytes().replace(b"5", b"6"))


def damage_dump(folder: Path) -> None:
    shard = next((folder / "dump").resolve().rglob("*.safetensors"))
    (folder / "dump").unlink()
    copied = folder / "dump"
    for path in shard.parents[1].rglob("*"):
        if path.is_file():
            target = copied / path.relative_to(shard.parents[1])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    path = copied / shard.relative_to(shard.parents[1])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def nothing(_folder: Path) -> None:
    """Plant no fault: the folder has one."""


# Commands that are red, and how: what is planted in the folder first.
RED: dict[str, tuple[int, Callable[[Path], None]]] = {
    "sweep nan.pt --no-plots": (1, nothing),
    "baselines verify": (1, damage_baselines),
    "dumps verify dump": (1, damage_dump),
    "report qgate-out --merge out --exit-code": (1, nothing),
    "report --exit-code": (1, nothing),
    "report missing.jsonl": (2, nothing),
    "checkpoint missing": (2, nothing),
    "layers compare missing": (2, nothing),
}  # fmt: skip


# Commands that write no file and print no list, and their status.
PLAIN = {
    "check kernel.py:relu --like torch:relu --shape 4x4": 1,
    "doctor": 0,
    "dumps watch dump --expect 1 --timeout 0": 0,
}  # fmt: skip
_KERNEL = "import torch\ndef relu(x): return torch.where(x > 0, x, torch.zeros_like(x))  # no NaN\n"


@share(4)
@pytest.mark.parametrize("streams", [(1,), (1, 2)], ids=["stdout", "both"])
@pytest.mark.parametrize("line", RED)
def test_red_stays_red(line: str, streams: tuple[int, ...], place: Path) -> None:
    status, plant = RED[line]
    plant(place)
    assert status_of(line, place, *streams)[0] == status


@share(16)
@pytest.mark.parametrize("line", JSON)
def test_every_command_keeps_its_status(line: str, place: Path) -> None:
    assert status_of(line, place, 1, 2) == (JSON[line][0], "")


@pytest.mark.parametrize("line", PLAIN)
def test_other_commands_keep_their_status_too(line: str, place: Path) -> None:
    (place / "kernel.py").write_text(_KERNEL)
    before = {path.name for path in place.iterdir()}
    assert status_of(line, place, 1, 2) == (PLAIN[line], "")
    assert {path.name for path in place.iterdir()} - before <= {"__pycache__"}


def test_a_sweep_goes_on_without_its_reader(tmp_path: Path) -> None:
    for number in range(7):
        torch.save(torch.full((64,), 1.0 + number), tmp_path / f"{number}.pt")
    torch.save(torch.tensor([float("nan")]), tmp_path / "z.pt")
    files = " ".join(sorted(path.name for path in tmp_path.iterdir()))
    status, _ = status_of(f"sweep {files} --no-plots --output-dir out", tmp_path, 1, 2)
    assert status == 1
    assert (tmp_path / "out" / "index.html").exists()
    assert {path.parent.name for path in (tmp_path / "out").rglob("*.json")} == {*"0123456"}


@share(2)
@pytest.mark.parametrize("is_red", [True, False])
def test_a_run_of_pytest_goes_on_without_its_reader(is_red: bool, tmp_path: Path) -> None:
    (tmp_path / "suites").mkdir()
    text = f"""
import pathlib, pytest

@pytest.mark.parametrize("n", range(200))
def test_many(n):
    print("said")
    if n == 199:
        pathlib.Path("last").touch()
        assert {not is_red}
"""
    (tmp_path / "suites" / "test_many.py").write_text(text)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "qgate", "run", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=writing, check=False)
    os.close(writing)
    assert done.returncode == int(is_red)
    assert (tmp_path / "last").exists()


@pytest.mark.parametrize(
    ("words", "status"),
    [(["show", "formats"], 0), (["--help"], 0), (["report", "missing.jsonl"], 2)],
)
def test_a_process_ends_without_a_word_about_its_pipe(
    words: list[str], status: int, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "qgate", *words]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, check=False, text=True
    )
    os.close(writing)
    assert done.returncode == status
    assert "Broken pipe" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pipe_that_is_read_gets_every_byte(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qgate", "show", "formats", "--json"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    file = tmp_path / "out"
    with file.open("wb") as out:
        subprocess.run(command, cwd=tmp_path, stdout=out, check=True)
    assert done.stdout == file.read_bytes() != b""


def test_a_stream_of_ascii_shows_other_signs_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    prepare_streams()
    print("2 \u00d7 3")
    assert raw.getvalue() == b"2 \\xd7 3\n"
