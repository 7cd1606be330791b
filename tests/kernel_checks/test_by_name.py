"""`qgate check`: its verdicts, their schema, its exit statuses, and what it says of bad input."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from qgate.cli import main
from qgate.cli.check import result_lines
from qgate.kernel_checks.verdicts import STATUSES, KernelVerdict
from tests.kernel_checks.warm_kernels import checked
from tests.results.schema_files import MADE
from tests.shares import proof, share

Capsys = pytest.CaptureFixture[str]
LINEAR = ("--like", "torch.nn.functional:linear")
SHAPE = ("--shape", "24x64,16x64")
KERNELS = """
import os
import torch

def right(x, w):
    return torch.mm(x, w.T)

def wrong(x, w):
    return right(x, w) * 1.01

def wrong_for_odd(x, w):
    return right(x, w) * (1.5 if len(x) == 17 else 1.0)

def in_bfloat16(x, w):
    return right(x.bfloat16(), w.bfloat16()).float()

def raising(x, w):
    raise ValueError("no tiles\\nof this size")

def two_results(x, w):
    return right(x, w), x

def nothing(x, w):
    right(x, w)

def codes(x, w):
    return right(x, w).to(torch.int8)

def other_shape(x, w):
    return right(x, w).T

def ending(x, w):
    os.kill(os.getpid(), 11)

def ending_for_odd(x, w):
    if len(x) == 17:
        os.kill(os.getpid(), 11)
    return right(x, w)

def random(x, w):
    return right(x, w) + torch.randn(())

def adding_to_w(x, w):
    return w.add_(x)

def with_text(x, text, count):
    assert text == "rows" and count == 2
    return x * count

number = 3
"""


@pytest.fixture(autouse=True)
def kernels(warm_kernels: Path) -> Path:
    (warm_kernels / "kernel.py").write_text(KERNELS)
    return warm_kernels


def test_a_verdict_says_what_was_compared(capsys: Capsys) -> None:
    verdict = checked(capsys, "kernel.py:right", *LINEAR, *SHAPE, "--seed", "7")
    assert verdict["verdict"] == "pass"
    assert verdict["cause"].startswith(f"right agrees at {len(verdict['agrees_at'])} inputs")
    assert verdict["agrees_at"][0] == "the example"
    assert any(name.startswith("shapes ") for name in verdict["agrees_at"])
    assert verdict["files"] == {"kernel": hashlib.sha256(KERNELS.encode()).hexdigest()}
    assert verdict["shapes"] == [[[24, 64], [16, 64]]]
    assert min(map(max, verdict["largest"].values())) >= 257
    assert 0 < verdict["smallest_defect"]["a factor on all values"] < 1e-4
    assert verdict["calls"] > len(verdict["agrees_at"])
    assert verdict["seed"] == 7


@share(4)
@pytest.mark.parametrize(
    ("kernel", "verdict", "cause", "at"),
    [
        ("wrong", "fail", "wrong is wrong: the result is 1.01 times the expected one", "the example"),
        ("wrong_for_odd", "fail", "wrong_for_odd is wrong for 17 of 24 along", "17 of 24 along"),
        ("in_bfloat16", "fail", "in_bfloat16 is wrong: ", "the example"),
        ("raising", "fail", "raising raised ValueError for the example: no tiles", ""),
        ("two_results", "refused", "two_results returns tuple: `qgate check` compares one tensor", ""),
        ("nothing", "fail", "nothing returns nothing (None) for the example", ""),
        ("codes", "refused", "codes returns torch.int8 codes", ""),
        ("other_shape", "fail", "returns shape (16, 24) for the example, right is shape (24, 16)", ""),
        ("ending", "fail", "ending ended its process (exit status ", ""),
        ("ending_for_odd", "fail", "for 17 of 24 along dimension 0 of argument 0", ""),
        ("random", "fail", "random is not repeatable: 384 of 384 values differ", ""),
    ],
)  # fmt: skip
def test_faults_are_named(kernel: str, verdict: str, cause: str, at: str, capsys: Capsys) -> None:
    report = checked(capsys, f"kernel.py:{kernel}", *LINEAR, *SHAPE, "--seed", "1")
    assert (report["verdict"], cause in report["cause"]) == (verdict, True), report["cause"]
    assert report["input"].startswith(at)
    assert (report["worst"] is not None) == bool(at)
    if at:
        worst = report["worst"]
        assert not worst["least"] <= worst["actual"] <= worst["most"]
        assert len(worst["index"]) == 2


def test_coarse_sums_on_few_values_are_inconclusive(capsys: Capsys) -> None:
    words = ["kernel.py:right", *LINEAR, "--shape", "3x64,2x64", "--arithmetic", "bfloat16"]
    verdict = checked(capsys, *words, "--seed", "1")
    assert verdict["verdict"] == "inconclusive"
    assert "a factor of 1 % on all values would not have been seen" in verdict["cause"]


def test_arguments_that_change_and_are_returned(kernels: Path, capsys: Capsys) -> None:
    (kernels / "reference.py").write_text("def add(x, w):\n    return x + w\n")
    verdict = checked(
        capsys, "kernel.py:adding_to_w", "--like", "reference.py:add", "--shape", "24x64,24x64"
    )
    assert verdict["verdict"] == "pass", verdict["cause"]
    assert verdict["notes"] == ["argument 1 is changed in place and returned"]
    assert set(verdict["files"]) == {"kernel", "like"}


@proof
def test_an_example_may_have_numbers_and_texts(kernels: Path, capsys: Capsys) -> None:
    (kernels / "reference.py").write_text("def double(x, text, count):\n    return x + x\n")
    (kernels / "example.py").write_text(
        "import torch\ndef make(generator):\n    return torch.randn(8, 8, generator=generator), 'rows', 2\n"
    )
    words = ["kernel.py:with_text", "--like", "reference.py:double", "--example", "example.py:make"]
    assert checked(capsys, *words)["verdict"] == "pass"


@proof
def test_each_verdict_is_valid_and_its_command_repeats_it(capsys: Capsys) -> None:
    validator = Draft202012Validator(MADE["check"]())
    lines = {
        "pass": ["kernel.py:right", *LINEAR, *SHAPE],
        "fail": ["kernel.py:wrong_for_odd", *LINEAR, *SHAPE, "--input", "0=int8,granularity=channel,axis=0"],
        "inconclusive": ["kernel.py:right", *LINEAR, "--shape", "3x64,2x64", "--arithmetic", "bfloat16"],
        "refused": ["kernel.py:codes", *LINEAR, *SHAPE, "--dtype", "bfloat16"],
    }  # fmt: skip
    for name, words in lines.items():
        verdict = checked(capsys, *words)
        assert verdict["verdict"] == name, verdict["cause"]
        assert list(validator.iter_errors(verdict)) == []
        program, command, *repeat = shlex.split(verdict["repeat"])
        assert (program, command) == ("qgate", "check")
        repeated = checked(capsys, *repeat)
        varying = {"seconds": 0, "notes": [], "calls": 0}
        assert {**repeated, **varying} == {**verdict, **varying}


def test_the_schema_refuses_what_is_none(capsys: Capsys) -> None:
    validator = Draft202012Validator(MADE["check"]())
    verdict = checked(capsys, "kernel.py:right", *LINEAR, *SHAPE)
    broken = [
        {**verdict, "verdict": "green"},
        {**verdict, "agrees_at": "all"},
        {**verdict, "kind": "qgate check 2"},
    ]
    broken += [{name: value for name, value in verdict.items() if name != "cause"}]
    assert all(list(validator.iter_errors(document)) for document in broken)
    assert set(MADE["check"]()["$defs"]["record"]["properties"]) == set(verdict)


@proof
def test_values_are_new_unless_a_seed_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    words = ["kernel.py:right", *LINEAR, *SHAPE]
    assert checked(capsys, *words)["seed"] != checked(capsys, *words)["seed"]
    monkeypatch.setenv("QGATE_SEED", "12")
    first = checked(capsys, *words)
    assert first["seed"] == 12
    assert checked(capsys, *words, "--seed", "13")["seed"] == 13
    monkeypatch.setenv("QGATE_SEED", "twelve")
    assert "QGATE_SEED 'twelve' is no seed" in checked(capsys, *words)["cause"]


BAD = {
    "kernel.py": "KERNEL 'kernel.py' names no function; write FILE.py:FUNCTION",
    "kernel.py:right()": "KERNEL 'kernel.py:right()' names no function",
    "__import__('os').system('touch ran'):x": "names no function",
    "missing.py:right": "there is no file 'missing.py'",
    "no_such_module:right": "KERNEL 'no_such_module:right': there is no such file or module here.",
    "kernel.py:absent": "kernel.py:absent cannot be loaded: AttributeError",
    "kernel.py:number": "kernel.py:number cannot be loaded: number is no function",
    "broken.py:right": "broken.py:right cannot be loaded: ZeroDivisionError: division by zero (broken.py, line 2)",
    "kernel.py:right --like torch.nn.functional:linar": "--like torch.nn.functional:linar cannot be loaded: AttributeError",
    "kernel.py:right --like kernel.py:wrong": "--like kernel.py:wrong loads kernel.py, the file of the kernel",
    "kernel.py:right --like torch:float32": "--like torch:float32 is dtype; name a function.",
    "kernel.py:right --like torch.nn.functional:linear;x": "names no function",
    "kernel.py:right --input 0": "--input '0': write N=FORMAT, such as 0=mxfp8.",
    "kernel.py:right --input 0=mxfp9": "--input 'mxfp9': unknown format 'mxfp9'",
    "kernel.py:right --input 0=int8,granularity": "'granularity' is no option; write NAME=VALUE.",
    "kernel.py:right --input 0=int8,color=red": "--input 'int8,color=red': ",
    "kernel.py:right --input 7=mxfp8": "argument 7",
    "kernel.py:right --output nothing": "--output 'nothing': unknown format",
    "kernel.py:right --shape 24x64,16x64 --shape 8x64": "give as many shapes each time",
    "kernel.py:right --shape 24x0,16x64": "'24x0' is no shape; write sizes with x",
    "kernel.py:right --shape 24x64,16x65": "cannot be called with the 2 arguments given",
    "kernel.py:right --example example.py:rows": "give --shape with a shape for each argument",
    "kernel.py:right --device nowhere": "device",
    "kernel.py:right --arithmetic float8": "arithmetic",
    "kernel.py:right --timeout 0": "--timeout 0 is not allowed; give seconds above zero.",
    "kernel.py:right --seed=-1": "--seed '-1' is no seed",
}  # fmt: skip


@share(4)
@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_refused_with_what_to_do(line: str, kernels: Path, capsys: Capsys) -> None:
    (kernels / "broken.py").write_text("\nright = 1 / 0\n")
    words = shlex.split(line) if "(" not in line else [line]
    words += [] if "--like" in words else LINEAR
    words += [] if "--shape" in words and "--example" not in line else SHAPE
    verdict = checked(capsys, *words)
    assert (verdict["verdict"], BAD[line] in verdict["cause"]) == ("refused", True), verdict[
        "cause"
    ]
    assert not (kernels / "ran").exists()


def test_a_call_that_cannot_be_parsed_is_refused_too(capsys: Capsys) -> None:
    for words in (
        ["kernel.py:right"],
        ["kernel.py:right", *LINEAR, "--seed", "x"],
        [*LINEAR],
        ["--no"],
    ):
        with pytest.raises(SystemExit) as end:
            main(["check", *words])
        assert end.value.code == STATUSES["refused"]
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("qgate check: ")


def test_a_verdict_for_people_begins_with_the_cause(capsys: Capsys) -> None:
    assert main(["check", "kernel.py:wrong", *LINEAR, *SHAPE, "--seed", "3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fail: wrong is wrong: the result is 1.01 times the expected one")
    assert lines[1].startswith("  worst at [")
    assert lines[-1].endswith(
        f"repeat: qgate check kernel.py:wrong {' '.join([*LINEAR, *SHAPE])} --seed 3"
    )
    verdict = KernelVerdict("pass", "fine", "k", "l", smallest_defect={"a": None, "b": 0.5})
    assert result_lines(verdict) == ["pass: fine", "  smallest defect seen, b: 50 %"]


@proof
def test_the_process_of_a_kernel_has_neither_qgate_nor_the_words_of_a_test(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real process, started as users start it."""
    monkeypatch.setenv("QGATE_TEST", "1")
    (kernels / "kernel.py").write_text(
        "import json, os, sys\n"
        "def kernel(x, w):\n"
        "    modules = sorted(name for name in sys.modules if name.partition('.')[0] in ('qg' + 'ate', 'pyt' + 'est'))\n"
        "    names = [name for name in os.environ if name.startswith(('QG' + 'ATE', 'PY' + 'TEST_'))]\n"
        "    main = sorted(vars(sys.modules['__main__']))\n"
        "    print(modules, names, sys.argv, [n for n in main if n[0] != '_'], file=sys.stderr)\n"
        "    return x @ w.T\n"
    )
    command = [sys.executable, "-m", "qgate", "check", "kernel.py:kernel", *LINEAR, *SHAPE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pass: kernel agrees at ")
    assert set(done.stderr.splitlines()) == {f"[] [] ['{kernels}/kernel.py'] ['sys']"}
    quiet = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert json.loads(quiet.stdout)["verdict"] == "pass"
    assert quiet.stderr == ""
