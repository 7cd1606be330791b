"""The page of two engines and the files beside it: the result first, complete, escaped."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from qgate.cli import main
from qgate.engines import files
from qgate.engines.comparison import compare_tokens
from qgate.engines.files import write_files
from qgate.engines.page import page
from qgate.engines.profile import MOST_VALUES, position_profile, token_rows, worst_samples
from qgate.engines.record import SiteDifference
from qgate.engines.texts import site_text
from qgate.records.plain_data import json_text
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.charts.page_reader import PageReader
from tests.engines import engine_records, runs
from tests.engines.gated import FAULTS, collect, logits_pair, network, one_token, other_module
from tests.hostile import HOSTILE
from tests.shares import proof

memory = stores.memory
Capture = pytest.CaptureFixture[str]
SCHEMA = Path(files.__file__).with_name("engines.schema.json")
NAMES = {"engines.html", "engines.json", "tokens.csv"}


def test_the_command_writes_page_record_and_tokens(tmp_path: Path, capsys: Capture) -> None:
    command = ["engines", *logits_pair(tmp_path, one_token)]
    out = tmp_path / "new" / "out"
    assert main([*command, "--output-dir", str(out), "--max-kl", "1e-5"]) == 1
    assert {path.name for path in out.iterdir()} == NAMES
    assert capsys.readouterr().out.splitlines()[-1] == f"page: {out / 'engines.html'}"
    text = (out / "engines.html").read_text(encoding="utf-8")
    (heading,) = re.findall(r"<h1>(.*)</h1>", text)
    assert heading.startswith(
        "<span class='fail'>1 limit exceeded</span>: token 31 of sample 2 carries "
    )
    (size,) = re.findall(r"<p class='about'>(mean KL .*)</p>", text)
    assert size.endswith(" nats per token is above the limit 1e-05")
    row = re.search(
        rf"{re.escape(size)}</th><td>(.*)</td><td>≤ 1e-5</td><td class='h7'>(.*)×", text
    )
    assert row is not None
    assert float(row[1]) / 1e-5 == pytest.approx(float(row[2]), rel=0.01)
    assert text.count('<svg class="plot"') == 1 + files.DRAWN
    record = json.loads((out / "engines.json").read_text(encoding="utf-8"))
    assert record["kind"] == "qgate engines 1"
    assert record["sample_lines"][0]["sample"] == "2"
    assert main([*command, "--output-dir", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["figures"] == record["figures"]
    assert "page: " in printed.err


def test_the_table_has_every_token_that_was_scored(tmp_path: Path) -> None:
    engines = logits_pair(tmp_path)
    assert main(["engines", *engines, "--output-dir", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "tokens.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    scored = runs.scored(samples=8)
    assert len(rows) == 8 * 39
    expected = scored.logprobs[:, 1:].flatten().tolist()
    assert [float(row["reference"]) for row in rows] == pytest.approx(expected, abs=1e-6)
    assert [int(row["token"]) for row in rows] == scored.ids[:, 1:].flatten().tolist()
    assert {row["position"] for row in rows} == {str(at) for at in range(1, 40)}
    difference = [float(row["actual"]) - float(row["reference"]) for row in rows]
    assert [float(row["difference"]) for row in rows] == pytest.approx(difference, abs=1e-12)
    k3 = [math.expm1(d) - d for d in difference]
    assert [float(row["k3"]) for row in rows] == pytest.approx(k3, rel=1e-3, abs=1e-12)


def test_a_folder_that_is_a_file_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "taken").write_text("mine")
    assert main(["engines", "nowhere", "there", "--output-dir", str(tmp_path / "taken")]) == 2
    assert "taken' is a file; name a folder." in capsys.readouterr().err


@pytest.mark.usefixtures("memory")
def test_a_url_takes_the_files(tmp_path: Path) -> None:
    compared = compare_tokens(*logits_pair(tmp_path), most_drawn=2)
    folder = location_of("memory://bucket/out")
    write_files(folder, compared.record, token_rows(compared.samples, compared.values))
    assert {path.name for path in folder.iterdir()} == NAMES


@pytest.mark.parametrize("name", ["hostile", "clean", *FAULTS])
def test_json_is_valid_by_the_schema(tmp_path: Path, name: str) -> None:
    if name == "hostile":
        record = engine_records.hostile()
    else:
        change = None if name == "clean" else FAULTS[name][0]
        record = compare_tokens(*logits_pair(tmp_path, change), most_drawn=3).record
    data = json.loads(json_text(record))
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(data)


def test_names_are_text_everywhere(tmp_path: Path) -> None:
    html = write_files(tmp_path, engine_records.hostile(), []).read_text(encoding="utf-8")
    reader = PageReader(html)
    clean_page = PageReader(page(engine_records.hostile(), []).replace("&lt;", ""))
    assert {name for name, _ in reader.tags} == {name for name, _ in clean_page.tags}
    assert not {"script src", "img", "iframe", "object"} & {name for name, _ in reader.tags}
    assert not any(f">{name}<" in html for name in HOSTILE if "<" in name)


@pytest.mark.parametrize(
    ("site", "origin", "why"),
    [
        ("L1 up forward weight, whole", "local", "it is a weight"),
        ("L1 up forward output", "local", "the inputs of its module agree"),
        ("L1 up forward output", "enters", "the modules before it were not collected"),
        ("L1 up forward output", "unknown", "no inputs of its module were collected"),
    ],
)
def test_a_text_says_why_the_difference_begins_there(site: str, origin: str, why: str) -> None:
    record = engine_records.hostile()
    record.sites_compared, record.sites_differing = 9, 2
    record.first_site = SiteDifference(site, origin, 0.25, 1.0)
    assert site_text(record) == (
        f"2 of 9 tensors differ; they begin to differ at {site} (relative MSE 0.25), and {why}"
    )


@proof
def test_dumps_say_where_the_difference_begins(tmp_path: Path) -> None:
    wrong = network()
    other_module(wrong)
    engines = collect(tmp_path / "a", wrong), collect(tmp_path / "b", network())
    record = compare_tokens(*engines).record
    assert len(record.sites) == record.sites_differing == 79
    assert [site.origin for site in record.sites[:2]] == ["local", "carried"]
    assert record.sites[0] == record.first_site
    text = page(record, [])
    assert text.count("<td class='text fail'>starts here</td>") == 1
    assert "they begin to differ at L1 model.layers.1.self_attn.o_proj forward output" in text
    assert "48 of 48 weights are equal" in text
    equal = page(compare_tokens(engines[1], engines[1], most_drawn=3).record, [])
    assert "<span class='good'>" in equal
    assert "All tokens have equal log-probabilities." in equal
    assert "No sample differs." in equal


def test_lines_of_long_samples_keep_the_largest_difference(tmp_path: Path) -> None:
    scored = runs.scored(samples=2, tokens=1000)
    logits = scored.logits.clone()
    logits[1, 700] *= 1.5
    runs.write_npz(tmp_path / "a.npz", runs.Scored(scored.ids, logits))
    runs.write_npz(tmp_path / "b.npz", scored)
    compared = compare_tokens(str(tmp_path / "a.npz"), str(tmp_path / "b.npz"))
    profile = position_profile(compared.values)
    assert profile.step == 7
    assert len(profile.mean) == len(profile.largest) == -(-999 // 7) <= MOST_VALUES
    assert int(np.argmax(profile.largest)) == 700 // 7
    assert profile.largest[100] == pytest.approx(14 * (profile.mean[100] or 0.0))
    (sample,) = worst_samples(compared.samples, compared.values, 5)
    assert (sample.sample, sample.step, sample.share) == ("1", 7, 1.0)
    assert abs(sample.differences[100] or 0.0) == profile.largest[100]
    assert sum(value != 0 for value in sample.differences) == 1
