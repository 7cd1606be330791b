"""The page of a comparison and the files beside it: diagnosis first, complete, escaped."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

import qgate
from qgate.checkpoints import files
from qgate.checkpoints.comparison import WIDTH, worst_block
from qgate.checkpoints.compute import ScaleSums
from qgate.checkpoints.files import findings_csv, weights_csv, write_files
from qgate.checkpoints.findings import find_outliers
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.page import LayerMap, add_octaves, page
from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord, ranked
from qgate.checkpoints.texts import result_lines
from qgate.cli import main
from qgate.records.plain_data import json_text
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.charts.page_reader import PageReader
from tests.checkpoints import checkpoint_records
from tests.checkpoints.faults import UP
from tests.checkpoints.gated import double_scales, planted, write_pair
from tests.hostile import HOSTILE

memory = stores.memory
Capture = pytest.CaptureFixture[str]
PAGE_TAGS = {
    "a", "b", "body", "button", "caption", "dd", "details", "div", "dl", "dt", "figure", "form",
    "g", "h1", "h2", "head", "html", "i", "input", "label", "li", "main", "meta", "nav", "option",
    "output", "p", "path", "pre", "script", "section", "select", "small", "span", "style",
    "summary", "svg", "table", "tbody", "td", "text", "th", "thead", "title", "tr", "ul", "wbr",
}  # fmt: skip
SCHEMA = Path(files.__file__).with_name("checkpoint.schema.json")
NAMES = {"checkpoint.html", "checkpoint.json", "weights.csv", "findings.csv"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `parent`, `child` and `bad`, whose scales are doubled in one weight."""
    folder: Path = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    planted(folder / "child", folder / "bad", double_scales)
    return folder


def compared(pair: Path, child: str = "bad", blocks: int = 2) -> CheckpointRecord:
    return qgate.checkpoints.compare(str(pair / child), str(pair / "parent"), blocks=blocks)


# The command --------------------------------------------------------------------------------------


def test_the_command_writes_page_record_and_tables(
    pair: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "new" / "out"
    command = ["checkpoint", str(pair / "bad"), "--parent", str(pair / "parent")]
    assert main([*command, "--output-dir", str(out)]) == 1
    assert {path.name for path in out.iterdir()} == NAMES
    assert capsys.readouterr().out.splitlines()[-1] == f"page: {out / 'checkpoint.html'}"
    text = (out / "checkpoint.html").read_text(encoding="utf-8")
    cause = "all scales are 2 times too high: 44.6 dB worse than ideal"
    (heading,) = re.findall("<h1>(.*)</h1>", text)
    assert (
        heading.replace("<wbr>", "") == f"<span class='fail'>1 finding</span>: {UP}.weight: {cause}"
    )
    row = text[text.index("<b class='fail'>finding</b>") :].partition("</tr>")[0]
    assert cause in row
    cells = "<td>44.6 dB</td><td>≤ 1.0 dB</td><td class='h7'>44.6×</td>"
    assert cells in row
    assert text.count('<svg class="plot"') == 1 + 4 + 6
    record = json.loads((out / "checkpoint.json").read_text(encoding="utf-8"))
    assert record["kind"] == "qgate checkpoint 1"
    assert len(record["blocks"]) == 6
    rows = list(csv.DictReader((out / "weights.csv").open(encoding="utf-8")))
    assert (rows[0]["name"], len(rows)) == (f"{UP}.weight", 21)
    assert main([*command, "--output-dir", str(out), "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == record
    assert "page: " in printed.err


def test_a_folder_that_is_a_file_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "taken").write_text("mine")
    command = ["checkpoint", "nowhere", "--output-dir", str(tmp_path / "taken")]
    assert main(command) == 2
    assert "taken' is a file; name a folder." in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.usefixtures("memory")
def test_a_url_takes_the_files(pair: Path) -> None:
    folder = location_of("memory://bucket/out")
    write_files(folder, compared(pair))
    assert {path.name for path in folder.iterdir()} == NAMES


def test_a_file_that_cannot_be_written_leaves_the_one_before(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, compared(pair, "child"))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_record: CheckpointRecord, _files: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "page", full)
    with pytest.raises(OSError, match="No space"):
        write_files(tmp_path, compared(pair))
    assert (tmp_path / "checkpoint.html").read_bytes() == before["checkpoint.html"]
    assert {path.name for path in tmp_path.iterdir()} == NAMES


def test_the_terminal_has_recipe_bits_outliers_and_few_findings() -> None:
    record = checkpoint_records.large()
    lines = list(result_lines(record, limit=2))
    assert lines[0].startswith("model.layers.17.mlp.experts.2.up_proj.weight: neighboring codes")
    assert lines[0].endswith("; 2 more findings")
    assert lines[2] == "… and 1 more; --json has all"
    assert "recipe of compressed-tensors" in lines
    assert "  ignores lm_head" in lines
    assert any(re.search(r"parameters, 4\.\d\d bits per parameter", line) for line in lines)
    assert lines[-1].startswith("model.layers.30.self_attn.k_proj.weight stands out: its error is")


# The record ---------------------------------------------------------------------------------------


def test_the_record_is_short_to_look_at_and_whole_as_data(pair: Path) -> None:
    record = compared(pair)
    text = repr(record)
    assert f"{UP}.weight: all scales are 2 times too high" in text
    assert len(text.splitlines()) <= 20
    assert len(repr(checkpoint_records.hostile()).splitlines()) <= 20
    assert "no findings" in repr(compared(pair, "child"))
    figures = [weight["figures"] for weight in record.to_dict()["weights"] if weight["figures"]]
    assert len(figures) == 14
    assert sum(figures[0]["scales"]["octaves"][1]) == figures[0]["scales"]["count"]


@pytest.mark.parametrize("name", ["bad", "child", "large", "hostile", "alone"])
def test_json_is_valid_by_the_schema(pair: Path, name: str) -> None:
    if name == "alone":
        record = qgate.checkpoints.compare(str(pair / "bad"))
    elif name in ("large", "hostile"):
        record = getattr(checkpoint_records, name)()
    else:
        record = compared(pair, name)
    record.findings.append(CheckpointFinding("x", "y", float("nan")))
    data = json.loads(json_text(record))
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(data)
    assert data["findings"][-1]["over_ideal_db"] is None


def test_public_names_are_there_without_torch() -> None:
    assert qgate.checkpoints.__all__ == dir(qgate.checkpoints)
    for name in qgate.checkpoints.__all__:
        assert getattr(qgate.checkpoints, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'compere'"):
        _ = qgate.checkpoints.compere


# Parts of the page --------------------------------------------------------------------------------


def test_the_map_has_a_row_per_tensor_and_a_column_per_layer() -> None:
    record = checkpoint_records.large()
    layers = LayerMap.of(record)
    assert layers.columns == [*map(str, range(checkpoint_records.LAYERS)), "–"]
    names = [name for name, _ in layers.rows]
    assert "mlp.experts.*.up_proj" in names
    assert names[-3:] == ["lm_head", "model.embed_tokens", "model.norm"]
    rows = {name: cells for name, _, cells in layers.heat_map({record.weights[0].name: "w0"}).rows}
    cell = rows["mlp.experts.*.up_proj"][17]
    assert cell is not None
    assert (cell["text"], cell["kinds"], cell["heard"]) == ("13.2", "h6 bad", "finding")
    assert "the order of nibbles" in cell["title"]
    calm = rows["input_layernorm"][0]
    assert calm is not None
    assert (calm["text"], calm["kinds"], calm["title"]) == ("=", "", "BF16: kept as it is")
    lost = rows["self_attn.q_proj.bias"][40]
    assert lost is not None
    assert (lost["kinds"], lost["title"]) == (
        "bad", "model.layers.40.self_attn.q_proj.bias: it is in the parent alone",
    )  # fmt: skip
    assert rows["self_attn.q_proj.bias"][0] is None


def test_without_a_parent_the_map_says_what_is_quantized(pair: Path) -> None:
    record = qgate.checkpoints.compare(str(pair / "child"))
    cells = [cell for *_, row in LayerMap.of(record).heat_map({}).rows for cell in row if cell]
    assert {cell["text"] for cell in cells} == {"q", "="}
    assert "Without a parent there are no errors" in page(record, [])
    assert "There is no parent to draw blocks beside" in page(record, [])


def test_names_are_text_everywhere(tmp_path: Path) -> None:
    record = checkpoint_records.hostile()
    path = write_files(tmp_path, record)
    html = path.read_text(encoding="utf-8")
    reader = PageReader(html)
    assert {name for name, _ in reader.tags} == PAGE_TAGS
    attributes = {name for _, values in reader.tags for name in values}
    assert not [name for name in attributes if name.startswith("on")]
    assert html.count("<script") == 1
    assert not [char for char in html if char != "\n" and not char.isprintable()]
    assert len(page(record, [])) < 5_000_000
    for table in (weights_csv(record), findings_csv(record)):
        cells = [cell for row in csv.reader(table.splitlines()) for cell in row]
        assert not [cell for cell in cells if cell[:1] in "=+@" and cell]
    assert len(ranked(record.weights)) == len(HOSTILE) + 40


def test_outliers_are_told_from_their_format_and_not_from_findings() -> None:
    record = checkpoint_records.large()
    assert [outlier.weight.name for outlier in find_outliers(record)] == [
        "model.layers.30.self_attn.k_proj.weight"
    ]
    record.findings = []
    assert len(find_outliers(record)) == 2
    record.weights = record.weights[:5]
    assert find_outliers(record) == []


# Figures that are drawn ---------------------------------------------------------------------------


def _octaves(scales: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
    sums = ScaleSums()
    for part in scales.reshape(-1, 1).split(3):
        sums.add(part, None)
    return sums.figures().octaves


def test_scales_are_counted_by_octave() -> None:
    scales = torch.tensor([0.25, 0.3, 0.5, 1.99, 2.0, 0.0, -1.0])
    assert _octaves(scales) == (-2, (2, 1, 1, 1))
    assert _octaves(torch.zeros(3)) is None
    assert _octaves(torch.tensor([])) is None
    assert add_octaves([(-2, (2, 1)), (0, (5,))]) == (-2, (2, 1, 5))


def test_the_worst_block_is_found_across_chunks_and_edges() -> None:
    rows, columns = 3000, 200
    parent = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    scales = torch.full((rows, 2), 0.05)
    elements = (parent / 0.05).round()
    elements[2777, 131] += 40
    weight = QuantizedWeight("int8", elements, scales, (1, 128))
    block = worst_block("w", weight, parent)
    assert block is not None
    assert (block.row, block.column, len(block.values)) == (2777, 128, WIDTH)
    errors = [abs(x - y) for x, y in zip(block.values, block.parent, strict=True)]  # type: ignore[operator]
    assert errors.index(max(errors)) == 3
    assert block.scale == pytest.approx(0.05)


def test_a_block_that_is_not_finite_is_the_worst() -> None:
    parent = torch.ones(64, 64)
    scales = torch.ones(2, 2)
    scales[1, 0] = torch.nan
    weight = QuantizedWeight("int8", torch.zeros(64, 64), scales, (32, 32))
    block = worst_block("w", weight, parent)
    assert block is not None
    assert (block.row, block.column, block.scale, block.error) == (32, 0, None, None)
    assert set(block.values) == {None}
    assert (
        worst_block("w", QuantizedWeight("int8", parent[:0], scales[:0], (1, 64)), parent[:0])
        is None
    )
