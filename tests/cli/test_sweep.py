"""`qgate sweep`: its files, its words, and the errors of the known tool it must not repeat."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import qgate
from qgate.cli import main
from qgate.sweeps import choices, running
from tests.engine import work
from tests.shares import proof

Capsys = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("here")
ROOT = Path("draw") / "scaling_analysis"


def activation(rows: int = 32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    channels = torch.exp(torch.randn(128, generator=generator))
    return (torch.randn(rows, 128, generator=generator) * channels).bfloat16()


def run(capsys: Capsys, *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["sweep", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def record(name: str, fmt: str = "fp8_e4m3", kind: str = "scaling") -> dict:
    prefix = "mxfp_" if fmt.startswith(("mx", "fp")) else ""
    return json.loads((ROOT / name / f"{prefix}{kind}_{fmt}.json").read_text())


def folders(root: Path) -> list[str]:
    """Of the tensors, beside the page."""
    assert (root / "index.html").is_file()
    return sorted(path.name for path in root.iterdir() if path.name != "index.html")


@proof
def test_the_files_of_a_sweep(capsys: Capsys) -> None:
    torch.save(activation(), "act.pt")
    status, out, _ = run(capsys, "act.pt", "--elem-format", "e4m3", "-v")
    assert status == 0
    assert {path.name for path in (ROOT / "act").iterdir()} == {
        "mxfp_scaling_results_fp8_e4m3.txt",
        "mxfp_scaling_test_fp8_e4m3.png",
        "mxfp_scaling_summary_fp8_e4m3.png",
        "mxfp_scaling_test_act_fp8_e4m3.log",
        "mxfp_scaling_fp8_e4m3.json",
        "mxfp_scaling_fp8_e4m3.csv",
        "mxfp_block_scaling_fp8_e4m3.png",
        "mxfp_block_scaling_fp8_e4m3.json",
        "mxfp_block_scaling_fp8_e4m3.csv",
    }
    page = (ROOT / "index.html").read_text()
    links = re.findall(r"(?:href|src)='([^'#]+\.png)'", page)
    assert len(links) == 3, "in the table; the pictures are drawn in the page"
    assert page.count("<svg") == 2, "of the levels and of the blocks"
    assert all((ROOT / link).exists() for link in links)
    for words in (
        "[1/1] Processing: act.pt",
        "SCALING FACTOR ANALYSIS & RECOMMENDATIONS",
        "INDIVIDUAL METRIC OPTIMA",
        "COMPOSITE RECOMMENDATION",
        "PERFORMANCE ANALYSIS",
        "FINAL RECOMMENDATION",
        "OVERFLOW/UNDERFLOW ANALYSIS SUMMARY",
        "Successfully processed: act.pt",
        "Total tensors: 1",
        "Failed: 0",
    ):
        assert words in out
    log = (ROOT / "act" / "mxfp_scaling_test_act_fp8_e4m3.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d - ", line) for line in log)
    log_texts = {line.split(" - ", 1)[1] for line in log[:-1]}
    assert log_texts <= set(out.splitlines())
    data = record("act")
    assert data["tensor"]["shape"] == [32, 128]
    assert data["tensor"]["dtype"] == "bfloat16"
    assert len(data["tensor"]["sha256"]) == 64
    assert data["versions"]["torch"] == torch.__version__
    rows = list(csv.DictReader((ROOT / "act" / "mxfp_scaling_fp8_e4m3.csv").open()))
    assert {row["tensor"] for row in rows} == {"act.pt"}
    assert {row["sha256"] for row in rows} == {data["tensor"]["sha256"]}
    assert [float(row["mse"]) for row in rows] == [lv["metrics"]["mse"] for lv in data["levels"]]


def test_options_reach_the_sweep(capsys: Capsys) -> None:
    torch.save(activation(), "act.pt")
    options = ["--max-scale-exp", "10", "--min-scale-exp", "-10", "--num-levels", "3", "--no-plots"]
    assert (
        run(capsys, "act.pt", *options, "--output-dir", "out", "--set", "sweep_scale_bits=4")[0]
        == 0
    )
    data = json.loads(Path("out/act/mxfp_scaling_fp8_e4m3.json").read_text())
    assert data["parameters"]["max_exp"] == 10
    assert data["parameters"]["min_exp"] == -10
    assert data["levels"][0]["exponent"] == 10
    assert [lv["e8m0"] for lv in data["levels"]] == [
        lv["integer"] and abs(lv["exponent"]) <= 7 for lv in data["levels"]
    ]
    assert not list(Path("out/act").glob("*.png"))
    options = ["--granularity", "block", "--max-scale-exp", "2", "--min-scale-exp", "-1"]
    assert run(capsys, "act.pt", *options, "--no-plots", "--output-dir", "block")[0] == 0
    assert sorted(p.name for p in Path("block/act").iterdir()) == [
        "mxfp_block_scaling_fp8_e4m3.csv",
        "mxfp_block_scaling_fp8_e4m3.json",
        "mxfp_scaling_test_act_fp8_e4m3.log",
    ]
    offsets = json.loads(Path("block/act/mxfp_block_scaling_fp8_e4m3.json").read_text())["levels"]
    assert [lv["exponent"] for lv in offsets] == [2, 1, 0, -1]


def test_files_of_mx_formats_and_their_elements_are_called_mxfp(capsys: Capsys) -> None:
    torch.save(activation(), "act.pt")
    formats = "mxfp4,fp6_e3m2,int8,hif8,bf16"
    assert run(capsys, "act.pt", "--elem-format", formats, "--no-plots")[0] == 0
    names = {path.name for path in (ROOT / "act").iterdir()}
    assert {name for name in names if name.startswith("mxfp")} == {
        file
        for fmt in ("mxfp4_e2m1", "fp6_e3m2")
        for file in (
            f"mxfp_scaling_results_{fmt}.txt",
            f"mxfp_scaling_{fmt}.json",
            f"mxfp_scaling_{fmt}.csv",
            f"mxfp_block_scaling_{fmt}.json",
            f"mxfp_block_scaling_{fmt}.csv",
            f"mxfp_scaling_test_act_{fmt}.log",
        )
    }
    assert {"scaling_int8.json", "block_scaling_int8.json", "scaling_hif8.json"} < names
    kinds = {fmt: record("act", fmt)["parameters"]["usual"]["kind"] for fmt in ("int8", "hif8")}
    assert kinds == {"int8": "amax", "hif8": "cast"}
    assert record("act", "mxfp4_e2m1")["parameters"]["usual"]["kind"] == "production"


def test_a_run_ends_with_a_final_summary(capsys: Capsys) -> None:
    names = [f"tensor{number}.pt" for number in (1, 2, 3)]
    for name in names:
        torch.save(activation(), name)
    status, out, _ = run(capsys, *names, "--no-plots", "--num-levels", "3", "-v")
    assert status == 0
    rule = "=" * 80
    begin = f"Processing 3 files...\n{rule}\n\n[1/3] Processing: tensor1.pt\n{'-' * 80}\n"
    assert out.startswith(begin)
    summary = ["FINAL SUMMARY", rule, "Total tensors: 3", "Successful: 3", "Failed: 0"]
    assert "\n".join(["", rule, *summary, "All tests completed successfully!", ""]) in out
    torch.save(torch.tensor([1.0, float("nan")]), "tensor2.pt")
    status, out, _ = run(capsys, *names, "--no-plots", "--num-levels", "3", "-v")
    assert status == 1
    summary[3:] = ["Successful: 2", "Failed: 1"]
    assert "\n".join(["", rule, *summary, ""]) in out
    assert "successfully!" not in out


def test_the_log_has_limit_and_range_of_every_level(capsys: Capsys) -> None:
    x = activation()
    torch.save(x, "act.pt")
    ends = ["--max-scale-exp", "4", "--min-scale-exp", "-10", "--num-levels", "15"]
    run(capsys, "act.pt", *ends, "--no-plots", "--granularity", "tensor")
    log = (ROOT / "act" / "mxfp_scaling_test_act_fp8_e4m3.log").read_text()
    lines = [line.split(" - ", 1)[1] for line in log.splitlines()]
    lost = [level for level in record("act")["levels"] if level["severity"]["overflow"] != "none"]
    assert lines.count("    Max Normal: 4.48e+02") == len(lost) > 6
    for level in lost:
        scaled = x.float() / 2.0 ** level["exponent"]
        rounded = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        ranges = [f"[{part.min():.2e}, {part.max():.2e}]" for part in (scaled, rounded)]
        assert f"    Tensor Range: {ranges[0]} scaled, {ranges[1]} rounded" in lines, level


@pytest.mark.parametrize("spec", ["integers.pt", "several.pt", "several.pt:b"])
def test_integers_are_swept_after_a_cast(capsys: Capsys, spec: str) -> None:
    torch.save(torch.arange(-500, 500), "integers.pt")
    torch.save({"a": torch.arange(5), "b": torch.arange(-500, 500).int()}, "several.pt")
    status, out, _ = run(capsys, spec, "--no-plots")
    assert status == 1
    assert "--cast bf16 sweeps integers" in out
    status, out, _ = run(capsys, spec, "--cast", "bf16", "--no-plots")
    assert status == 0, out
    name = "integers" if spec == "integers.pt" else "several.b"
    data, x = record(name), torch.arange(-500, 500).bfloat16()
    assert data["tensor"]["dtype"].startswith("int")
    assert data["tensor"]["rounded_to"] == "bf16"
    expected = qgate.sweep(x, "fp8_e4m3").levels
    assert [lv["metrics"]["mse"] for lv in data["levels"]] == [
        lv["metrics"]["mse"] for lv in expected
    ]


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        ((), ("hif8", "int4", "mxfp4_e2m1"), ("nvfp4", "hif4")),
        (("--granularity", "block"), ("fp8_e4m3", "int8", "mxint8"), ("nvfp4", "hif8", "fp16")),
    ],
)
def test_an_unknown_format_is_told_what_can_be_swept(
    capsys: Capsys, options: tuple[str, ...], allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    status, _, error = run(capsys, "x.pt", "--elem-format", "fp9", *options)
    assert status == 2
    names = set(re.findall(r"[a-z0-9_]+", error.partition("Allowed: ")[2]))
    assert set(allowed) <= names
    assert not names & set(refused)


def test_one_bad_file_does_not_stop_the_others(capsys: Capsys) -> None:
    torch.save(activation(), "good.pt")
    torch.save(torch.arange(5), "integers.pt")
    torch.save(torch.zeros(5), "zeros.pt")
    torch.save(torch.empty(0), "empty.pt")
    torch.save(activation(2).to_sparse(), "sparse.pt")
    bad = activation(4)
    bad[0, 0] = float("nan")
    torch.save(bad, "nan.pt")
    bad[0, 0] = float("inf")
    torch.save(bad, "inf.pt")
    Path("text.pt").write_text("hello")
    names = ["text", "integers", "good", "zeros", "empty", "sparse", "nan", "inf", "missing"]
    status, out, _ = run(capsys, *(f"{name}.pt" for name in names), "--no-plots", "-v")
    assert status == 1
    summary = out[out.index("Total tensors") :] if out.count("Total tensors") == 1 else ""
    assert "Total tensors: 9" in summary
    assert "Successful: 1" in summary
    for words in (
        "integers.pt: integers is a torch.int64 tensor; a sweep needs floating point numbers",
        "zeros.pt: zeros is all zeros",
        "empty.pt: empty is empty",
        "sparse.pt: sparse is a torch.sparse_coo tensor",
        "nan.pt: 1 NaN in the tensor",
        "inf.pt: 1 Inf in the tensor",
        "text.pt: 'text.pt' cannot be read",
        "missing.pt: there is no file 'missing.pt'",
    ):
        assert f"FAILED {words}" in summary
    assert (ROOT / "nan" / "mxfp_scaling_fp8_e4m3.json").exists()


def test_equal_names_get_folders_of_their_own(capsys: Capsys) -> None:
    for folder, seed in (("d1", 1), ("d2", 2)):
        Path(folder).mkdir()
        torch.save(activation(seed=seed), f"{folder}/same.pt")
    for _ in range(2):
        assert run(capsys, "d1/same.pt", "d2/same.pt", "--no-plots")[0] == 0
        assert folders(ROOT) == ["same", "same-2"]
        assert record("same")["tensor"]["path"] == "d1/same.pt"
        assert record("same-2")["tensor"]["path"] == "d2/same.pt"
    assert run(capsys, "d2/same.pt", "--no-plots", "--output-dir", "other")[0] == 0
    assert folders(Path("other")) == ["same"]
    # A later run of the second alone finds its own folder and leaves the first one's alone.
    before = (ROOT / "same" / "mxfp_scaling_fp8_e4m3.json").read_bytes()
    assert run(capsys, "d2/same.pt", "--no-plots")[0] == 0
    assert (ROOT / "same" / "mxfp_scaling_fp8_e4m3.json").read_bytes() == before


def test_tensors_inside_files_and_patterns(capsys: Capsys) -> None:
    save_file({"a/b": activation(), "../up": activation(4)}, "s.safetensors")
    np.save("n.npy", activation().float().numpy())
    status, out, _ = run(capsys, "*.safetensors", "n.npy", "--no-plots", "-v")
    assert status == 0
    assert "Total tensors: 3" in out
    assert folders(ROOT) == ["n", "s..._up", "s.a_b"]
    assert not Path("draw/up").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-levels", "0"], "'0' is not allowed; it is a whole number from 1"),
        (["--num-levels", "-1"], "'-1' is not allowed; it is a whole number from 1"),
        (["--jobs", "0"], "'0' is not allowed; it is a whole number from 1"),
        (["--set", "sweep_scale_bits=-5"], "sweep_scale_bits = '-5'"),
        (["--set", "sweep_scale_bits=12"], "sweep_scale_bits = '12'"),
        (["--elem-format", "fp9"], "unknown format 'fp9'"),
        (["--elem-format", "binary8p9se"], "K from 3 to 8 bits"),
        (["--elem-format", "binary8p3se", "--granularity", "block"], "binary8p3se"),
        (["--max-scale-exp", "-5", "--min-scale-exp", "5"], "--max-scale-exp -5"),
        (["--granularity", "block", "--max-scale-exp", "0.5"], "--max-scale-exp 0.5"),
    ],
)
def test_bad_options_stop_before_any_work(capsys: Capsys, argv: list[str], words: str) -> None:
    torch.save(activation(), "act.pt")
    try:
        status = main(["sweep", "act.pt", *argv])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert words in capsys.readouterr().err
    assert not Path("draw").exists()


@proof
def test_several_jobs_give_the_same_files(capsys: Capsys) -> None:
    names = [f"t{i}.pt" for i in range(3)]
    for i, name in enumerate(names):
        torch.save(activation(seed=i), name)
    options = ("--granularity", "block", "--output-dir")
    assert run(capsys, *names, "--no-plots", *options, "one")[0] == 0
    status, out, _ = run(capsys, *names, "-v", "--jobs", "2", *options, "two")
    assert status == 0
    assert len([path for path in Path("two").rglob("*.png") if path.stat().st_size]) == 3
    assert [line for line in out.splitlines() if line.startswith("[")] == [
        f"[{i}/3] Processing: {name}" for i, name in enumerate(names, 1)
    ]
    for path in Path("one").rglob("*.json"):
        assert path.read_bytes() == Path("two", *path.parts[1:]).read_bytes()


def test_an_ascii_terminal_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(activation(2), "act.pt")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["sweep", "act.pt", "--no-plots", "-v"]) == 0
    terminal.seek(0)
    assert "Successfully processed: act.pt" in terminal.read()


def test_float32_that_is_bf16_is_counted_and_other_float32_rounded_only_on_request(
    capsys: Capsys,
) -> None:
    x = activation(8)
    torch.save(x, "bf16.pt")
    torch.save(x.float(), "same.pt")
    torch.save(x.float() * 1.001, "other.pt")
    assert run(capsys, "bf16.pt", "same.pt", "other.pt", "--no-plots")[0] == 0
    assert record("same")["levels"] == record("bf16")["levels"]
    assert record("same")["tensor"]["dtype"] == "float32"
    assert record("other")["tensor"]["rounded_to"] is None
    exact = record("other")["levels"]
    assert run(capsys, "other.pt", "--no-plots", "--via", "bf16")[0] == 0
    assert record("other")["tensor"]["rounded_to"] == "bf16"
    assert record("other")["levels"] != exact


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_swept(capsys: Capsys) -> None:
    torch.save(activation(2), "act.pt")
    Path("draw").write_text("a file where a folder has to be")
    status, out, err = run(capsys, "act.pt", "--no-plots")
    assert status == 2
    assert "Processing: act.pt" not in out
    assert "results cannot be written to 'draw/scaling_analysis': Not a directory" in err
    assert "--output-dir" in err


def test_a_tensor_whose_folder_is_taken_by_a_file_fails_alone(capsys: Capsys) -> None:
    torch.save(activation(2), "act.pt")
    torch.save(activation(2), "other.pt")
    ROOT.mkdir(parents=True)
    (ROOT / "act").write_text("a file where a folder has to be")
    status, out, _ = run(capsys, "act.pt", "other.pt", "--no-plots", "-v")
    assert status == 1
    assert "Failed: act.pt: cannot write the results" in out
    assert "Successfully processed: other.pt" in out


def test_a_run_that_was_killed_does_only_the_rest(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{i}.pt" for i in range(4)]
    for i, name in enumerate(names):
        torch.save(activation(4, seed=i), name)
    assert run(capsys, *names, "--no-plots", "--output-dir", "whole")[0] == 0
    swept, most = [], 2
    real = running.sweep_part

    def counted(part: running.FilePart, request: object) -> object:
        if len(swept) == most:
            raise KeyboardInterrupt
        swept.append(part.spec)
        return real(part, request)

    monkeypatch.setattr(running, "sweep_part", counted)
    assert run(capsys, *names, "--no-plots", "--output-dir", "out")[0] == 130
    assert swept == names[:2]
    torch.save(activation(4, seed=9), "t1.pt")
    most = None
    status, out, _ = run(capsys, *names, "--no-plots", "--output-dir", "out", "-v")
    assert status == 0
    assert swept == [*names[:2], "t1.pt", "t2.pt", "t3.pt"], "t1 was written anew since"
    assert "Swept before, and not again: t0.pt" in out
    assert "Total tensors: 4" in out
    assert out.count("t0.pt: fp8_e4m3 scale") == 1
    for name in ("t0", "t2", "t3"):
        file = f"{name}/mxfp_scaling_fp8_e4m3.json"
        assert Path("out", file).read_bytes() == Path("whole", file).read_bytes()
    assert not list(Path("out").glob(".*")), "nothing is left to go on with"
    swept.clear()
    run(capsys, *names, "--no-plots", "--output-dir", "out")
    assert swept == names, "a run that was finished is done anew"


def test_a_file_that_kills_its_process_is_listed_and_tried_again(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    import qgate.engine

    names = ["a.pt", "b.pt", "c.pt"]
    for name in names:
        torch.save(activation(4), name)
    specs = []

    def poisoned(function, items, _workers, *, shared):
        for part in items:
            specs.append(str(part))
            poison = part.spec == "b.pt"
            yield qgate.engine.Failure("it ended") if poison else function(part, shared)

    monkeypatch.setattr(running, "map_items", poisoned)
    status, out, _ = run(capsys, *names, "--no-plots", "--jobs", "2")
    assert status == 1
    assert "FAILED b.pt: it ended" in out
    assert run(capsys, *names, "--no-plots", "--jobs", "2")[0] == 1
    assert specs == [*names, "b.pt"]


@pytest.mark.parametrize(
    ("function", "status", "printed"),
    [
        (work.swept_after_death, 0, "a process of --jobs ended: killed, or out of memory"),
        (work.swept_but_one, 1, "FAILED b.pt: its process ended twice: killed, or out of memory"),
    ],
)
def test_the_status_says_what_a_killed_process_left(
    function: Callable, status: int, printed: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a.pt", "b.pt"]
    for name in names:
        torch.save(activation(4), name)
    monkeypatch.setattr(running, "sweep_whole_part", function)
    ended, out, err = run(capsys, *names, "--no-plots", "--jobs", "2")
    assert ended == status, out + err
    assert printed in " ".join((out + err).split())
    assert [name for name in folders(ROOT) if name in "ab"] == [*"ab"][: 2 - status]


@proof
def test_workers_share_a_large_file(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors, in the order of the file, and a part that is lost costs no other."""
    import qgate.engine
    from qgate.sweeps.requests import parts_of

    tensors = {f"w{i}": activation(4, seed=i) for i in range(37)}
    save_file({**tensors, "steps": torch.arange(3), "on": torch.ones(2) > 0}, "big.safetensors")
    few = ("--max-scale-exp", "0", "--min-scale-exp", "-1")
    options = ("--no-plots", "--granularity", "block", *few, "--output-dir")
    assert run(capsys, "big.safetensors", *options, "one")[0] == 0
    parts = parts_of("big.safetensors")
    assert [len(part.names) for part in parts] == [16, 16, 5]
    assert sorted(name for part in parts for name in part.names) == sorted(tensors)
    arguments = ("big.safetensors", "-v", "--jobs", "2", *options, "two")

    def poisoned(function, items, _workers, *, shared):
        for i, part in enumerate(items):
            yield qgate.engine.Failure("it ended") if i == 1 else function(part, shared)

    with monkeypatch.context() as patched:
        patched.setattr(running, "map_items", poisoned)
        status, out, _ = run(capsys, *arguments)
    assert status == 1
    assert f"FAILED {parts[1]}: it ended" in out
    assert "Total tensors: 22" in out, "21 and the part that is lost"
    status, out, _ = run(capsys, *arguments)
    assert (status, "Total tensors: 37" in out) == (0, True), "it was not done, so it is done again"
    for one in Path("one").rglob("*.json"):
        assert one.read_bytes() == Path("two", *one.parts[1:]).read_bytes()
    assert len(list(Path("two").rglob("*.json"))) == len(list(Path("one").rglob("*.json"))) == 37


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.save({"a": activation(2)}, "x"), "a torch file is read whole"),
        (lambda: Path("x").write_bytes(b"\xff" * 20), "damage is told when it is read"),
        (lambda: None, "so is a missing file"),
        (lambda: save_file({"i": torch.arange(9)}, "x"), "no float in it"),
    ],
)
def test_other_files_are_one_part(make: Callable[[], None], what: str) -> None:
    from qgate.sweeps.requests import FilePart, parts_of

    make()
    name = "x.pt" if "torch" in what else "x.safetensors"
    if Path("x").exists():
        Path("x").rename(name)
    assert parts_of(name) == [FilePart(name)]


@pytest.mark.parametrize("cast", [[], ["--cast", "bf16"]], ids=["as they are", "after a cast"])
def test_integers_among_other_tensors_are_passed_over_and_nested_ones_found(
    capsys: Capsys, cast: list[str]
) -> None:
    state = {
        "model": {"w": activation(), "ids": torch.arange(4)},
        "opt": [activation(2)],
        "step": 3,
    }
    torch.save(state, "train.pt")
    status, out, _ = run(capsys, "train.pt", "--no-plots", "-v", *cast)
    assert status == 0
    assert "Total tensors: 2" in out
    assert folders(ROOT) == ["train.model.w", "train.opt.0"]
    assert run(capsys, "train.pt:model.ids", "--no-plots")[0] == 1


def test_verbose_prints_the_analysis_and_ends_with_a_line_per_sweep(capsys: Capsys) -> None:
    torch.save(activation(), "act.pt")
    formats = ("--elem-format", "e4m3", "--elem-format", "fp4_e2m1")
    status, out, _ = run(capsys, "act.pt", "--no-plots", "--verbose", *formats)
    assert status == 0
    assert "ANALYSIS" in out
    lines = [line for line in out.splitlines() if line.startswith("  act.pt: ")]
    assert [line.split()[1:3] for line in lines] == [
        ["fp8_e4m3", "scale"],
        ["mxfp8_e4m3", "block"],
        ["fp4_e2m1", "scale"],
        ["mxfp4_e2m1", "block"],
    ]
    exponent = record("act")["levels"][record("act")["advice"]["recommended"]]["exponent"]
    assert f"2^{exponent:g}" in lines[0]


@pytest.mark.parametrize("width", [80, 40])
def test_a_tensor_is_answered_with_a_table_of_formats_the_best_first(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    x = activation()
    torch.save(x, "act.pt")
    status, out, _ = run(capsys, "act.pt", "--no-plots")
    lines = out.splitlines()
    assert status == 0
    assert len(lines) <= 15
    assert max(map(len, lines)) <= width
    start = next(i for i, line in enumerate(lines) if line.split()[0] == "format")
    cells = [line.split() for line in lines[start + 1 : start + 10]]
    assert {row[0] for row in cells} == set(choices.FORMATS)
    ratios = [float(row[-2]) for row in cells]
    assert ratios == sorted(ratios, reverse=True)
    for name, *_, scale, ratio, _ in cells:
        if scale.startswith("2^"):
            measured = qgate.sweep(x, name).recommended
            assert scale == f"2^{measured['exponent']:g}"
            assert float(ratio) == round(measured["metrics"]["sqnr_db"], 2)
    nvfp4 = qgate.stats.errors(qgate.quantize(x, "nvfp4"), x).metric("sqnr_db")
    assert ratios[[row[0] for row in cells].index("nvfp4")] == round(nvfp4, 2)
    assert lines[start + 10].startswith(f"use {cells[0][0]}") or cells[0][0] in lines[start + 10]
    assert lines[-1] == "draw/scaling_analysis/index.html"
    text = unescape((ROOT / "index.html").read_text().replace("<wbr>", ""))
    assert "Which format" in text
    advice = " ".join(lines[start + 10 : -1]).partition(";")[0]
    assert f"U{advice[1:]}, in act.pt".split() == (
        re.sub("<.*?>", "", re.findall(r"<h1>(.*?)</h1>", text)[0]).split()
    ), "the page leads with the same advice"


def test_formats_are_ranked_without_elements_that_hide_the_others(capsys: Capsys) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 2.0**14
    torch.save(x, "act.pt")
    assert run(capsys, "act.pt", "--no-plots")[0] == 0
    out = run(capsys, "act.pt", "--no-plots")[1]
    ratios = {row.split()[0]: float(row.split()[-2]) for row in out.splitlines()[2:11]}
    assert ratios["int8"] < 1, "one scale for all leaves nothing of the others"
    assert "without massive elements" in out
    quantized = qgate.quantize(x, "nvfp4")
    small = x.abs() < 2.0**14
    ratio_of_small = qgate.stats.errors(quantized[small], x[small]).metric("sqnr_db")
    assert ratios["nvfp4"] == round(ratio_of_small, 2)


def test_a_format_that_is_named_shows_what_its_scale_costs(capsys: Capsys) -> None:
    torch.save(activation(), "act.pt")
    status, out, _ = run(capsys, "act.pt", "--elem-format", "fp8_e4m3", "--no-plots")
    lines = out.splitlines()
    assert status == 0
    assert len(lines) <= 15
    levels = {level["exponent"]: level["metrics"]["sqnr_db"] for level in record("act")["levels"]}
    rows = [line.rsplit(maxsplit=3) for line in lines[2:5]]
    assert [row[0].strip() for row in rows][:2] == ["fp8_e4m3", "amax / max"]
    for _, scale, ratio, _ in rows:
        chosen = float(scale[2:]) if scale.startswith("2^") else math.log2(float(scale))
        exponent = min(levels, key=lambda e, chosen=chosen: abs(e - chosen))
        assert float(ratio) == round(levels[exponent], 2)
    assert any(
        re.match(f"use (scale )?{re.escape(rows[0][1])} for fp8_e4m3: SQNR {rows[0][2]} dB", line)
        for line in lines
    )


def test_blocks_that_are_much_better_are_named(capsys: Capsys) -> None:
    x = activation()
    x[:, 5] *= 100
    torch.save(x, "act.pt")
    out = " ".join(run(capsys, "act.pt", "--elem-format", "fp4_e2m1", "--no-plots")[1].split())
    level = record("act", "fp4_e2m1", "block_scaling")
    best = level["levels"][level["advice"]["recommended"]]["metrics"]["sqnr_db"]
    assert re.search(rf"use mxfp4_e2m1 with .*its blocks' scales: SQNR {best:.2f} dB", out)
    assert "; with one scale " in out
    out = run(capsys, "act.pt", "--elem-format", "fp8_e4m3", "--no-plots")[1]
    assert "use mxfp8_e4m3" not in " ".join(out.split())


@proof
def test_several_tensors_are_a_line_each_and_bounded(capsys: Capsys) -> None:
    save_file({f"w{i:02}": activation(4, seed=i) for i in range(23)}, "s.safetensors")
    status, out, _ = run(capsys, "s.safetensors", "--no-plots")
    lines = out.splitlines()
    assert status == 0
    assert len(lines) <= 24
    assert lines[0].startswith("s.safetensors:w00: ")
    assert lines[20] == "and 3 more tensors, on the page"
    assert lines[21].startswith("use ")


def test_quiet_prints_only_tensors_that_failed(capsys: Capsys) -> None:
    torch.save(activation(2), "act.pt")
    assert run(capsys, "act.pt", "--no-plots", "--quiet") == (0, "", "")
    status, out, err = run(capsys, "act.pt", "gone.pt", "--no-plots", "--quiet")
    assert (status, out) == (1, "")
    assert err == "FAILED gone.pt: there is no file 'gone.pt'; check the spelling.\n"


def test_float8_tensors_and_block_only_folders(capsys: Capsys) -> None:
    torch.save(activation().to(torch.float8_e4m3fn), "eight.pt")
    assert run(capsys, "eight.pt", "--no-plots", "--elem-format", "fp4_e2m1")[0] == 0
    assert record("eight", "fp4_e2m1", "block_scaling")["levels"]
    for folder, seed in (("d1", 1), ("d2", 2)):
        Path(folder).mkdir()
        torch.save(activation(seed=seed), f"{folder}/same.pt")
        options = ["--no-plots", "--granularity", "block", "--output-dir", "out"]
        assert run(capsys, f"{folder}/same.pt", *options)[0] == 0
    assert folders(Path("out")) == ["same", "same-2"]


def test_a_failing_block_sweep_keeps_the_tensor_sweep(capsys: Capsys) -> None:
    x = activation(2)
    x[:, ::32] = float("nan")
    torch.save(x, "x.pt")
    status, out, _ = run(capsys, "x.pt", "--no-plots")
    assert status == 1
    assert "every block holds NaN or Inf" in out
    assert record("x")["tensor"]["nan"] == 8


def test_surprises_in_one_tensor_do_not_end_the_batch(capsys: Capsys) -> None:
    torch.save(activation(), "a.pt")
    torch.save(activation().float() * 1.001, "f.pt")
    for options in (["--set", "sweep_axis=5"], ["--max-scale-exp=-900", "--min-scale-exp=-1000"]):
        status, out, _ = run(capsys, "a.pt", "f.pt", "nope*.pt", "--no-plots", "-v", *options)
        assert status == 1
        assert "Total tensors: 3" in out
        assert "no .pt, .pth, .safetensors, .npy, .npz file matches 'nope*.pt'" in out


def test_a_file_of_integers_only_is_no_success(capsys: Capsys) -> None:
    save_file({"ids": torch.arange(4), "mask": torch.ones(2, dtype=torch.bool)}, "i.safetensors")
    status, out, _ = run(capsys, "i.safetensors", "--no-plots")
    assert status == 1
    assert "holds no floating point tensor; it has ids: torch.int64, mask: torch.bool" in out
