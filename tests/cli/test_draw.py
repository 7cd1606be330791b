"""`qgate dumps draw`: what it writes, says, refuses and leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from qgate.cli import _draw, main
from qgate.drawing.compute import DrawingRequest, analyze_dump
from qgate.drawing.findings import summary_line
from qgate.drawing.page import SECTIONS
from qgate.drawing.plots.pictures import PICTURES
from qgate.drawing.reading import read_analysis
from qgate.dumps import DumpWriter
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.dumps.making import known, record
from tests.shares import proof, share

pytestmark = share(4, group="drawings")

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
                        tensor_record = record(
                            order, layer_type=kind, operation=operation, name=name, layer=layer,
                            module=f"layers.{layer}.{kind}", quant_type=quant, rank=rank,
                            world_size=3, sample=layer,
                        )  # fmt: skip
                        writer.add(tensor_record, x.bfloat16())
                        order += 1
    return folder


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


def refusal(capsys: Capsys, *args: object) -> str:
    """The error of a command with status 2."""
    assert run(*args) == 2
    return capsys.readouterr().err


def draw_only(monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    """Leave the pictures of these topics, which are faster drawn than all."""
    few = tuple(picture for picture in PICTURES if picture.folder in folders)
    monkeypatch.setattr("qgate.drawing.plots.pictures.PICTURES", few)


@pytest.fixture(scope="module")
def drawn(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump with the first picture of every topic."""
    folder = tmp_path_factory.mktemp("drawn") / "draw"
    first = {picture.folder: picture for picture in reversed(PICTURES)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qgate.drawing.plots.pictures.PICTURES", tuple(first.values()))
        assert run("dumps", "draw", dump, "--jobs", 2, "--output-dir", folder) == 0
    return folder


def test_draw_writes_every_topic(drawn: Path) -> None:
    # Nothing overflows in it.
    folders = {path.parent.name for path in drawn.rglob("*.png")}
    assert folders >= {*SECTIONS} - {"overflow_analysis"}
    assert "overflow_analysis" not in folders
    for name in ("quick_analysis.png", "tensor_stats.txt", "index.html", "analysis.json"):
        assert (drawn / name).stat().st_size > 0
    assert len(pd.read_csv(drawn / "statistics/tensors.csv")) == 60
    analysis = json.loads((drawn / "analysis.json").read_text())
    assert analysis["comparison"]["second"] == "mxfp8"


@proof
def test_every_picture_is_built_of_what_draw_analyzes(drawn: Path) -> None:
    """Without laying them out, which takes most of the time; tests/drawing does that."""
    analysis = read_analysis(location_of(drawn / "analysis.json"))
    left_out = [picture.path for picture in PICTURES if picture.draw.build(analysis) is None]
    assert {path for path in left_out if not path.startswith("overflow_analysis/")} == {
        "heatmaps/saturated.png",
        "layer_analysis/batches.png",
    }


def test_an_analysis_is_drawn_without_the_dump(dump: Path, here: Path, capsys: Capsys) -> None:
    assert run("dumps", "draw", dump, "--no-plots", "--output-dir", "a") == 0
    assert "60 tensors, 0 pictures: a/index.html" in capsys.readouterr().out
    assert not list(here.rglob("*.png"))
    assert run("dumps", "draw", "a/analysis.json", "--no-plots", "--output-dir", "b") == 0
    for name in ("tensor_stats.txt", "statistics/tensors.csv", "analysis.json"):
        assert Path("a", name).read_text() == Path("b", name).read_text()


def test_quick_draws_one_picture(dump: Path, here: Path, capsys: Capsys) -> None:
    assert run("dumps", "draw", dump, "--quick", "--where", "layer=0") == 0
    written = {"quick_analysis.png", "tensor_stats.txt", "written.json"}
    assert {path.name for path in (here / "draw").iterdir()} == written
    assert (here / "draw/quick_analysis.png").stat().st_size > 10_000
    assert "30 tensors: draw/quick_analysis.png" in capsys.readouterr().out
    assert run("dumps", "draw", dump, "--no-plots") == 0, "it is qgate's"
    assert run("dumps", "draw", dump, "--quick", "--where", "layer=0") == 0
    assert (here / "draw/index.html").is_file()
    (here / "foreign").mkdir()
    (here / "foreign/quick_analysis.png").write_text("mine")
    refused = refusal(capsys, "dumps", "draw", dump, "--quick", "--output-dir", "foreign")
    assert "was not drawn by qgate" in refused
    assert (here / "foreign/quick_analysis.png").read_text() == "mine"


@pytest.mark.usefixtures("here")
def test_quick_says_how_many_tensors_it_read(
    dump: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it `all values are finite` was said of a dump that had hardly been looked at."""
    monkeypatch.setattr(_draw, "_QUICK_TENSORS", 7)
    assert run("dumps", "draw", dump, "--quick", "--where", "layer=0") == 0
    assert "7 of 30 tensors were looked at, evenly spaced" in capsys.readouterr().out
    analysis = analyze_dump(dump, request=DrawingRequest(tensors=7))
    assert summary_line(analysis).startswith("7 of 60 tensors, evenly spaced, ")


@pytest.mark.usefixtures("here")
def test_a_folder_of_the_megatron_tensor_saver_is_drawn(capsys: Capsys) -> None:
    known(Path("k"), torch.randn(16, 64).bfloat16(), counter=1)
    assert run("dumps", "draw", "k", "--no-plots") == 0
    assert "1 tensors, 0 pictures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nowhere"], "nowhere' is not there"),
        (["DUMP", "--format", "fp8_e4m4"], "fp8_e4m4"),
        (["DUMP", "--compare", "hifp8"], "give two names"),
        (["DUMP", "--compare", "hifp8,mxpf8"], "mxpf8"),
        (["DUMP", "--where", "layer=7"], "unknown layer in this dump '7'"),
        (["DUMP", "--output-dir", "taken"], "'taken' is a file"),
    ],
)
def test_refused_options_write_nothing(
    dump: Path, here: Path, capsys: Capsys, args: list[str], says: str
) -> None:
    Path("taken").write_text("mine")
    before = sorted(here.rglob("*"))
    assert says in refusal(
        capsys, "dumps", "draw", *(dump if arg == "DUMP" else arg for arg in args)
    )
    assert sorted(here.rglob("*")) == before


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "args", [["--jobs", "0"], ["--rows", "x"], ["--seed", "x"], ["--where", "layer=x"]]
)
def test_options_that_are_no_numbers_are_refused(dump: Path, args: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("dumps", "draw", dump, *args)
    assert end.value.code == 2


@pytest.mark.usefixtures("here")
def test_a_foreign_page_is_left_alone(dump: Path, capsys: Capsys) -> None:
    Path("draw").mkdir()
    Path("draw/index.html").write_text("mine")
    assert "index.html" in refusal(capsys, "dumps", "draw", dump, "--no-plots")
    assert Path("draw/index.html").read_text() == "mine"
    assert [path.name for path in Path("draw").iterdir()] == ["index.html"]


@pytest.mark.usefixtures("here")
def test_drawing_again_replaces_the_earlier_drawing(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_only(monkeypatch, "rank_analysis")
    assert run("dumps", "draw", dump) == 0
    assert list(Path("draw").rglob("*.png"))
    assert "grad_input" in Path("draw/tensor_stats.txt").read_text()
    Path("draw/notes.txt").write_text("mine")
    assert run("dumps", "draw", dump, "--where", "operation=forward", "--no-plots") == 0
    assert not list(Path("draw").rglob("*.png"))
    assert Path("draw/notes.txt").read_text() == "mine"
    assert "grad_input" not in Path("draw/tensor_stats.txt").read_text()


@pytest.mark.usefixtures("here")
def test_an_output_folder_that_cannot_be_made_is_named(dump: Path, capsys: Capsys) -> None:
    assert "/proc/drawn" in refusal(
        capsys, "dumps", "draw", dump, "--no-plots", "--output-dir", "/proc/drawn"
    )


@pytest.mark.usefixtures("here")
def test_the_console_says_what_draw_skips(capsys: Capsys) -> None:
    with DumpWriter(Path("d")) as writer:
        writer.add(record(0, module="a"), torch.randn(4, 32).bfloat16())
        writer.add(record(1, module="b"), torch.arange(9))
        stats = {"min": -2.0, "max": 3.0, "mean": 0.5, "std": 1.0}
        writer.add(record(2, module="c", dtype="bfloat16", shape=(8, 8), stats=stats))
    assert (
        run("dumps", "draw", "d", "--no-plots", "--format", "nvfp4", "--compare", "nvfp4,hif8") == 0
    )
    out = capsys.readouterr().out
    assert "skipped tensors   1 tensors are left out, empty or without floating point" in out
    assert "skipped formats   nvfp4 in 1 of 2 tensors: 1 tensor kept without values" in out
    assert "skipped pictures  all: --no-plots" in out


@pytest.mark.usefixtures("here")
def test_the_console_says_why_a_topic_has_no_pictures(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DumpWriter(Path("d")) as writer:
        writer.add(record(0, module="a"), torch.randn(4, 32).bfloat16())
    draw_only(monkeypatch, "rank_analysis", "overflow_analysis", "heatmaps")
    assert run("dumps", "draw", "d", "--format", "fp8_e4m3") == 0
    out = capsys.readouterr().out
    assert "skipped pictures  rank_analysis: There is only one rank." in out
    assert "skipped pictures  overflow_analysis: Nothing overflows" in out
    assert "skipped pictures  heatmaps" not in out


# To a bucket -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_an_analysis_in_a_bucket_is_drawn_again(dump: Path, memory: Any) -> None:
    assert run("dumps", "draw", dump, "--output-dir", "memory://a/draw", "--no-plots") == 0
    first = {name: memory.cat(name) for name in memory.find("/a")}
    analysis_url = "memory://a/draw/analysis.json"
    assert run("dumps", "draw", analysis_url, "--output-dir", "memory://a/draw", "--no-plots") == 0
    assert {name: memory.cat(name) for name in memory.find("/a")} == first
    assert {"/a/draw/index.html", "/a/draw/written.json"} < first.keys()


@pytest.mark.usefixtures("here")
def test_a_foreign_page_in_a_bucket_is_left_alone(dump: Path, memory: Any, capsys: Capsys) -> None:
    memory.pipe("/a/index.html", b"mine")
    assert "was not drawn by qgate" in refusal(
        capsys, "dumps", "draw", dump, "--output-dir", "memory://a"
    )
    assert memory.cat("/a/index.html") == b"mine"


@proof
@pytest.mark.usefixtures("here")
def test_quick_draws_into_a_bucket(dump: Path, memory: Any, capsys: Capsys) -> None:
    assert (
        run("dumps", "draw", dump, "--quick", "--where", "layer=0", "--output-dir", "memory://c/d")
        == 0
    )
    assert memory.cat("/c/d/quick_analysis.png").startswith(b"\x89PNG")
    refused = refusal(capsys, "dumps", "draw", dump, "--quick", "--output-dir", "foo://a")
    assert "foo:// is not known" in refused


@pytest.mark.usefixtures("here")
def test_a_bucket_that_refuses_is_named(
    dump: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    opened = type(memory)._open

    def refuse(store: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            raise PermissionError("Access Denied")
        return opened(store, path, mode, **options)

    monkeypatch.setattr(type(memory), "_open", refuse)
    message = refusal(
        capsys, "dumps", "draw", dump, "--quick", "--where", "layer=0", "--output-dir", "memory://a"
    )
    assert "Access Denied" in message
    assert "memory://a/" in message
