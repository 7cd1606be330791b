"""Switched on from outside: by the environment, and by `qgate collect`, with no line changed."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest
import torch

import qgate
from qgate import QgateError
from qgate.collecting.starting import say_on_stderr
from qgate.dumps import Dump
from tests.collecting.collected import batch, loss_of, network, records, train
from tests.shares import proof, share
from tests.warm import run_python

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = """
import argparse, sys, torch
from torch import nn
from neighbor import WIDTH
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--end", default="")
args = parser.parse_args()
if __name__ == "__main__":
    torch.manual_seed(0)
    helper, loss = nn.Softmax(-1), nn.MSELoss()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(args.steps):
        x = helper(torch.randn(3, WIDTH))
        optimizer.zero_grad()
        loss(model(x), torch.ones(3, 2)).backward()
        optimizer.step()
    print("trained", args.steps, sys.argv[0])
    if args.end == "error":
        raise OSError("no such data")
    if args.end == "exit":
        sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "neighbor.py").write_text("WIDTH = 4\n")
    (tmp_path / "code" / "train.py").write_text(_SCRIPT)
    return tmp_path / "code" / "train.py"


def run(cwd: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TENSOR_", "RANK", "WORLD"))}
    environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return run_python(*args, cwd=cwd, environment=environment)


def collect(cwd: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(cwd, "-m", "qgate", "collect", *args, **environment)


def test_a_script_is_collected_as_it_is(tmp_path: Path, script: Path) -> None:
    done = collect(
        tmp_path, "--dir", "dump", "--level", "statistics", "--", str(script), "--steps", "3"
    )
    assert (done.returncode, done.stdout) == (0, f"trained 3 {script}\n"), done.stderr
    got = records(tmp_path / "dump")
    assert {(r.module, r.iteration) for r in got} == {("0", 0), ("2", 0)}
    assert {r.name for r in got} >= {"input", "weight", "output", "grad_output", "grad_weight"}
    assert "iterations whole: 0; 11 records" in done.stderr
    assert "nothing is missing" in done.stderr


def test_switches_of_other_collectors(script: Path) -> None:
    switches = {
        "TENSOR_SAVE_DIR": "logs", "CUSTOM_QUANT_TYPE": "mxfp8", "TENSOR_SAVER_ITERATION": "40",
        "CONTROL_ITER": "2", "CURRENT_SAMPLE_IDX": "7", "RANK": "1", "WORLD_SIZE": "2",
    }  # fmt: skip
    args = ("--phases", "forward", "--sites", "^2$", "--", "-m", "train", "--steps", "3")
    done = collect(script.parent, *args, **switches)
    assert done.returncode == 0, done.stderr
    got = records(script.parent / "logs")
    assert {(r.quant_type, r.iteration, r.sample, r.rank) for r in got} == {
        ("mxfp8", 40, 7, 1), ("mxfp8", 41, 7, 1),
    }  # fmt: skip
    off = collect(script.parent, "--", str(script), "--steps", "1", TENSOR_SAVE_ENABLED="false")
    assert off.returncode == 0
    assert not (script.parent / "enhanced_tensor_logs").exists()


@pytest.mark.parametrize(
    ("end", "status", "words"), [("error", 1, "no such data"), ("exit", 3, "")]
)
def test_how_a_script_ends_is_how_it_ends(
    tmp_path: Path, script: Path, end: str, status: int, words: str
) -> None:
    args = ("--dir", "dump", "--iterations", "9", "--", str(script), "--steps", "2", "--end", end)
    done = collect(tmp_path, *args)
    assert done.returncode == status
    assert words in done.stderr
    assert ("Traceback" in done.stderr) == (end == "error")
    assert {r.iteration for r in records(tmp_path / "dump")} == {0, 1}
    assert f"7 of 9 iterations: stopped by exit {status}" in str(
        Dump.open(tmp_path / "dump").notes()
    )


_QUANTIZING = """
import sys, torch, qgate

class Small(torch.nn.Linear):
    def forward(self, x):
        return super().forward(qgate.quantize(x * float(sys.argv[1]), "fp8_e4m3"))

model = torch.nn.Sequential(Small(4, 4))
model(torch.ones(3, 4)).sum().backward()
if sys.argv[2:] == ["fail"]:
    raise OSError("no such data")
"""


@proof
@pytest.mark.parametrize(
    ("factor", "words"),
    [
        ("1", ["nothing was lost: no value is below", "tensors quantized: 1, sites: 1"]),
        (
            "0.0001",
            [
                "small values are lost at 1 of 1 sites",
                "  0 at small.py:6, fp8_e4m3: 100.00% below the smallest normal number, 100.00% "
                "become zero (high); 1 of 1 tensors",
            ],
        ),
    ],
)
def test_underflow_of_a_run_is_told_where_it_is_asked_for(
    tmp_path: Path, factor: str, words: list[str]
) -> None:
    (tmp_path / "small.py").write_text(_QUANTIZING)
    done = collect(tmp_path, "--dir", "a", "--watch-underflow", "--", "small.py", factor)
    assert done.returncode == 0, done.stderr
    loss_lines = [
        line for line in done.stderr.splitlines() if "underflow" in line or "below" in line
    ]
    assert len(loss_lines) == len(words) or factor == "1"
    assert all(line.startswith("qgate collect: ") for line in loss_lines)
    assert all(word in done.stderr for word in words), done.stderr
    assert records(tmp_path / "a")
    silent = collect(tmp_path, "--dir", "b", "--", "small.py", factor)
    assert "underflow" not in silent.stderr


def test_underflow_is_told_of_a_program_that_fails_and_without_collecting(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(_QUANTIZING)
    args = ("--dir", "a", "--watch-underflow", "--", "small.py", "1e-4")
    failed = collect(tmp_path, *args, "fail")
    assert failed.returncode == 1
    assert "small values are lost at 1 of 1 sites" in failed.stderr
    alone = collect(tmp_path, *args, TENSOR_SAVE_ENABLED="false")
    assert alone.returncode == 0
    assert "small values are lost at 1 of 1 sites" in alone.stderr


@share(3)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ["say what to run"]),
        (("--", "code"), ["'code' is a folder"]),
        (("--", "noise.pt"), ["'noise.pt' is no Python program"]),
        (("--", "-m", "nomodule.at.all"), ["no module 'nomodule.at.all'", "python -m"]),
        (("--dri", "x", "--", "train.py"), ["--dri", "Did you mean --dir?", "collect --help"]),
        (("--", "none.py"), ["'none.py' is not there", "-m MODULE"]),
        (("--level", "some", "--", "train.py"), ["'some'", "statistics"]),
        (("--ranks", "0,x", "--", "train.py"), ["'0,x'"]),
        (("--sites", "gru", "--", "train.py", "--steps", "1"), ["nothing was collected", "'gru'"]),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(
    script: Path, args: tuple[str, ...], words: list[str]
) -> None:
    (script.parent / "code").mkdir()
    (script.parent / "noise.pt").write_bytes(bytes(range(64)))
    done = collect(script.parent, *args)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert done.stderr.count("\n") == 1
    assert not (script.parent / "enhanced_tensor_logs").exists()


@proof
def test_under_torchrun(tmp_path: Path, script: Path) -> None:
    program = ("-m", "qgate", "collect", "--dir", "dump", "--", str(script), "--steps", "2")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, *launcher, *program)
    assert done.returncode == 0, done.stderr
    dump = Dump.open(tmp_path / "dump")
    assert {r.rank for r in dump.records()} == {0, 1}
    assert {r.world_size for r in dump.records()} == {2}
    assert dump.header["run"] not in ("", "none")
    assert not dump.notes()


def test_one_line_in_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qgate.collect_from_environment(network(), {}) is None
    assert qgate.collect_from_environment(network(), {"TENSOR_SAVE_ENABLED": "False"}) is None
    switches = {
        "TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": str(tmp_path / "dump"),
        "CUSTOM_QUANT_TYPE": "hifp8", "CONTROL_ITER": "2",
    }  # fmt: skip
    model = network()
    collector = qgate.collect_from_environment(model, switches, sites="linear")
    assert collector is not None
    train(model, 4)
    assert not collector.listening
    collector.wait()
    assert "iterations whole: 0, 1" in capsys.readouterr().err
    assert {r.quant_type for r in records(tmp_path / "dump")} == {"hifp8"}
    for name, value in (("TENSOR_SAVE_ENABLED", "maybe"), ("CONTROL_ITER", "two")):
        with pytest.raises(QgateError, match=f"{name}='{value}'"):
            qgate.collect_from_environment(model, {"TENSOR_SAVE_ENABLED": "1", name: value})


def test_a_program_that_ends_early_closes_its_dump(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import qgate\nfrom tests.collecting.collected import network, train\n"
        "model = network()\nqgate.collect_from_environment(model)\ntrain(model, 2)\n"
    )
    switches = {"TENSOR_SAVE_ENABLED": "1", "TENSOR_SAVE_DIR": "dump", "CONTROL_ITER": "5"}
    done = run(tmp_path, "run.py", **switches)
    assert done.returncode == 0, done.stderr
    assert "3 of 5 iterations: stopped by the end of the program" in done.stderr
    assert {r.iteration for r in records(tmp_path / "dump")} == {0, 1}


@proof
def test_a_folder_that_is_refused_is_a_sentence_and_no_traceback(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program did nothing wrong, and where in it the collecting began is nobody's question."""
    from qgate.cli import main

    monkeypatch.chdir(tmp_path)
    command = ["collect", "--dir", "dump", "--", str(script), "--steps", "2"]
    assert main(command) == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in (tmp_path / "dump").rglob("*") if path.is_file()}
    assert main(command) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "qgate collect: 'dump' holds tensors of rank 0 already: choose another"
    )
    assert message.count("\n") == 1, "no summary of a dump that was not written, and no traceback"
    assert before == {path: path.read_bytes() for path in before}


@share(4)
@pytest.mark.parametrize("words", [("python",), ("/usr/bin/python3",), ("python3.11",), ()])
def test_the_command_stands_after_two_dashes_as_it_is_typed(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    from qgate.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["collect", "--dir", "dump", "--", *words, str(script), "--steps", "1"]) == 0
    assert capsys.readouterr().err.count("iterations whole: 0") == 1
    monkeypatch.syspath_prepend(str(script.parent))
    module = ["-m", script.stem, "--steps", "1"]
    assert main(["collect", "--dir", "module", "--", *words, *module]) == 0
    assert len(records(tmp_path / "dump")) == len(records(tmp_path / "module")) > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["python", "-c", "1"], "python -c cannot be collected: name the file to run"),
        (["python"], "say what to run: qgate collect -- python train.py"),
        (["python", "-m"], "say what to run: qgate collect -- python train.py"),
        (["bash", "run.sh"], "'bash' is not there; name the Python file to run"),
    ],
)
def test_a_command_that_is_no_python_program_is_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from qgate.cli import main

    assert main(["collect", "--dir", "dump", "--", *words]) == 2
    assert problem in capsys.readouterr().err


# Labels that a program changes ---------------------------------------------------------------------


def labels(folder: Path) -> set[tuple[object, ...]]:
    """Return iteration, sample, quant type and direction of the records."""
    return {(r.iteration, r.sample, r.quant_type, r.operation) for r in records(folder)}


def test_labels_are_read_at_every_forward_pass(tmp_path: Path) -> None:
    """Two micro-batches of an iteration have their own labels, their gradients too."""
    model = network()
    switches = {
        "TENSOR_SAVE_ENABLED": "1", "TENSOR_SAVE_DIR": str(tmp_path / "d"), "CONTROL_ITER": "3",
        "CUSTOM_QUANT_TYPE": "bf16",
    }  # fmt: skip
    collector = qgate.collect_from_environment(model, switches, sites="linear")
    assert collector is not None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for iteration, quant_type in ((10, "bf16"), (20, "mxfp8"), (30, "hifp8")):
        switches["TENSOR_SAVER_ITERATION"] = str(iteration)
        for sample in (7, 8):
            switches |= {"CURRENT_SAMPLE_IDX": str(iteration + sample)}
            switches |= {"CUSTOM_QUANT_TYPE": f"{quant_type}_{sample}"}
            loss_of(model, batch()).backward()
        optimizer.step()
    assert collector.iterations == [10, 20, 30]
    collector.close()
    assert not collector.missing
    assert labels(tmp_path / "d") == {
        (iteration, iteration + sample, f"{quant_type}_{sample}", operation)
        for iteration, quant_type in ((10, "bf16"), (20, "mxfp8"), (30, "hifp8"))
        for sample in (7, 8)
        for operation in ("forward", "backward")
    }


def test_another_iteration_of_the_environment_ends_the_one_before(tmp_path: Path) -> None:
    """No optimizer steps here, so without the variable these were micro-batches."""
    model = network()
    switches = {"TENSOR_SAVE_ENABLED": "1", "TENSOR_SAVE_DIR": str(tmp_path / "d")}
    switches |= {"CONTROL_ITER": "2", "TENSOR_SAVER_ITERATION": "5"}
    collector = qgate.collect_from_environment(model, switches, sites="linear")
    assert collector is not None
    for iteration in (5, 6, 7):
        switches["TENSOR_SAVER_ITERATION"] = str(iteration)
        for _ in range(2):
            loss_of(model, batch()).backward()
    assert collector.iterations == [5, 6]
    collector.close()
    assert {(r.iteration, r.micro_batch) for r in records(tmp_path / "d")} == {
        (5, 0), (5, 1), (6, 0), (6, 1),
    }  # fmt: skip


def test_a_switch_pauses_and_a_wrong_label_is_reported(tmp_path: Path) -> None:
    model = network()
    switches = {"TENSOR_SAVE_ENABLED": "1", "TENSOR_SAVE_DIR": str(tmp_path / "d")}
    switches["TENSOR_SAVER_ITERATION"] = "0"
    collector = qgate.collect_from_environment(model, switches, sites="linear", iterations=3)
    assert collector is not None
    for sample, switch in (("0", "true"), ("1", "off"), ("many", "on"), ("3", "")):
        switches |= {"CURRENT_SAMPLE_IDX": sample, "TENSOR_SAVE_ENABLED": switch}
        if not switch:
            del switches["TENSOR_SAVE_ENABLED"]  # it stays as it was
        train(model, 1)
    assert collector.missing == [
        "a label: CURRENT_SAMPLE_IDX='many' is not allowed; it is a whole number from 0."
    ]
    collector.wait()
    rows = {(iteration, sample) for iteration, sample, *_ in labels(tmp_path / "d")}
    assert rows == {(0, 0), (1, 1), (2, 3)}, "the label stays where a new one is not allowed"


def test_arguments_hide_the_variables(tmp_path: Path) -> None:
    model = network()
    switches = {"TENSOR_SAVE_ENABLED": "1", "CURRENT_SAMPLE_IDX": "1", "CUSTOM_QUANT_TYPE": "a"}
    arguments = {"folder": tmp_path / "d", "sample": 4, "iterations": 2, "sites": "linear"}
    collector = qgate.collect_from_environment(model, switches, **arguments)
    assert collector is not None
    for step in range(2):
        switches |= {"CURRENT_SAMPLE_IDX": str(step + 8), "CUSTOM_QUANT_TYPE": "ab"[step]}
        train(model, 1)
    collector.close()
    rows = {(iteration, sample, kind) for iteration, sample, kind, _ in labels(tmp_path / "d")}
    assert rows == {(0, 4, "a"), (1, 4, "b")}


def test_a_program_changes_its_labels_under_the_launcher(tmp_path: Path, script: Path) -> None:
    lines = (
        "        os.environ['CURRENT_SAMPLE_IDX'] = str(step + 40)\n        optimizer.zero_grad()"
    )
    text = script.read_text().replace("        optimizer.zero_grad()", lines)
    script.write_text(text.replace("import argparse, sys", "import argparse, os, sys"))
    args = ("--dir", "dump", "--iterations", "2", "--", str(script), "--steps", "2")
    done = collect(tmp_path, *args, CURRENT_SAMPLE_IDX="1")
    assert done.returncode == 0, done.stderr
    assert {(r.iteration, r.sample) for r in records(tmp_path / "dump")} == {(0, 40), (1, 41)}


def test_a_program_may_close_the_stream_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    say_on_stderr("a summary")
