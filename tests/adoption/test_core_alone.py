"""The core needs torch, numpy, pytest and msgspec; what an extra brings is one line where it lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qgate.loading import EXTRAS
from tests.adoption.alone import brought
from tests.adoption.repository import clean
from tests.shares import share

ROOT = Path(__file__).resolve().parents[2]
ALONE = Path(__file__).with_name("alone.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = ("torch", "numpy", "pytest", "msgspec")
KERNEL = """
import torch, qgate
from qgate.testing import check_kernel

generator = torch.Generator().manual_seed(0)
x, w = torch.randn(32, 64, generator=generator), torch.randn(16, 64, generator=generator)

def gemm(x, w):
    return qgate.quantize(x, "mxfp8") @ qgate.quantize(w, "mxfp8").T

def short(x, w):
    return gemm(x[:, :32], w[:, :32])

def check(kernel):
    linear = torch.nn.functional.linear
    return check_kernel(kernel, x, w, like=linear, inputs={0: "mxfp8", 1: "mxfp8"})
"""
TESTS = (
    KERNEL
    + """
def test_right():
    check(gemm)

def test_wrong():
    check(short)

def test_weak():
    assert torch.allclose(gemm(x, w), x @ w.T, rtol=1, atol=10)
"""
)


def names_of(requirements: list[str]) -> list[str]:
    return [re.match(r"[\w.-]+", text)[0] for text in requirements]  # type: ignore[index]


def alone(folder: Path, *words: str, core: tuple[str, ...] = CORE) -> tuple[int, str]:
    """Run a program where these distributions are alone; its status and what it wrote."""
    done = subprocess.run(
        [sys.executable, str(ALONE), ",".join(core), *words],
        cwd=folder,
        env=clean()
        | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_is_required_is_the_core() -> None:
    assert sorted(names_of(PROJECT["dependencies"])) == sorted(CORE)
    extras = PROJECT["optional-dependencies"]
    assert {*EXTRAS.values()} <= extras.keys()
    for module, extra in EXTRAS.items():
        assert module in brought(names_of(extras[extra])), (module, extra)
    (everything,) = extras["all"]
    listed = re.findall(r"\w+", everything.partition("[")[2])
    assert {*listed} == extras.keys() - {"all", "test", "docs", "lint"}


def test_a_kernel_is_checked_with_the_core_alone(answers: dict[str, str]) -> None:
    right, wrong = answers["a right kernel"], answers["a wrong kernel"]
    assert right.startswith("gemm agrees at "), right
    assert "ModuleNotFoundError: " in right, "pandas is there"
    assert "CheckFailure: " in wrong
    assert "32 terms, 32 to 63" in wrong


@share(2)
@pytest.mark.parametrize(
    ("plugins", "chosen", "outcome"),
    [
        (("qgate.audit",), "weak", "1 passed"),
        (("qgate.audit", "qgate.plugin"), "weak or wrong", "1 failed, 1 passed"),
    ],
)
def test_tests_run_with_the_core_alone(
    tmp_path: Path, plugins: tuple[str, ...], chosen: str, outcome: str
) -> None:
    (tmp_path / "test_kernels.py").write_text(TESTS)
    options = [word for plugin in plugins for word in ("-p", plugin)]
    status, text = alone(tmp_path, "-m", "pytest", *options, "-k", chosen, ".")
    assert outcome in text, text
    assert status == int("failed" in outcome)
    assert ("32 terms, 32 to 63" in text) == ("failed" in outcome)
    assert "test_kernels.py:" in text.partition("qgate audit")[2], text


LACKING = {
    "sweep": ("qgate.sweep(torch.ones(64), 'mxfp8').to_frame()", "report"),
    "a picture": ("qgate.sweep(torch.ones(64), 'mxfp8').plot()", "report"),
    "a dump": ("qgate.collect(torch.nn.Linear(2, 2), 'dump')", "dumps"),
    "a model": ("qgate.models.load('tiny-llama')", "gate"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_is_missing_is_one_line_with_its_command(name: str, answers: dict[str, str]) -> None:
    extra = LACKING[name][1]
    words = rf"QgateError: \w+ is not installed: pip install 'pytest-qgate\[{extra}\]'\."
    assert re.fullmatch(words, answers[f"to call: {name}"].strip()), answers


CALLS = {
    "--help": (["--help"], 0, "usage: qgate"),
    "show": (["show", "formats"], 2, "tabulate is not installed: pip install 'pytest-qgate[gate]'"),
    "doctor": (["doctor"], None, ""),
    "baselines": (["baselines", "list"], 2, "safetensors is not installed: pip install 'pytest-qgate[gate]'"),
    "sweep": (["sweep", "x.npy"], 2, "is not installed: pip install 'pytest-qgate["),
    "draw": (["dumps", "draw", "."], 2, "is not installed: pip install 'pytest-qgate["),
    "dumps": (["dumps", "ls", "."], 2, "is not installed: pip install 'pytest-qgate["),
    "checkpoint": (["checkpoint", "."], 2, "is not installed: pip install 'pytest-qgate["),
    "activations": (["activations", "--model", "tiny-llama"], 2, "is not installed: pip install 'pytest-qgate["),
}  # fmt: skip


PROGRAMS = {
    "a right kernel": "print(repr(check(gemm)))\nimport pandas",
    "a wrong kernel": "check(short)",
    **{f"to call: {name}": code for name, (code, _) in LACKING.items()},
    **{name: f"print('status', cli.main({argv}))" for name, (argv, _, _) in CALLS.items()},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what each program writes, all in one process; the status of a command comes last."""
    code = f"""{KERNEL}
from qgate import cli
for name, program in {PROGRAMS}.items():
    print("##", name, flush=True)
    try:
        exec(program)
    except SystemExit as error:
        print("status", error.code or 0)
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}", flush=True)
"""
    _, text = alone(tmp_path_factory.mktemp("answers"), "-c", code)
    parts = [part.partition("\n") for part in text.split("## ")[1:]]
    return {name: answer for name, _, answer in parts}


@pytest.mark.parametrize("name", CALLS)
def test_a_command_says_in_one_line_what_it_lacks(name: str, answers: dict[str, str]) -> None:
    _, status, words = CALLS[name]
    answer = answers[name]
    assert "Traceback" not in answer
    assert words in answer, answer
    if status is not None:
        assert answer.rstrip().endswith(f"status {status}"), answer
    if status == 2:
        assert len(answer.splitlines()) == 2, answer
