"""`qgate draw` and `qgate quick`: what they write, say, refuse and leave alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from qgate.cli import main, quick
from qgate.drawing.compute import DrawingRequest, analyze_dump
from qgate.drawing.findings import summary_line
from qgate.dumps import DumpWriter
from qgate.summaries.record import FOLDERS
from tests import bucket as stores
from tests.dumps.making import known, record

Capsys = pytest.CaptureFixture[str]
memory = stores.memory


@pytest.fixture(autouse=True, scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, attention and linear, forward and backward, three ranks, two quant types."""
    folder = tmp_path_factory.mktemp("dumps") / "d"
    generator = torch.Generator().manual_seed(0)
    for rank in range(3):
        with DumpWriter(folder, rank=rank, world_size=3) as writer:
            order = 0
            for quant, noise in (("hifp8", 0.0), ("mxfp8", 0.02)):
                for layer in range(2):
                    for kind, operation, name in (
                        ("linear", "forward", "input"),
                        ("linear", "forward", "weight"),
                        ("linear", "backward", "grad_input"),
                        ("attention", "forward", "query"),
                        ("attention", "forward", "attention_weights"),
                    ):
                        x = torch.randn(64, 64, generator=generator)
                        x = x * (1 + noise) * (1e-5 if operation == "backward" else 1)
                        x = x.reshape(1, 1, 64, 64).softmax(-1) if "weights" in name else x
                        told = record(
                            order, layer_type=kind, operation=operation, name=name, layer=layer,
                            module=f"layers.{layer}.{kind}", quant_type=quant, rank=rank,
                            world_size=3, sample=layer,
                        )  # fmt: skip
                        writer.add(told, x.bfloat16())
                        order += 1
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def drawn(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "draw"
    assert run("draw", dump, "--jobs", 2, "--output-dir", folder) == 0
    return folder


def test_everything_is_drawn(drawn: Path) -> None:
    # Nothing overflows in it.
    folders = {path.parent.name for path in drawn.rglob("*.png")}
    assert folders >= {*FOLDERS} - {"overflow_analysis"}
    assert "overflow_analysis" not in folders
    for name in ("quick_analysis.png", "tensor_stats.txt", "index.html", "analysis.json"):
        assert (drawn / name).stat().st_size > 0
    assert len(pd.read_csv(drawn / "statistics/tensors.csv")) == 60
    told = json.loads((drawn / "analysis.json").read_text())
    assert told["comparison"]["second"] == "mxfp8"


def test_a_kept_record_is_drawn_without_the_dump(dump: Path, here: Path, capsys: Capsys) -> None:
    assert run("draw", dump, "--no-plots", "--output-dir", "a") == 0
    assert "60 tensors, 0 pictures: a/index.html" in capsys.readouterr().out
    assert not list(here.rglob("*.png"))
    assert run("draw", "a/analysis.json", "--no-plots", "--output-dir", "b") == 0
    for name in ("tensor_stats.txt", "statistics/tensors.csv", "analysis.json"):
        assert Path("a", name).read_text() == Path("b", name).read_text()


def test_the_overview(dump: Path, here: Path, capsys: Capsys) -> None:
    assert run("quick", dump, "--layer", 0) == 0
    assert (here / "quick_analysis.png").stat().st_size > 10_000
    assert "30 tensors: quick_analysis.png" in capsys.readouterr().out
    assert run("quick", dump, "--output", "pictures/one.png") == 2
    assert "no folder 'pictures'" in capsys.readouterr().err
    assert run("quick", dump, "--output", here) == 2
    assert "is a folder" in capsys.readouterr().err


def test_the_overview_in_a_folder(dump: Path, here: Path, capsys: Capsys) -> None:
    assert run("quick", dump, "--layer", 0, "--output-dir", "new/pictures") == 0
    assert (here / "new/pictures/quick_analysis.png").stat().st_size > 10_000
    assert "30 tensors: new/pictures/quick_analysis.png" in capsys.readouterr().out
    assert not (here / "quick_analysis.png").exists()
    (here / "note.txt").write_text("mine")
    for options, words in (
        (("--output-dir", "note.txt"), ["--output-dir 'note.txt' is a file", "name a folder"]),
        (("--output", "a.png", "--output-dir", "b"), ["'a.png'", "'b'", "give one of them"]),
        (("--output-dir", "foo://a"), ["foo:// is not known"]),
    ):
        assert run("quick", dump, *options) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert all(word in said for word in words), said
    assert (here / "note.txt").read_text() == "mine"
    assert not (here / "b").exists()


@pytest.mark.usefixtures("here")
def test_the_overview_says_of_how_many_tensors_it_is(
    dump: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it `all values are finite` was said of a dump that had hardly been looked at."""
    monkeypatch.setattr(quick, "_TENSORS", 7)
    assert run("quick", dump, "--layer", 0) == 0
    assert "7 of 30 tensors were looked at, evenly spaced" in capsys.readouterr().out
    looked = analyze_dump(dump, asked=DrawingRequest(tensors=7))
    assert summary_line(looked).startswith("7 of 60 tensors, evenly spaced, ")


@pytest.mark.usefixtures("here")
def test_a_folder_of_the_known_collector(capsys: Capsys) -> None:
    known(Path("k"), torch.randn(16, 64).bfloat16(), counter=1)
    assert run("draw", "k", "--no-plots") == 0
    assert "1 tensors, 0 pictures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nowhere"], "nowhere' is not there"),
        (["DUMP", "--format", "fp8_e4m4"], "fp8_e4m4"),
        (["DUMP", "--compare", "hifp8"], "give two names"),
        (["DUMP", "--compare", "hifp8,mxpf8"], "mxpf8"),
        (["DUMP", "--layer", "7"], "unknown layer in this dump '7'"),
        (["DUMP", "--output-dir", "taken"], "'taken' is a file"),
    ],
)
def test_what_cannot_be_drawn(
    dump: Path, here: Path, capsys: Capsys, args: list[str], says: str
) -> None:
    Path("taken").write_text("mine")
    before = sorted(here.rglob("*"))
    assert run("draw", *(dump if arg == "DUMP" else arg for arg in args)) == 2
    assert says in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "args", [["--jobs", "0"], ["--rows", "x"], ["--seed", "x"], ["--layer", "x"]]
)
def test_numbers_that_are_none(dump: Path, args: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("draw", dump, *args)
    assert end.value.code == 2


@pytest.mark.usefixtures("here")
def test_files_of_others_are_left_alone(dump: Path, capsys: Capsys) -> None:
    Path("draw").mkdir()
    Path("draw/index.html").write_text("mine")
    assert run("draw", dump, "--no-plots") == 2
    assert "index.html" in capsys.readouterr().err
    assert Path("draw/index.html").read_text() == "mine"
    assert [path.name for path in Path("draw").iterdir()] == ["index.html"]


@pytest.mark.usefixtures("here")
def test_drawing_again_replaces_what_was_drawn(dump: Path, drawn: Path) -> None:
    shutil.copytree(drawn, "draw")
    Path("draw/notes.txt").write_text("mine")
    assert run("draw", dump, "--operation", "forward", "--no-plots") == 0
    assert not list(Path("draw").rglob("*.png"))
    assert Path("draw/notes.txt").read_text() == "mine"
    assert "grad_input" not in Path("draw/tensor_stats.txt").read_text()


@pytest.mark.usefixtures("here")
def test_a_folder_that_cannot_be_made(dump: Path, capsys: Capsys) -> None:
    assert run("draw", dump, "--no-plots", "--output-dir", "/proc/drawn") == 2
    assert "/proc/drawn" in capsys.readouterr().err


# To a store --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_what_is_drawn_into_a_store_is_drawn_from_it_again(dump: Path, memory: Any) -> None:
    assert run("draw", dump, "--output-dir", "memory://a/draw", "--no-plots") == 0
    first = {name: memory.cat(name) for name in memory.find("/a")}
    again = "memory://a/draw/analysis.json"
    assert run("draw", again, "--output-dir", "memory://a/draw", "--no-plots") == 0
    assert {name: memory.cat(name) for name in memory.find("/a")} == first
    assert {"/a/draw/index.html", "/a/draw/written.json"} < first.keys()


@pytest.mark.usefixtures("here")
def test_what_is_not_of_a_drawing_stays_in_a_store(dump: Path, memory: Any, capsys: Capsys) -> None:
    memory.pipe("/a/index.html", b"mine")
    assert run("draw", dump, "--output-dir", "memory://a") == 2
    assert "was not drawn by qgate" in capsys.readouterr().err
    assert memory.cat("/a/index.html") == b"mine"


@pytest.mark.usefixtures("here")
def test_the_overview_in_a_store(dump: Path, memory: Any, capsys: Capsys) -> None:
    assert run("quick", dump, "--output-dir", "memory://c/d") == 0
    assert memory.cat("/c/d/quick_analysis.png").startswith(b"\x89PNG")
    memory.rm("/c", recursive=True)
    assert run("quick", dump, "--output", "memory://a/b.png") == 0
    assert memory.cat("/a/b.png").startswith(b"\x89PNG")
    for verb, option in (("quick", "--output"), ("draw", "--output-dir")):
        assert run(verb, dump, option, "foo://a/b.png") == 2
        assert "foo:// is not known" in capsys.readouterr().err
    assert run("quick", dump, "--output", "memory://a/b.odd") == 2
    assert "'memory://a/b.odd'" in capsys.readouterr().err
    assert memory.find("/") == ["/a/b.png"]


@pytest.mark.usefixtures("here")
def test_a_store_that_takes_nothing_is_named(
    dump: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(memory), "_open", refuse)
    assert run("quick", dump, "--output", "memory://a/b.png") == 2
    told = capsys.readouterr().err
    assert "Access Denied" in told
    assert "memory://a/b.png" in told
