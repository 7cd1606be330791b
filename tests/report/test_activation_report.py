"""The report of activations: complete, escaped, self-contained; it leaves files of others alone."""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from qgate.activation_stats.files import check_folder, read_record, write_report
from qgate.activation_stats.findings import findings
from qgate.activation_stats.reading import Look, losses
from qgate.activation_stats.record import ActivationsRecord
from qgate.activation_stats.tables import csv_files, tables
from qgate.activation_stats.texts import activation_text, keep_lines
from qgate.errors import QgateError
from qgate.text import decibels
from tests.report.activation_records import RECORDS, broken, hostile, single, usual

QUICK = Look(dpi=40, formats=("html", "csv", "json"))
TEXTS = replace(QUICK, formats=("csv", "json"))


def little() -> ActivationsRecord:
    """With two pictures only."""
    record = single()
    record["panels"] = {"magnitude_input": {"head": ["head"]}}
    record["layers"], record["sensitivity"] = record["layers"][:1], []
    del record["layers"][0]["smoothing"], record["layers"][0]["outliers"]
    return record


class Reader(HTMLParser):
    """Tags with their attributes, and all text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
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
    kept = ("magnitude_input", "outliers", "heat_map")
    record["panels"] = {k: dict(list(record["panels"][k].items())[-1:]) for k in kept}
    write_report(record, folder, QUICK)
    return request.param, folder


def test_the_page_is_one_file_that_escapes_everything(written: tuple[str, Path]) -> None:
    name, folder = written
    text = (folder / "analysis_report.html").read_text(encoding="utf-8")
    page = Reader(text)
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) >= 10
    assert all(str(each["src"]).startswith("data:image/png;base64,") for each in images)
    assert all(each["alt"] and each["width"] and each["height"] for each in images)
    assert [tag for tag, _ in page.tags].count("script") == 1
    outside = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("href", "src")]
    assert not [v for v in outside if v and not v.startswith(("data:", "#")) and "/" in v]
    assert not re.search(r"https?://", re.sub(r"base64,[^']+", "", text))
    assert text.count("<section id=") >= 10
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
    told = [r for r in rows if r["statistic"] == "amax" and r["role"] == first["role"]]
    assert float(told[0]["value"]) == first["portrait"]["amax"]
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


def test_two_models_share_a_folder(tmp_path: Path) -> None:
    first, second = little(), little()
    second["model"] = "hf:models/other"
    same = little()
    same["model"] = "hf:elsewhere/small"
    told = [write_report(each, tmp_path, QUICK) for each in (first, second, same)]
    names = [{path.name for path in paths} for paths in told]
    assert not (names[0] & names[1])
    assert not (names[0] & names[2])
    assert not (names[1] & names[2])
    assert "analysis_report.html" in names[0]
    assert "other-analysis_report.html" in names[1]
    again = {path.name for path in write_report(second, tmp_path, QUICK)}
    assert again == names[1]
    assert all(path.is_file() for paths in told for path in paths)


def test_files_of_others_stay(tmp_path: Path) -> None:
    for name in ("analysis_report.html", "notes.csv", "small-sqnr-input.png"):
        (tmp_path / name).write_text("mine")
    paths = write_report(little(), tmp_path, replace(TEXTS, formats=("csv", "html", "png")))
    assert (tmp_path / "analysis_report.html").read_text() == "mine"
    assert (tmp_path / "small-sqnr-input.png").read_text() == "mine"
    assert re.fullmatch(r"small-\w{6}-analysis_report.html", paths[0].name)


def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    write_report(usual(), tmp_path, TEXTS)
    assert (tmp_path / "sensitivity.csv").is_file()
    (tmp_path / "mine.csv").write_text("mine")
    record = usual()
    record["sensitivity"], record["proposals"] = [], []
    write_report(record, tmp_path, TEXTS)
    assert not (tmp_path / "sensitivity.csv").exists()
    assert (tmp_path / "mine.csv").read_text() == "mine"


def test_a_run_that_was_killed_leaves_nothing_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import qgate.activation_stats.files as module

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    look = replace(QUICK, formats=("csv", "html"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "page", kill)
        patch.setattr(module._Writer, "_draw", lambda *_: [])
        with pytest.raises(KeyboardInterrupt):
            write_report(usual(), tmp_path, look)
    assert (tmp_path / "statistics.csv").is_file()
    paths = write_report(usual(), tmp_path, TEXTS)
    listed = json.loads((tmp_path / "small-written.json").read_text())["files"]
    assert {path.name for path in tmp_path.iterdir()} == set(listed)
    assert {path.name for path in paths} | {"small-written.json"} == set(listed)


def test_a_picture_that_fails_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgate.activation_stats.plots import pictures as activation_pictures

    def fail(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(activation_pictures, "draw_losses", fail)
    with pytest.raises(QgateError, match=r"3 of 4 pictures could not be drawn.*planted"):
        write_report(little(), tmp_path, QUICK)
    text = (tmp_path / "analysis_report.html").read_text()
    assert "sqnr-input could not be drawn" in text
    assert (tmp_path / "layers.csv").is_file()


def test_pictures_are_written_as_asked(tmp_path: Path) -> None:
    record = little()
    record["settings"] = {"output.formats": ["svg", "pdf"], "visualization.dpi": 50}
    names = {path.name for path in write_report(record, tmp_path)}
    assert "small-head_input-input.svg" in names
    assert "small-head_input-input.pdf" in names
    assert not [name for name in names if name.endswith((".png", ".html", ".csv", ".json"))]


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "a\nb"])
def test_a_report_name_that_is_no_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(QgateError, match="report_name"):
        check_folder(tmp_path, replace(QUICK, report_name=name))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(QgateError, match="is a file"):
        write_report(single(), tmp_path / "x", QUICK)


def test_a_folder_that_cannot_be_written_to_is_told_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    # Who may write anywhere is asked through os.access too.
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, how: path != closed and real(path, how))
    for folder in (closed, closed / "a" / "b"):
        with pytest.raises(QgateError, match=r"permission denied.*save_dir"):
            check_folder(folder, QUICK)
    (tmp_path / "file").write_text("")
    with pytest.raises(QgateError, match="is a file"):
        check_folder(tmp_path / "file" / "below", QUICK)
    check_folder(tmp_path / "new" / "folder", QUICK)


def test_every_table_has_its_rows() -> None:
    record = usual()
    told = tables(record)
    assert len(told["layers"]) == len(record["layers"])
    assert len(told["sensitivity"]) == len(record["sensitivity"])
    assert "statistics.csv" in csv_files(record)
    assert "ranges.csv" in csv_files(record)


def test_what_takes_a_channel_away_is_said_of_inputs_first() -> None:
    record = usual()
    for each in record["layers"]:
        if "outliers" in each:
            each["outliers"]["channels"] = []
    roles = {each["role"]: each for each in record["layers"] if "outliers" in each}
    loud = {"channel": 3, "amax": 9.0, "ratio": 90.0, "tokens": 1.0, "samples": 1.0}
    roles["output"]["outliers"]["channels"] = [{**loud, "systematic": True}]  # type: ignore[typeddict-item]
    text = next(each.text for each in findings(record) if "stands out" in each.text)
    assert "channel 3" in text
    assert "smoothing" not in text
    near = {**loud, "channel": 4, "ratio": 20.0, "systematic": True}
    roles["input"]["outliers"]["channels"] = [near]  # type: ignore[list-item]
    text = next(each.text for each in findings(record) if "stands out" in each.text)
    assert "channel 4" in text
    assert "smoothing or a rotation takes it away" in text


def test_the_page_names_the_format_that_its_order_is_by(tmp_path: Path) -> None:
    record = little()
    write_report(record, tmp_path, QUICK)
    page = Reader((tmp_path / "analysis_report.html").read_text())
    told = losses(record["layers"][0])
    worst = min(told, key=lambda name: told[name].worse)
    assert "worst format" in page.words
    assert f"{worst} {decibels(told[worst].worse)}" in page.words
