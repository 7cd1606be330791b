"""A sweep in words and in pictures, for tensors that are easy and for those that are not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from qgate.charts import sheet as _sheet
from qgate.sweeps import plots
from qgate.sweeps import texts as sweep_text
from tests.shares import proof, share
from tests.sweeps.sweep_records import (
    BLOCKS,
    TENSORS,
    Record,
    activation,
    block_record,
    failing,
    tensor_record,
    undefined,
)

# The text ----------------------------------------------------------------------------------------

SECTIONS = [
    "INPUT TENSOR:",
    "PARAMETERS:",
    "SCALING LEVELS:",
    "SCALING FACTOR ANALYSIS & RECOMMENDATIONS",
    "INDIVIDUAL METRIC OPTIMA:",
    "COMPOSITE RECOMMENDATION:",
    "PERFORMANCE ANALYSIS:",
    "RECOMMENDATIONS:",
    "FINAL RECOMMENDATION:",
    "OVERFLOW/UNDERFLOW ANALYSIS SUMMARY",
    "OVERFLOW EXTREMES:",
    "UNDERFLOW EXTREMES:",
    "OVERFLOW/UNDERFLOW RECOMMENDATIONS:",
]
ADVISED = (
    r"RECOMMENDED Scaling Factor: 2\^(\S+)",
    r"Use scaling factor: 2\^(\S+)",
    r"^   Scale [Ee]xponent: (\S+)",
    r"Scale Exp = ([^,]+),.* <- recommended",
    r"recommended Scale Exp ([-.\d]*\d)",
    r"recommendation stays Scale Exp ([^,]+),",
    r"Scale Exp ([^,]+), the recommended one",
)
ROW = re.compile(r"^ *\d+/\d+  ")


def columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def all_lines(record: Record) -> list[str]:
    return [*sweep_text.lines(record), *sweep_text.results_text(record).splitlines()]


def one_line(record: Record, start: str) -> str:
    matches = [line for line in sweep_text.lines(record) if line.strip().startswith(start)]
    assert len(matches) == 1, matches
    return matches[0]


@pytest.mark.parametrize("name", TENSORS)
def test_every_section_is_there_and_in_order(name: str) -> None:
    record = TENSORS[name]()
    lines = [line.strip() for line in sweep_text.lines(record)]
    places = [lines.index(section) for section in SECTIONS]
    assert places == sorted(places)
    layouts = {"fp8_e4m3": "e4m3", "hif8": "tapered"}
    assert f"Format: {record['format']['name']} ({layouts[record['format']['name']]})" in lines


@pytest.mark.parametrize("name", TENSORS)
def test_one_exponent_is_recommended_everywhere(name: str) -> None:
    record = TENSORS[name]()
    own = float(record["levels"][record["advice"]["recommended"]]["exponent"])
    lines = sweep_text.lines(record)
    exponents = [
        hit[1] for line in lines for pattern in ADVISED if (hit := re.search(pattern, line))
    ]
    assert len(exponents) >= 4
    assert {float(text) for text in exponents} == {own}
    for line in lines:
        if avoided := re.search(r"AVOID .*Scale Exp (\S+?)(?: to (\S+?))?(?:[ :]|$)", line):
            first = float(avoided[1])
            last = float(avoided[2] or first)
            assert not min(first, last) <= own <= max(first, last), line


@pytest.mark.parametrize("name", TENSORS)
def test_the_recommendation_is_a_number_and_never_reads_as_zero(name: str) -> None:
    lines = sweep_text.lines(TENSORS[name]())
    scale_lines = [line for line in lines if re.search(r"Factor|factor:|xponent:|AVOID", line)]
    assert not [line for line in scale_lines if re.search(r"\bnan\b|0\.000000\b", line)]


def test_tiny_and_huge_factors_are_readable() -> None:
    tiny = tensor_record(activation() * 2.0**-120, levels=3)
    assert one_line(tiny, "Use") == "Use scaling factor: 2^-122 (1.9e-37)"
    assert one_line(tiny, "MSE Range").startswith("MSE Range: 3.828570e-75 to ")
    level = tiny["levels"][0]
    level |= {"exponent": -2000.0, "factor": 0.0}  # below what a double holds
    assert one_line(tiny, "Use") == "Use scaling factor: 2^-2000"


def test_a_small_share_does_not_read_as_zero() -> None:
    record = tensor_record(activation(30000.0))
    best = record["levels"][record["advice"]["recommended"]]
    best |= {"flush_share": 3e-9, "flush_energy": 2.5e-15, "overflow_share": 0.999999}
    assert "(3e-07% of elements, 2.5e-13% of the energy)" in one_line(record, "- Flush to Zero")
    assert "(>99.99% of elements, " in one_line(record, "- Overflow")


@pytest.mark.parametrize("name", TENSORS)
def test_sqnr_leads_and_the_energy_stands_beside_the_elements(name: str) -> None:
    record = TENSORS[name]()
    lines = sweep_text.lines(record)
    for line in lines:
        places = [line.find(label) for label in ("SQNR: ", "MSE: ", "Cosine: ", "PSNR: ")]
        if min(places) >= 0:
            assert places == sorted(places)
    measured = lines[lines.index("   Balanced Performance:") + 1 :]
    assert measured[0].startswith("     - SQNR: ")
    for kind in ("- Overflow", "- Flush to Zero"):
        assert re.search(r"\(\S+% of elements, \S+% of the energy\)$", one_line(record, kind))


@pytest.mark.parametrize("name", TENSORS)
def test_levels_are_marked(name: str) -> None:
    record = TENSORS[name]()
    rows = [line for line in sweep_text.lines(record) if ROW.match(line)]
    assert len(rows) == len(record["levels"])
    for index, (level, row) in enumerate(zip(record["levels"], rows, strict=True)):
        words = row.split("%")[-1].split()
        assert ("rec" in words) == (index == record["advice"]["recommended"])
        assert ("prod" in words) == ("production" in level["marks"])
        assert ("max" in words) == ("maximum" in level["marks"])
        assert ("min" in words) == ("minimum" in level["marks"])
        assert row.endswith("not E8M0") == (not level["e8m0"])
    fractional = any(not level["e8m0"] for level in record["levels"])
    assert any("not an E8M0 scale" in line for line in sweep_text.lines(record)) == fractional


def test_an_outlier_that_saturates_is_not_hidden_by_its_share() -> None:
    text = " ".join(" ".join(sweep_text.lines(TENSORS["outlier"]())).split())
    assert "Overflow: 1 (0.01%), 97.02% of the energy lost" in text
    assert "Severity: NONE by count, by energy HIGH" in text
    assert re.search(r"AVOID Scale Exp 5.3 to -5 too: .* 16.94% to 99.89% of the energy", text)


def test_when_all_overflow_the_least_problematic_level_is_the_recommended_one() -> None:
    text = "\n".join(sweep_text.lines(TENSORS["everything overflows"]()))
    assert "Every candidate has HIGH overflow severity" in text
    assert "Least problematic scaling: Scale Exp 8, the recommended one" in text
    assert "AVOID" not in text


def test_another_least_problematic_level_is_a_fact_and_no_advice() -> None:
    record = TENSORS["ordinary"]()
    record["advice"] |= {"clean_range": None, "least_problematic": 5}
    text = "\n".join(sweep_text.lines(record))
    assert "Least problematic scaling" not in text
    assert "Smallest share of elements outside the range: Scale Exp -3.6" in text
    assert "the recommendation stays Scale Exp -2, SQNR 31.74 dB" in text


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (1.7, "the recommended exponent is 1.70 dB better in SQNR"),
        (-0.5, "the recommended exponent is 0.50 dB worse in SQNR"),
        (0, "the recommended exponent is as good in SQNR"),
        ("inf", "only one of the two is exact"),
        (None, "Production exponent: -3, SQNR 29.94 dB"),
    ],
)
def test_the_gap_to_production_is_said(gap: Any, words: str) -> None:
    record = TENSORS["ordinary"]()
    record["advice"]["usual_gap_db"] = gap
    assert one_line(record, "Production exponent").endswith(words)


def test_a_tensor_that_fails_says_so_first_and_last() -> None:
    record = failing()
    loud = "This tensor does not pass: 3 NaN and 1 Inf in the tensor."
    lines = sweep_text.lines(record)
    assert lines[3] == lines[-2] == loud
    assert "   for the finite values; the tensor itself does not pass" in lines
    assert "  Counts: zeros: 0, NaN: 3 (0.02%), +Inf: 1 (0.01%), -Inf: 0" in lines
    assert sweep_text.results_text(record).count(loud) == 2
    assert not any("does not pass" in line for line in all_lines(TENSORS["ordinary"]()))


def test_exact_levels_are_words_and_not_infinities() -> None:
    text = "\n".join(sweep_text.lines(TENSORS["power of two"]()))
    assert "- SQNR: exact" in text
    assert not re.search(r": inf|inf dB|nan", text)


def test_the_input_is_named_in_full() -> None:
    record = TENSORS["ordinary"]()
    text = "\n".join(sweep_text.lines(record))
    for words in ("Name: act", "Path: dumps/step 100/act.pt", "Shape: [256, 64], 16384 elements"):
        assert words in text
    assert f"SHA-256: {record['tensor']['sha256']}" in text
    record["tensor"] |= {"path": None, "sha256": None, "rounded_to": "bf16", "dtype": "float32"}
    text = "\n".join(sweep_text.lines(record))
    assert "Path: not from a file" in text
    assert "Dtype: float32, rounded to bf16 first" in text


@pytest.mark.parametrize("make", [*TENSORS.values(), *BLOCKS.values()], ids=[*TENSORS, *BLOCKS])
def test_lines_fit_and_have_an_ascii_form(make: Callable[[], Record]) -> None:
    """No name breaks a line or colors the terminal, and a record that is shown stays as it is."""
    record = make()
    lines = all_lines(record)
    ascii_lines = sweep_text.plain(lines)
    for line in (*lines, *ascii_lines):
        assert columns(line) <= 100 or line.startswith(("  Name: ", "  Path: ")), line
        assert line.isprintable()
    assert all(map(str.isascii, ascii_lines))
    assert len(ascii_lines) == len(lines)
    assert record == make()


def test_the_ascii_form_keeps_the_meaning() -> None:
    assert sweep_text.plain(["fine", "Δ: 1", "张"]) == ["fine", "delta: 1", "\\u5f20"]
    for name, make in {**TENSORS, **BLOCKS}.items():
        if name != "odd name":
            assert "\\" not in "".join(sweep_text.plain(all_lines(make())))


@pytest.mark.parametrize(
    ("encoding", "able"), [("utf-8", True), ("ascii", False), ("cp1252", False), ("utf-16", True)]
)
def test_a_stream_is_asked_what_it_can_encode(encoding: str, able: bool) -> None:
    assert sweep_text.can_encode(TextIOWrapper(BytesIO(), encoding=encoding)) is able
    lossy = TextIOWrapper(BytesIO(), encoding=encoding, errors="replace")
    assert sweep_text.can_encode(lossy) is able


def test_a_stream_without_an_encoding_takes_all() -> None:
    assert sweep_text.can_encode(StringIO())


@pytest.mark.parametrize("record", [tensor_record(activation()), block_record(activation())])
def test_color_only_adds_escapes(record: Record) -> None:
    plain, colored = sweep_text.lines(record), sweep_text.lines(record, color=True)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in colored] == plain
    assert colored != plain
    best = next(line for line in colored if re.search("RECOMMENDED (Scaling|Offset)", line))
    assert best.startswith("\x1b[1;32m")


def test_the_results_file_has_every_metric_of_every_level() -> None:
    record = TENSORS["outlier"]()
    text = sweep_text.results_text(record)
    assert text.endswith("\n")
    for level in record["levels"]:
        assert f"{float(level['metrics']['rmse']):.6e}" in text
        assert f"{float(level['metrics']['correlation']):.8f}" in text
        assert re.search(rf"^ +{level['exponent']:g} +{level['flush']} ", text, re.MULTILINE)
    for name, version in record["versions"].items():
        assert f"  {name}: {version}" in text
    assert "Scale Exp = 7, Factor = 2^7 (128), SQNR: 32.40 dB" in text


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_sweep_speaks_about_offsets(name: str) -> None:
    record = BLOCKS[name]()
    lines = sweep_text.lines(record)
    offset = record["levels"][record["advice"]["recommended"]]["exponent"]
    own = f"{offset:+g}" if offset else "0"
    assert f"Use offset: {own}" in lines
    assert any(line.startswith(f"RECOMMENDED Offset: {own} ") for line in lines)
    text = "\n".join(lines)
    assert "Offset 0 is what production uses" in text
    assert "speaks about an offset to every block's own exponent" in text
    assert "Scale Exp" not in text
    assert len(lines) < 0.8 * len(sweep_text.lines(TENSORS["ordinary"]()))
    assert sweep_text.results_text(record).count("\n    offset ") <= 3


# The pictures ------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is saved, still as a figure; a warning of matplotlib is an error."""
    created: list[Any] = []
    save = _sheet.save

    def keep(figure: Any, path: Path, **more: Any) -> None:
        save(figure, path, **more)
        created.append(figure)

    monkeypatch.setattr(_sheet, "save", keep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield created


def texts_in(figure: Any) -> list[Any]:
    """All texts one sees; matplotlib also keeps labels of ticks outside the axis."""
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += axes.texts
        if legend := axes.get_legend():
            texts += legend.get_texts()
        if axes.axison:
            texts += [axes.title, axes._left_title, axes._right_title]
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                ticks = [t for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
                texts += [axis.label, *(tick.label1 for tick in ticks)]
    return [text for text in texts if text.get_text().strip()]


def overlaps(figure: Any) -> list[str]:
    """Pairs of texts that cover each other, and texts that leave the picture."""
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts_in(figure)]
    assert len(boxes) > 6
    edge = figure.bbox
    collisions = [
        f"{words!r} leaves the picture"
        for words, box in boxes
        if min(box.x0 - edge.x0, edge.x1 - box.x1, box.y0 - edge.y0, edge.y1 - box.y1) < -1
    ]
    for index, (words, box) in enumerate(boxes):
        for other, second in boxes[:index]:
            wide = min(box.x1, second.x1) - max(box.x0, second.x0)
            high = min(box.y1, second.y1) - max(box.y0, second.y0)
            if wide > 1 and high > 1:
                collisions.append(f"{words!r} covers {other!r}")
    return collisions


def check(
    draw: Callable[[Path, Record], None], record: Record, folder: Path, kept: list[Any]
) -> None:
    picture, before = folder / "sweep.png", json.dumps(record)
    draw(picture, record)
    assert json.dumps(record) == before
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in folder.iterdir()] == ["sweep.png"]
    assert overlaps(kept[-1]) == []


@share(16)
@pytest.mark.parametrize("name", TENSORS)
def test_the_metrics_of_every_tensor_can_be_drawn(
    name: str, tmp_path: Path, figures: list[Any]
) -> None:
    check(plots.draw_metrics, TENSORS[name](), tmp_path, figures)


@share(8)
@pytest.mark.parametrize("name", ["ordinary", "tiny", "single exact level", "failed"])
def test_the_summary_can_be_drawn(name: str, tmp_path: Path, figures: list[Any]) -> None:
    check(plots.draw_summary, TENSORS[name](), tmp_path, figures)


@share(8)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_sweep_can_be_drawn(name: str, tmp_path: Path, figures: list[Any]) -> None:
    check(plots.draw_block, BLOCKS[name](), tmp_path, figures)


def words_of(figure: Any) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def test_what_matters_is_marked(tmp_path: Path, figures: list[Any]) -> None:
    plots.draw_metrics(tmp_path / "a.png", TENSORS["ordinary"]())
    words = words_of(figures[-1])
    for label in ("recommended -2", "production -3", "alignment ends -2, -10", "integer"):
        assert label in words
    assert ">1% of elements saturate" in words
    assert "fractional: not an E8M0 scale" in words
    assert "Recommended: 2^-2 (0.25)" in words
    assert {"SQNR 31.74 dB", "PSNR 57.66 dB"} <= set(words)


def test_exact_levels_are_drawn_and_named(tmp_path: Path, figures: list[Any]) -> None:
    plots.draw_metrics(tmp_path / "a.png", TENSORS["power of two"]())
    assert words_of(figures[-1]).count("exact") == 5
    assert words_of(figures[-1]).count("cosine 1") == 1


def test_infinite_errors_and_undefined_metrics_are_named(
    tmp_path: Path, figures: list[Any]
) -> None:
    plots.draw_metrics(tmp_path / "a.png", undefined())
    words = words_of(figures[-1])
    assert words.count("infinite") == 2
    assert words.count("not defined for this tensor") == 2
    assert not [text for text in words if "nan" in text]


def test_a_picture_that_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(OSError):
        plots.draw_summary(tmp_path / "a.png", TENSORS["single level"]())
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@proof
def test_text_and_pictures_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(tensor_record(activation(), levels=3)))
    (tmp_path / "block.json").write_text(json.dumps(block_record(activation())))
    program = """
import json, pathlib, sys
sys.modules["torch"] = None
from qgate.sweeps import texts as sweep_text
folder = pathlib.Path(sys.argv[1])
record, block = (json.loads((folder / f"{name}.json").read_text()) for name in ("record", "block"))
sweep_text.lines(record), sweep_text.lines(block), sweep_text.results_text(record)
assert "matplotlib" not in sys.modules, "the text needs no matplotlib"
from qgate.sweeps import plots
plots.draw_summary(folder / "summary.png", record)
plots.draw_block(folder / "block.png", block)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
