"""The report of activations: complete, escaped, self-contained."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from qgate.activation_stats.files import read_record, write_report
from qgate.activation_stats.findings import findings
from qgate.activation_stats.reading import losses
from qgate.activation_stats.settings import ActivationSettings, with_values
from qgate.activation_stats.tables import csv_files, tables
from qgate.activation_stats.texts import activation_text, keep_lines
from qgate.text import decibels
from tests.activation_stats.activation_records import RECORDS, broken, hostile, little, usual
from tests.charts.page_reader import PageReader
from tests.shares import slow_file

pytestmark = slow_file

QUICK = with_values(ActivationSettings(), {"dpi": 20, "output.formats": ["html", "csv", "json"]})


class Reader(PageReader):
    """Tags with their attributes, and all text outside of scripts."""

    words = _inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.words += data + "\n"


@pytest.fixture(scope="module", params=["single", "hostile", "broken"])
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("report") / "figures"
    record = RECORDS[request.param]()
    kinds = ("magnitude_input", "outliers", "heat_map")
    record["panels"] = {k: dict(list(record["panels"][k].items())[-1:]) for k in kinds}
    write_report(record, folder, QUICK)
    return request.param, folder


def test_the_page_is_one_file_that_escapes_everything(written: tuple[str, Path]) -> None:
    name, folder = written
    text = (folder / "analysis_report.html").read_text(encoding="utf-8")
    page = Reader(text)
    pictures = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(pictures) >= 10
    assert all(
        picture["aria-label"] and picture["width"] and picture["height"] for picture in pictures
    )
    assert [tag for tag, _ in page.tags].count("script") == 1
    outside = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("href", "src")]
    assert not [v for v in outside if v and not v.startswith(("data:", "#")) and "/" in v]
    assert not re.search(r"https?://", re.sub(r"base64,[^']+", "", text))
    assert text.count("<section id=") >= 6
    if name == "hostile":
        assert "<script>alert(1)</script>" in page.words
    if name == "broken":
        assert "NaN or infinite" in page.words
        assert "no sample reached" in page.words


def test_tables_are_sorted_by_a_script_and_there_without_it(written: tuple[str, Path]) -> None:
    page = Reader((written[1] / "analysis_report.html").read_text(encoding="utf-8"))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") >= 4
    assert tags.count("tr") > 10
    assert all(attrs.get("scope") for tag, attrs in page.tags if tag == "th")


def test_tables_are_whole(written: tuple[str, Path]) -> None:
    name, folder = written
    record = RECORDS[name]()
    rows = list(csv.DictReader((folder / "statistics.csv").open(encoding="utf-8")))
    assert rows
    assert set(rows[0]) == {"layer", "role", "statistic", "value"}
    assert all(float(row["value"]) == float(row["value"]) for row in rows)
    first = record["layers"][0]
    amax_rows = [r for r in rows if r["statistic"] == "amax" and r["role"] == first["role"]]
    assert float(amax_rows[0]["value"]) == first["portrait"]["amax"]
    keys = [(row["layer"], row["role"], row["statistic"]) for row in rows]
    assert len(set(keys)) == len(keys)
    for path in folder.glob("*.csv"):
        cells = [c for row in csv.reader(path.open(encoding="utf-8")) for c in row]
        assert not [c for c in cells if re.match(r"[=@\t\r]|[+-](?![\d.])", c)], path
    read = json.loads((folder / "activations.json").read_text(), parse_constant=pytest.fail)
    assert read["layers"] == json.loads(json.dumps(record["layers"]))
    assert read["tables"]["layers"]
    assert read_record(folder / "activations.json")["kind"] == record["kind"]


def test_the_text_fits_a_terminal() -> None:
    for make in RECORDS.values():
        record = make()
        head = activation_text(record).split("\n\n# ")[0]
        assert max(map(len, head.splitlines())) <= 80
        assert all(c.isprintable() or c == "\n" for c in activation_text(record))
    text = activation_text(usual())
    assert re.search(r"\n2\.mlp\.down_proj +input +\d+", text), text
    assert "massive single activations in 1 layer" in text
    assert "“␣niz”" in text
    assert "- model.layers.0.self_attn.q_proj" in text
    assert activation_text(broken()).index("BROKEN") < activation_text(broken()).index("LOSS")


def test_layers_to_keep_are_yaml() -> None:
    import yaml

    names = yaml.safe_load("\n".join(keep_lines(hostile())))
    assert names == hostile()["proposals"][0]["keep"]


def test_pictures_are_written_as_asked(tmp_path: Path) -> None:
    record = little()
    record["settings"] = {"output.formats": ["svg", "pdf"], "visualization.dpi": 50}
    names = {path.name for path in write_report(record, tmp_path)}
    assert "small-head_input-input.svg" in names
    assert "small-head_input-input.pdf" in names
    assert not [name for name in names if name.endswith((".png", ".html", ".csv", ".json"))]


def test_every_table_has_its_rows() -> None:
    record = usual()
    rows = tables(record)
    assert len(rows["layers"]) == len(record["layers"])
    assert len(rows["sensitivity"]) == len(record["sensitivity"])
    assert "statistics.csv" in csv_files(record)
    assert "ranges.csv" in csv_files(record)


def test_smoothing_is_advised_for_channels_of_inputs_first() -> None:
    record = usual()
    for entry in record["layers"]:
        if "outliers" in entry:
            entry["outliers"]["channels"] = []
    roles = {entry["role"]: entry for entry in record["layers"] if "outliers" in entry}
    loud = {"channel": 3, "amax": 9.0, "ratio": 90.0, "tokens": 1.0, "samples": 1.0}
    roles["output"]["outliers"]["channels"] = [{**loud, "systematic": True}]  # type: ignore[typeddict-item]
    text = next(entry.text for entry in findings(record) if "stands out" in entry.text)
    assert "channel 3" in text
    assert "smoothing" not in text
    near = {**loud, "channel": 4, "ratio": 20.0, "systematic": True}
    roles["input"]["outliers"]["channels"] = [near]  # type: ignore[list-item]
    text = next(entry.text for entry in findings(record) if "stands out" in entry.text)
    assert "channel 4" in text
    assert "smoothing or a rotation takes it away" in text


def test_the_page_names_the_format_that_sorts_the_layers(tmp_path: Path) -> None:
    record = little()
    write_report(record, tmp_path, QUICK)
    page = Reader((tmp_path / "analysis_report.html").read_text())
    by_format = losses(record["layers"][0])
    worst = min(by_format, key=lambda name: by_format[name].worse)
    assert "worst format" in page.words
    assert f"{worst} {decibels(by_format[worst].worse)}" in page.words
