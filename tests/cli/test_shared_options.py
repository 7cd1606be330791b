"""`--json`, `--quiet`, `--color` and help: the same for every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate._version import __version__
from qgate.baselines import Candidate, write_candidate
from qgate.cli import main
from qgate.cli._console import has_colors
from qgate.comparing.layer_files import CaptureSettings, writing
from qgate.dumps import DumpWriter
from qgate.formats import FORMATS
from tests.baselines.building import ORIGIN, key, recorded
from tests.cli.test_options import LEAVES
from tests.dumps.making import record as dumped
from tests.results.making import record, write
from tests.shares import share

Capsys = pytest.CaptureFixture[str]
# What neither lists nor decides: it runs another program, follows one, writes files or prints text.
WITHOUT_JSON = {"run", "collect", "layers capture", "dumps watch", "show vectors"}
SHORT = "--samples 1 --seqlen 16"
CAPTURED = CaptureSettings(
    mode="fp32", model="net", basis="plain", weights="aa" * 32, inputs="bb" * 32, calibration=None,
    samples=1, seqlen=4, seed=0, device="cpu", torch="2", qgate="0", created="now",
)  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump, baselines with a candidate, results, captures and tensors, one of them with a NaN."""
    folder = tmp_path_factory.mktemp("shared")
    with DumpWriter(folder / "dump", rank=0, world_size=1) as writer:
        writer.add(dumped(0, module="layers.0.q", rank=0, world_size=1), torch.ones(4, 4))
    write_candidate(folder / "qgate-out/candidates", Candidate(ORIGIN, "2-1", "a", {key(): 2e-4}))
    recorded(folder / "baselines")
    write(folder / "qgate-out/results.jsonl", record("a"), record("b", 1.0))
    (folder / "layer_outputs").mkdir()
    for mode in ("fp32", "2-1"):
        captured = replace(CAPTURED, mode=mode)
        with writing(folder / "layer_outputs", captured, {"layer_0": "layers.0:output"}) as writer:
            writer.add("layer_0", torch.ones(4, 2))
    torch.save(torch.tensor([1.0, float("nan")]), folder / "nan.pt")
    return folder


JSON: dict[str, tuple[int, Callable[[Any], object], object]] = {
    "show formats": (0, lambda d: [fmt["name"] for fmt in d], list(FORMATS.names())),
    "show formats fp4_e2m1": (0, lambda d: (d["max"], d["values"][:3]), (6.0, [0.0, 0.5, 1.0])),
    "show modes int8": (0, lambda d: [(mode_row["mode"], mode_row["models"]) for mode_row in d], [("int8", ["any"])]),
    "baselines list": (0, lambda d: d[0]["modes"]["2-4"]["entries"], 1),
    "baselines verify": (0, lambda d: (d["passed"], d["problems"]), (True, [])),
    "baselines prune --mode 2-4 --dry-run": (0, lambda d: d["changes"][-1]["old"], 0.5),
    "baselines accept --dry-run": (0, lambda d: [c["new"] for c in d["changes"]], [2e-4]),
    "dumps ls dump": (0, lambda d: [dump_row["module"] for dump_row in d], ["layers.0.q"]),
    "dumps info dump": (0, lambda d: d["records"], 1),
    "dumps verify dump": (0, lambda d: (d["passed"], d["proved"]["tensors"]), (True, 1)),
    "dumps compare dump dump": (0, lambda d: (d["passed"], len(d["pairs"])), (True, 1)),
    "dumps merge dump --output merged": (0, lambda d: (d["ranks"], d["records"]), (1, 1)),
    "dumps export dump --output exported": (0, lambda d: d["files"], 1),
    "dumps draw dump --no-plots": (0, lambda d: (d["tensors"], d["page"]), (1, "draw/index.html")),
    "dumps draw dump --quick": (0, lambda d: (d["tensors"], d["picture"]), (1, "draw/quick_analysis.png")),
    "layers compare 2-1": (0, lambda d: d["compared_mode"], "2-1"),
    "layers compare --all": (0, lambda d: [layer_row["compared_mode"] for layer_row in d], ["2-1"]),
    "report": (0, lambda d: (d["passed"], d["gates"], len(d["failed"])), (False, 2, 1)),
    "report qgate-out --merge out": (0, lambda d: (d["passed"], d["records"]), (False, 2)),
    "sweep nan.pt --no-plots": (1, lambda d: (d["passed"], d["tensors"][0]["tensor"]), (False, "nan.pt")),
    "activations --model tiny-llama --list-layers lm_head": (0, lambda d: [e["name"] for e in d], ["lm_head"]),
    "init product --dry-run": (0, lambda d: "product/qgate.toml" in d["written"], True),
}  # fmt: skip


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared folder, where commands are run."""
    for path in prepared.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "product").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@share(4)
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("line", JSON)
def test_json_is_all_that_is_printed_and_quiet_prints_nothing(line: str, capsys: Capsys) -> None:
    status, fact, expected = JSON[line]
    assert main([*line.split(), "--json"]) == status
    assert fact(json.loads(capsys.readouterr().out)) == expected
    quiet_line = line.replace("merged", "merged-2").replace("exported", "exported-2")
    assert main([*quiet_line.split(), "--quiet"]) == status
    out, err = capsys.readouterr()
    assert (out, err.partition(":")[0]) == ("", "FAILED nan.pt" * line.startswith("sweep"))


def test_every_command_that_lists_or_decides_has_json() -> None:
    options = {" ".join(words): parser._option_string_actions for words, parser in LEAVES.items()}
    assert {
        name for name, json_flags in options.items() if "--json" not in json_flags
    } == WITHOUT_JSON
    # In tests of their own.
    with_checks = {"check", "checkpoint", "engines", "doctor", "layers calibrate"}
    checked = {name for name in options for line in JSON if f"{line} ".startswith(f"{name} ")}
    assert checked == options.keys() - WITHOUT_JSON - with_checks
    assert {name for name, quiet_flags in options.items() if "--quiet" not in quiet_flags} == {
        "run"
    }


@pytest.mark.parametrize(
    ("words", "environment", "on_terminal", "expected"),
    [
        ([], {}, True, True),
        ([], {}, False, False),
        ([], {"NO_COLOR": "1"}, True, False),
        ([], {"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        (["--color", "always"], {"NO_COLOR": "1"}, False, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, True, False),
        (["--color", "auto"], {"TERM": "dumb"}, True, False),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_color_is_what_the_option_says_else_the_environment(
    words: list[str],
    environment: dict[str, str],
    on_terminal: bool,
    expected: bool,
    before: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    colors: list[bool] = []

    def look(_args: object) -> int:
        colors.append(has_colors(on_terminal))
        return 0

    monkeypatch.setattr("qgate.cli.show.run", look)
    assert main([*words, "show", "formats"] if before else ["show", "formats", *words]) == 0
    assert colors == [expected]


def test_quiet_prints_errors_all_the_same(capsys: Capsys) -> None:
    assert main(["--quiet", "show", "formats", "hif9"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "'hif9'" in err


@pytest.mark.parametrize(
    ("argv", "usage"),
    [
        (["help"], "usage: qgate [-h]"),
        (["help", "sweep"], "usage: qgate sweep "),
        (["help", "dumps", "compare"], "usage: qgate dumps compare "),
    ],
)
def test_help_is_a_command_too(argv: list[str], usage: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version(option: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main([option])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"qgate {__version__}\n"
