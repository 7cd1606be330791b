"""What a drawing of a dump leaves on disk: page, texts, tables, record, and nothing of others."""

from __future__ import annotations

import copy
import csv
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from qgate.charts.sheet import Drawing
from qgate.drawing import files as dump_drawing
from qgate.drawing import tables as dump_tables
from qgate.drawing import texts as dump_text
from qgate.drawing.files import check_folder, draw_analysis
from qgate.drawing.findings import worst_tensors
from qgate.drawing.page import SECTIONS, page
from qgate.drawing.plots import pictures as dump_pictures
from qgate.drawing.plots.pictures import PICTURES
from qgate.drawing.reading import read_analysis
from qgate.errors import QgateError
from qgate.summaries.record import DumpAnalysis
from tests import bucket as stores
from tests.charts.page_reader import PageReader
from tests.shares import proof, share

memory = stores.memory
FEW = tuple(picture for picture in PICTURES if picture.folder in ("", "rank_analysis"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_pictures, "PICTURES", FEW)


class Drawn(NamedTuple):
    folder: Path
    written: list[Any]
    steps: list[tuple[int, int]]


@pytest.fixture(scope="module")
def drawn(normal: DumpAnalysis, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """A drawing of a few pictures, for the tests that look at what it left."""
    folder, steps = tmp_path_factory.mktemp("drawn") / "a" / "draw", list[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dump_pictures, "PICTURES", FEW)
        written = draw_analysis(normal, folder, progress=lambda *at: steps.append(at), dpi=16)
    return Drawn(folder, written, steps)


# The folder -----------------------------------------------------------------------------------------


@proof
def test_a_drawing_writes_and_lists_all_files(normal: DumpAnalysis, drawn: Drawn) -> None:
    folder, written, steps = drawn
    assert written[0] == folder / "index.html"
    assert all(path.stat().st_size for path in written)
    files = {p for p in folder.rglob("*") if p.is_file()}
    assert files == {*written, folder / "written.json"}
    assert steps == [(i + 1, len(FEW)) for i in range(len(FEW))]
    assert read_analysis(folder / "analysis.json") == normal


@proof
@pytest.mark.usefixtures("few")
def test_pictures_of_earlier_drawings_go_and_foreign_files_stay(
    normal: DumpAnalysis, tmp_path: Path
) -> None:
    draw_analysis(normal, tmp_path, dpi=20)
    foreign = tmp_path / "rank_analysis" / "mine.png"
    foreign.write_text("mine")
    assert (tmp_path / "rank_analysis" / "scores.png").exists()
    draw_analysis({**normal, "ranks": None}, tmp_path, dpi=20)
    assert not (tmp_path / "rank_analysis" / "scores.png").exists()
    assert foreign.read_text() == "mine"
    foreign.unlink()
    draw_analysis({**normal, "ranks": None}, tmp_path, plots=False)
    assert not (tmp_path / "rank_analysis").exists()
    assert not (tmp_path / "quick_analysis.png").exists()


@proof
def test_attention_is_drawn_under_two_names(
    normal: DumpAnalysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [picture for picture in PICTURES if picture.path == "attention_analysis/layers.png"]
    monkeypatch.setattr(dump_pictures, "PICTURES", tuple(layers))
    copy_of = tmp_path / "attention_maps" / "layers.png"
    assert copy_of in draw_analysis(normal, tmp_path, dpi=16)
    assert copy_of.read_bytes() == (tmp_path / "attention_analysis" / "layers.png").read_bytes()
    draw_analysis(normal, tmp_path, plots=False)
    assert not copy_of.parent.exists()
    copy_of.parent.mkdir()
    copy_of.write_text("mine")
    with pytest.raises(QgateError, match=r"attention_maps/layers\.png"):
        draw_analysis(normal, tmp_path, plots=False)


@share(3)
@pytest.mark.parametrize("name", ["index.html", "heatmaps/amax.png", "written.json"])
def test_a_foreign_file_is_not_overwritten(name: str, normal: DumpAnalysis, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(QgateError, match="give another folder"):
        check_folder(tmp_path)
    with pytest.raises(QgateError, match=re.escape(name)):
        draw_analysis(normal, tmp_path, plots=False)
    assert (tmp_path / name).read_text() == "mine"


def test_listed_paths_outside_the_folder_are_ignored(tmp_path: Path) -> None:
    names = ["../x", "/x", "a/../../x", "a/b/c", "..", "ok.png", "a/ok.png", 3, "a\\..\\x"]
    listing = {"kind": "qgate dump drawing 1", "files": names}
    (tmp_path / "written.json").write_text(json.dumps(listing))
    assert dump_drawing._earlier_files(tmp_path) == ["ok.png", "a/ok.png"]


@proof
@pytest.mark.usefixtures("few")
def test_processes_draw_the_same(normal: DumpAnalysis, drawn: Drawn, tmp_path: Path) -> None:
    two = draw_analysis(normal, tmp_path, workers=2, dpi=16)
    assert [p.relative_to(drawn.folder) for p in drawn.written] == [
        p.relative_to(tmp_path) for p in two
    ]
    for a, b in zip(drawn.written, two, strict=True):
        assert a.read_bytes() == b.read_bytes()


@proof
@pytest.mark.usefixtures("few")
def test_a_drawing_in_a_bucket_equals_one_in_a_folder(
    normal: DumpAnalysis, drawn: Drawn, memory: Any
) -> None:
    objects = draw_analysis(normal, "memory://a", dpi=16)
    assert [location.name for location in objects] == [path.name for path in drawn.written]
    contents = {name.removeprefix("/a/"): memory.cat(name) for name in memory.find("/a")}
    files = [path for path in drawn.folder.rglob("*") if path.is_file()]
    assert contents == {str(path.relative_to(drawn.folder)): path.read_bytes() for path in files}
    draw_analysis(normal, "memory://a", plots=False)
    assert not [name for name in memory.find("/a") if name.endswith(".png")]


@proof
def test_a_picture_that_fails_is_named_and_all_others_are_drawn(
    normal: DumpAnalysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_analysis: DumpAnalysis) -> None:
        raise ZeroDivisionError("of <nothing>")

    broken = dump_pictures.DumpPicture("heatmaps", "bad.png", "Bad.", Drawing(fails))
    monkeypatch.setattr(dump_pictures, "PICTURES", (broken, *FEW))
    with pytest.raises(
        QgateError, match=r"1 of 4 pictures .* heatmaps/bad\.png: ZeroDivisionError"
    ):
        draw_analysis(normal, tmp_path, dpi=20)
    text = (tmp_path / "index.html").read_text()
    assert "heatmaps/bad.png could not be drawn: ZeroDivisionError: of &lt;nothing&gt;" in text
    assert (tmp_path / "rank_analysis" / "scores.png").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind": "qgate dump analysis 3"}', "another version"),
        ('{"kind": "results 1"}', "its kind is 'results 1'"),
        ("[]", "its kind is None"),
        ("{", "is no analysis"),
        ('{"kind": NaN}', "NaN is no number"),
        ('{"kind": "qgate dump analysis 2"}', "it has no comparison, dump"),
    ],
)
def test_another_record_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(QgateError, match=words):
        read_analysis(tmp_path / "a.json")
    with pytest.raises(QgateError, match="there is no analysis"):
        read_analysis(tmp_path / "b.json")


# The page -------------------------------------------------------------------------------------------


@proof
def test_the_page_needs_nothing_but_its_pictures(drawn: Drawn) -> None:
    folder = drawn.folder
    text = (folder / "index.html").read_text(encoding="utf-8")
    read = PageReader(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert not read.all("link")
    assert all(not attributes.get("src") for attributes in read.all("script"))
    pictures = read.all("svg")
    assert len(pictures) == len(FEW)
    for picture in pictures:
        assert picture["aria-label"]
        assert int(picture["width"] or 0) > 0
        assert int(picture["height"] or 0) > 0
    assert all(f"href='{plot.path}'" in text for plot in FEW)
    for link in read.all("a"):
        target = link["href"] or ""
        anchors = {attributes.get("id") for _, attributes in read.tags}
        assert target[1:] in anchors if target.startswith("#") else (folder / target).is_file()
    folders = {few_picture.folder for few_picture in FEW} - {""}
    assert {*SECTIONS} & {s.get("id") for s in read.all("section")} == folders


def test_the_page_begins_with_broken_tensors(normal: DumpAnalysis) -> None:
    text = page(normal, [], [])
    levels = re.findall(r"<li class='(fail|warn|info)'>", text)
    assert levels == sorted(levels, key=("fail", "warn", "info").index)
    assert levels[0] == "fail"
    assert "12 NaN, 1 +Inf, 2 −Inf" in text
    assert text.index("12 NaN") < text.index("Worst tensors")
    assert "prefers-color-scheme: dark" in text


def test_names_on_the_page_stay_text(hostile: DumpAnalysis) -> None:
    text = page(hostile, [], [])
    read = PageReader(text)
    text = text.replace("<wbr>", "")
    assert len(read.all("script")) == 1
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\x07" not in text
    assert "名前-テンソル-é" in text
    allowed = (
        "html head meta title style body main h1 span p h2 ul li b nav a small section div table "
        "thead tr th button tbody td script wbr details summary"
    )
    assert {tag for tag, _ in read.tags} <= {*allowed.split()}


def test_sections_without_pictures_are_not_there_and_say_why(extreme: DumpAnalysis) -> None:
    text = page(extreme, [], [])
    reasons = text.partition("<summary>Not on this page: ")[2]
    for name, (title, why) in SECTIONS.items():
        assert f"<section id='{name}'>" not in text
        assert f"<li>{title}: {why}</li>" in reasons


# Texts and tables -----------------------------------------------------------------------------------


def test_tensor_stats_has_the_numbers(normal: DumpAnalysis) -> None:
    text = dump_text.tensor_stats(normal)
    assert "tensors             240" in text
    assert re.search(r"^range +-44600 to 26500$", text, re.MULTILINE)
    assert re.search(r"^hifp8 +120 +409,600 +50\.0 %", text, re.MULTILINE)
    assert re.search(r"^linear +144 +491,520 +60\.0 %", text, re.MULTILINE)
    assert re.search(r"^backward +72 ", text, re.MULTILINE)
    assert re.search(r"grad_output, hifp8, r1, it 0, s1 +12 +1 +2$", text, re.MULTILINE)
    assert re.search(r"^hif8 +2\^9 +2\^8 +2\^8 +22\.0 % +0\.2 %$", text, re.MULTILINE)
    assert re.search(r"^2 \(stands out\) +80 ", text, re.MULTILINE)
    assert "not equal on all ranks: L1 linear forward weight" in text
    assert "values rounded to bf16" in text
    assert text.index("BROKEN") < text.index("LOSS") < text.index("Totals")


def test_lines_of_tensor_stats_are_short_and_printable(extreme: DumpAnalysis) -> None:
    text = dump_text.tensor_stats(extreme)
    assert text.endswith("\n")
    for line in text.splitlines():
        assert len(line) <= 100
        assert line.isprintable()


def test_the_worst_tensors_say_which_they_are(normal: DumpAnalysis) -> None:
    """The linears of a layer share a title; seen cut so that grad_input and grad_output were one."""
    worst = worst_tensors(normal, 1)[0].tensor
    analysis = copy.deepcopy(normal)
    for tensor in analysis["tensors"]:
        if tensor["order"] == worst["order"] and tensor["rank"] == worst["rank"]:
            tensor["title"] = (
                "L3 layers.3.mlp.dense_4h_to_h backward grad_output, rank 12, iteration 0"
            )
    part = dump_text.tensor_stats(analysis).split("Worst tensors")[1]
    assert "L3 layers.3.mlp.dense_4h_to_h backward grad_output, rank 12, iteration 0\n" in part
    table_text = page(analysis, [], []).split("<h2>Worst tensors")[1].replace("<wbr>", "")
    assert "layers.3.mlp.dense_4h_to_h" in table_text


def test_the_pooled_deviation_is_that_of_all_values(normal: DumpAnalysis) -> None:
    whole = dump_text._Sizes()
    for tensor in normal["tensors"]:
        if tensor["name"] == "query":
            whole.add(tensor)
    mean, std = whole.pooled()
    group = [g for g in normal["groups"] if g["name"] == "query"]
    assert std == pytest.approx(sum(g["std"] for g in group) / 2, rel=1e-3)
    assert mean == pytest.approx(sum(g["mean"] for g in group) / 2, abs=1e-6)


def test_tables_come_back_with_pandas(normal: DumpAnalysis) -> None:
    tensors = pd.read_csv(StringIO("".join(dump_tables.tensors_csv(normal))))
    assert len(tensors) == 240
    assert list(tensors["rms"]) == [t["rms"] for t in normal["tensors"]]
    assert list(tensors["title"]) == [t["title"] for t in normal["tensors"]]
    assert set(tensors["shape"]) == {"1x32x64", "2x32x64"}
    assert set(tensors.loc[tensors["name"] == "output", "channel"]) == {17}
    formats = pd.read_csv(StringIO("".join(dump_tables.formats_csv(normal))))
    assert len(formats) == 240 * 8
    row = formats[formats["format"] == "mxfp4_e2m1"].iloc[0]
    outcome = normal["tensors"][0]["formats"]["mxfp4_e2m1"]
    assert 10 ** (row["sqnr_db"] / 10) == pytest.approx(outcome["signal"] / outcome["noise"])
    groups = pd.read_csv(StringIO("".join(dump_tables.groups_csv(normal))))
    assert list(groups["tensors"]) == [g["tensors"] for g in normal["groups"]]


def test_no_cell_of_a_table_is_a_formula(hostile: DumpAnalysis) -> None:
    for table in (dump_tables.tensors_csv, dump_tables.formats_csv, dump_tables.groups_csv):
        text = "".join(table(hostile))
        rows = list(csv.reader(StringIO(text)))
        assert len({len(row) for row in rows}) == 1
        for row in rows:
            for value in row:
                number = re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", value)
                assert number or not value.startswith(("=", "+", "-", "@", "\t", "\r"))
                assert value.isprintable()
        assert "'=cmd()|'!A1" in text
