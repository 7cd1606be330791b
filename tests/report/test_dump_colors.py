"""Each format has one color in all pictures, and the console says what a drawing skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from qgate.charts.palette import FORMAT_COLORS, PALETTE, format_color
from qgate.cli import main
from qgate.drawing.plots.pictures import PICTURES
from qgate.dumps import DumpWriter
from qgate.formats import names as format_names
from tests.dumps.making import record

from . import dump_records

FORMATS = ("fp8_e4m3", "fp16", "mxfp4_e2m1", "hif8", "nvfp4")


def test_every_format_has_its_own_color() -> None:
    colors = {name: format_color(name) for name in format_names()}
    assert len(set(colors.values())) == len(colors)
    assert set(colors) <= set(FORMAT_COLORS)
    assert format_color("mine_e3m4") == format_color("mine_e3m4") in PALETTE


@pytest.mark.filterwarnings("ignore")
def test_a_format_has_one_color_in_all_pictures() -> None:
    analysis = dump_records.normal_record(layers=2, ranks=2)
    seen = 0
    for picture in PICTURES:
        with np.errstate(all="ignore"):
            made = picture.draw.build(analysis)
        for legend in made.figure.legends if made else ():
            for text, drawn in zip(legend.get_texts(), legend.legend_handles, strict=True):
                name = text.get_text().strip().split(" ")[0]
                if name in FORMATS:
                    color = getattr(drawn, "get_facecolor", None) or drawn.get_color
                    assert to_hex(color()) == format_color(name), picture.path
                    seen += 1
    assert seen > 15


def test_the_console_says_what_was_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with DumpWriter(tmp_path / "d") as writer:
        writer.add(record(0, module="a"), torch.randn(4, 32).bfloat16())
        writer.add(record(1, module="b"), torch.arange(9))
        stats = {"min": -2.0, "max": 3.0, "mean": 0.5, "std": 1.0}
        writer.add(record(2, module="c", dtype="bfloat16", shape=(8, 8), stats=stats))
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "d", "--no-plots", "--format", "nvfp4", "--compare", "nvfp4,hif8"]) == 0
    out = capsys.readouterr().out
    assert "skipped tensors   1 tensors are left out, empty or without floating point" in out
    assert "skipped formats   nvfp4 in 1 of 2 tensors: 1 tensor kept without values" in out
    assert "skipped pictures  all: --no-plots" in out


def test_a_topic_without_pictures_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with DumpWriter(tmp_path / "d") as writer:
        writer.add(record(0, module="a"), torch.randn(4, 32).bfloat16())
    monkeypatch.chdir(tmp_path)
    few = [p for p in PICTURES if p.folder in ("rank_analysis", "overflow_analysis", "heatmaps")]
    monkeypatch.setattr("qgate.drawing.plots.pictures.PICTURES", tuple(few))
    assert main(["draw", "d", "--format", "fp8_e4m3"]) == 0
    out = capsys.readouterr().out
    assert "skipped pictures  rank_analysis: There is only one rank." in out
    assert "skipped pictures  overflow_analysis: Nothing overflows" in out
    assert "skipped pictures  heatmaps" not in out
