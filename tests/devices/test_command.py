"""`python -m tests.devices`: each part on its own, within its time, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.devices import commands
from tests.devices.journal import Journal
from tests.devices.lanes import ROOT
from tests.devices.outcomes import JOURNAL
from tests.devices.record import (
    JSON_NAME,
    PAGE_NAME,
    DeviceReport,
    PartReport,
    Row,
    page,
    read_report,
    write_report,
)
from tests.shares import proof, share

# Parts that need no torch, so that they start at once.
PARTS = '''
import os, signal, time
from tests.devices.cases import noted
from tests.devices.parts import Part

def hang(_): time.sleep(600)
def crash(_): os.kill(os.getpid(), signal.SIGSEGV)
def garbage(setting):
    with setting.journal.path.open("a") as file: file.write("Segmentation fault\\n")
    os._exit(0)
def leave(_): os._exit(3)
def child(setting):
    """Start a process that outlives this one, unless it is killed with it."""
    import subprocess
    started = subprocess.Popen(["sleep", "600"])
    (setting.folder / "child.txt").write_text(str(started.pid))
    time.sleep(600)
def lose(_): raise RuntimeError("CUDA error: device-side assert triggered\\nmore")
def fail(_): raise ValueError("first line\\nsecond")

def part(name, weight=10, least_s=0.1, **cases):
    return Part(name, lambda setting: cases, weight, least_s, case_s=CASE_S)

right = lambda _: ""
CASE_S = float(os.environ.get("CASE_S", 1))
PARTS = {p.name: p for p in (
    part("hangs", before=right, hang=hang, after=right),
    part("crashes", before=right, crash=crash, after=right),
    part("babbles", garbage=garbage),
    part("leaves", leave=leave, after=right),
    part("loses", lose=lose, after=right),
    part("fails", fail=fail, wrong=lambda _: "3 values differ"),
    part("passes", right=right, fact=lambda _: noted("fact", "a | b")),
    part("big", least_s=1000, right=right),
    part("starts", child=child),
)}
'''


def run(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "planted_parts.py").write_text(PARTS)
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.Popen(
        [
            sys.executable, "-m", "tests.devices", "cpu", "--parts", "planted_parts", "--out",
            str(folder / "out"), "--jobs", "1", *options,
        ],
        cwd=ROOT, env={**os.environ, **environment, "PYTHONPATH": paths}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def rows(report: DeviceReport, part: str) -> dict[str, tuple[str, str]]:
    part_report = next(
        candidate_part for candidate_part in report.parts if candidate_part.name == part
    )
    return {row.name: (row.status, row.text) for row in part_report.rows}


@proof
def test_a_part_that_hangs_or_dies_loses_nothing(tmp_path: Path) -> None:
    names = "hangs,crashes,babbles,leaves,loses,fails,passes"
    command = run(tmp_path, "--only", names, "--minutes", "1")
    out, _ = command.communicate(timeout=60)
    assert command.returncode == 1, out
    assert "hangs: hang: hung: after 1 s" in out
    report = read_report(tmp_path / "out")
    assert report.complete
    assert [part.name for part in report.parts] == names.split(",")
    assert rows(report, "hangs") == {
        "before": ("right", ""), "hang": ("hung", "after 1 s"), "after": ("right", ""),
    }  # fmt: skip
    assert rows(report, "crashes") == {
        "before": ("right", ""), "crash": ("died", "with SIGSEGV after 0 s"), "after": ("right", ""),
    }  # fmt: skip
    assert rows(report, "babbles") == {
        "garbage": ("died", "after 0 s without an answer"),
        "babbles-1": ("unreadable", "it wrote 'Segmentation fault'"),
    }
    assert rows(report, "leaves")["leave"] == (
        "died",
        "with status 3 after 0 s: it printed nothing",
    )
    assert rows(report, "leaves")["after"] == ("right", "")
    first = "RuntimeError: CUDA error: device-side assert triggered"
    assert rows(report, "loses") == {"lose": ("wrong", first), "after": ("right", "")}
    assert rows(report, "fails") == {
        "fail": ("wrong", "ValueError: first line"), "wrong": ("wrong", "3 values differ"),
    }  # fmt: skip
    assert rows(report, "passes") == {"right": ("right", ""), "fact": ("noted", "a | b")}
    text = (tmp_path / "out" / PAGE_NAME).read_text()
    assert "something is red" in text
    assert "hung" in text
    assert r"a \| b" in text


def test_parts_that_pass_are_green(tmp_path: Path) -> None:
    command = run(tmp_path, "--only", "passes")
    out, _ = command.communicate(timeout=60)
    assert command.returncode == 0, out
    assert "all parts are green" in (tmp_path / "out" / PAGE_NAME).read_text()


def test_it_ends_in_time_and_says_what_did_not_run(tmp_path: Path) -> None:
    began = time.monotonic()
    command = run(tmp_path, "--only", "hangs,big", "--minutes", "0.1", CASE_S="100")
    command.communicate(timeout=60)
    assert time.monotonic() - began < 6 + 10  # a busy machine starts processes slowly
    assert command.returncode == 1
    report = read_report(tmp_path / "out")
    status, text = rows(report, "hangs")["hang"]
    assert status in ("hung", "not run")  # by how long it ran
    assert text.endswith("when the time of the part was over")
    assert rows(report, "hangs")["1 cases of hangs-1"] == ("not run", "no time left")
    status, text = rows(report, "big")["big"]
    assert (status, text.split(":")[0]) == ("not run", "no time left")


def _runs(process: int) -> bool:
    """Say whether a process goes on; a dead one may wait for its parent for ever."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_killed_run_leaves_its_results_and_no_process(tmp_path: Path, name: str) -> None:
    command = run(tmp_path, "--only", "passes,starts", CASE_S="100")
    started = tmp_path / "out/parts/starts/child.txt"
    until = time.monotonic() + 60
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    command.send_signal(signal.Signals[name])
    command.communicate(timeout=60)
    report = read_report(tmp_path / "out")
    assert not report.complete
    assert report.red
    assert rows(report, "passes")["right"] == ("right", "")
    if name == "SIGTERM":
        assert rows(report, "starts")["child"] == ("hung", "when the run was ended")
        while _runs(int(started.read_text())):
            assert time.monotonic() < until, "a process of a part goes on"
            time.sleep(0.05)


def test_a_torn_line_is_not_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.jsonl")
    journal.add_row(Row("a", "right"))
    with journal.path.open("a") as file:
        file.write('{"row": {"name": "b"')
    assert [row.name for row in journal.read().rows] == ["a"]
    assert not journal.read().unreadable
    journal.close_line()
    assert journal.read().unreadable


# Nothing of the tests ----------------------------------------------------------------------------

# Packages of the extra `test`, which no machine with a GPU has to have.
BLOCKED = (
    "playwright", "axe_playwright_python", "moto", "ray", "onnx", "onnxruntime", "gguf", "hypothesis",
    "datasets", "s3fs", "torchao", "compressed_tensors", "bitsandbytes", "gfloat", "en_dtypes",
    "ml_dtypes", "scipy", "jsonschema", "transformers", "xdist",
)  # fmt: skip
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r} or name == "tests.conftest":
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""


_FEW = "arithmetic|public: mxfp8 bf|^quantize mxfp8_e4m3 bfloat16$"
# All that processes of parts import before their cases.
LOADED = (
    "tests.devices.__main__", "tests.devices.child", "tests.devices.parts", "tests.devices.commands",
    "tests.devices.environment", "tests.devices.outcomes", "tests.devices.public", "tests.devices.speed",
    "tests.devices.suites", "tests.devices.others", "tests.devices.table", "tests.kernels.checks",
)  # fmt: skip


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing but the library's own packages can be imported."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def _python(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip


@proof
def test_all_parts_load_with_what_the_library_needs(bare: dict[str, str]) -> None:
    assert "playwright is blocked" in _python(bare, "-c", "import playwright").stderr
    done = _python(bare, "-c", f"import {', '.join(LOADED)}")
    assert done.returncode == 0, done.stderr


@proof
def test_it_needs_what_the_library_needs(bare: dict[str, str], tmp_path: Path) -> None:
    options = ("--only", "environment,table", "--minutes", "3", "--jobs", "1", "--match", _FEW)
    done = _python(bare, "-m", "tests.devices", "cpu", *options, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, (tmp_path / "out" / PAGE_NAME).read_text()
    report = read_report(tmp_path / "out")
    assert rows(report, "environment")["arithmetic"][1].startswith("cpu-")
    assert rows(report, "table")["public: mxfp8 bfloat16"] == ("right", "")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["tpu"], "'tpu' is no device: cuda, cuda:N, cpu or sim"),
        (["cpu", "--only", "sped"], "there is no part sped. Parts: environment, kernels"),
        (["cpu", "--minutes", "0"], "'0' is no number of minutes: above 0"),
    ],
)
def test_bad_input_is_said(words: list[str], text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices", *words], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert text in done.stderr


# Plugins that are installed take longer to load than these tests.
_NO_PLUGINS = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
TESTS = """
import pytest

@pytest.fixture
def broken(): raise ValueError("no set-up")
def test_right(): pass
def test_wrong(): assert 1 == 2, "one is not two"
def test_broken(broken): pass
def test_skipped(): pytest.skip("not here")
"""


@share(2)
@pytest.mark.parametrize("options", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["alone", "xdist"])
def test_each_test_of_pytest_is_a_row(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    journal = Journal(tmp_path / "journal.jsonl")
    environment = {**_NO_PLUGINS, JOURNAL: str(journal.path), "PYTHONPATH": str(ROOT)}
    words = ("-m", "pytest", "-p", "tests.devices.outcomes", "-p", "no:cacheprovider", *options)
    done = _python(environment, *words, "--rootdir", str(tmp_path), str(tmp_path))
    assert done.returncode == 1, done.stdout
    outcomes = {row.name.rpartition("::")[2]: (row.status, row.text) for row in journal.read().rows}
    assert outcomes["test_right"] == ("right", "")
    assert outcomes["test_wrong"] == ("wrong", "AssertionError: one is not two")
    assert outcomes["test_broken"] == ("wrong", "setup: ValueError: no set-up")
    assert outcomes["test_skipped"] == ("noted", "Skipped: not here")


WARNING_PLUGIN = """
import warnings
import pytest

class PytestBenchmarkWarning(pytest.PytestWarning):
    pass

def pytest_configure(config):
    warnings.warn(PytestBenchmarkWarning(TEXT))
"""


@share(2)
@pytest.mark.parametrize(
    ("text", "status"),
    [
        (
            "Benchmarks are automatically disabled because xdist plugin is active.Benchmarks cannot",
            0,
        ),
        ("anything else", 3),
    ],
)
def test_benchmark_plugins_may_stand_beside_ours(tmp_path: Path, text: str, status: int) -> None:
    """pytest-benchmark before 5.3 warns of pytest-xdist while it is set up."""
    (tmp_path / "planted_plugin.py").write_text(WARNING_PLUGIN.replace("TEXT", repr(text)))
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    environment = {**_NO_PLUGINS, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    options = (
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        "-p",
        "planted_plugin",
    )
    done = _python(environment, "-m", "pytest", *options, "-p", "no:cacheprovider", str(tmp_path))
    assert done.returncode == status, done.stdout + done.stderr


# The page ----------------------------------------------------------------------------------------


def test_the_page_is_short_and_has_the_worst_first(tmp_path: Path) -> None:
    many = [Row(f"wrong {i}", "wrong", "x" * 1000) for i in range(60)]
    parts = [
        PartReport("good", "done", rows=[Row("a", "right"), Row("speed", "noted", "fast")]),
        PartReport("bad", "done", rows=[Row("b", "noted", "fact"), *many, Row("c", "died")]),
    ]
    report = DeviceReport(1, "qgate device report", "cuda", "now", 7, 12, True, parts)
    text = page(report)
    assert text.index("## bad") < text.index("## good")
    assert text.index("wrong 39") < text.index("b ")
    assert "wrong 40" not in text
    assert "… and 21 more in devices.json" in text
    assert len(text) < 20_000
    write_report(report, tmp_path)
    assert read_report(tmp_path) == report
    assert json.loads((tmp_path / JSON_NAME).read_text())["schema"] == 1


def test_a_part_that_nothing_judges_is_not_red() -> None:
    rows = [Row("a", "hung", "after 40 s"), Row("b", "right")]
    assert PartReport("kernels", "done", rows=rows).red
    assert not PartReport("others", "done", judged=False, rows=rows).red
    assert PartReport("others", "incomplete", judged=False, rows=rows).red


# Faults that a device could have -----------------------------------------------------------------


def test_a_fault_of_a_kernel_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import qgate
    from tests.devices import public

    cpu = torch.device("cpu")
    right = qgate.quantize
    assert public.CASES["public: mxfp8 bfloat16"](cpu) == ""

    def wrong(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        quantized = right(x, *args, **options)  # type: ignore[arg-type]
        calls.append(x)
        return quantized.add(quantized.abs() * 2**-3) if len(calls) == 1 else quantized

    calls: list[torch.Tensor] = []
    monkeypatch.setattr(qgate, "quantize", wrong)
    assert "values differ" in public.CASES["public: mxfp8 bfloat16"](cpu)


def test_captures_of_other_values_are_apart(tmp_path: Path) -> None:
    cpu_folder, device_folder = tmp_path / "here", tmp_path / "there"
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(64, 16)).astype(np.float32)
    quantized = reference + rng.normal(size=(64, 16)).astype(np.float32) * 0.01

    def write(folder: Path, fp32: np.ndarray, int8: np.ndarray) -> None:
        folder.mkdir(exist_ok=True)
        np.save(folder / "mode_fp32_layer_0.npy", fp32)
        np.save(folder / "mode_int8_layer_0.npy", int8)

    write(cpu_folder, reference, quantized)
    write(device_folder, reference * (1 + 1e-6), quantized * (1 + 1e-6))
    assert commands._captures_apart(device_folder, cpu_folder) == ""
    write(device_folder, reference * (1 + 1e-3), quantized)
    assert "mode_fp32_layer_0.npy: 1e-06 of the energy differs" in commands._captures_apart(
        device_folder, cpu_folder
    )
    write(device_folder, reference, quantized * 1.01)
    assert "mode_int8_layer_0.npy: its relative squared" in commands._captures_apart(
        device_folder, cpu_folder
    )


def test_activations_of_other_values_are_apart() -> None:
    loss = {"int8": {"noise": 2.0}}
    portrait = dict.fromkeys(commands._COUNTS, 5) | {"amax": 3.0, "rms": 1.0, "std": 1.0}
    layer = {"module": "a", "portrait": portrait | {"formats": loss}}

    def apart(**changes: object) -> str:
        changed = {"module": "a", "portrait": layer["portrait"] | changes}  # type: ignore[operator]
        return commands._activations_apart([changed], [layer])

    assert apart(amax=3.0001) == ""
    assert apart(amax=3.1) == "a: amax 3.1 instead of 3.0"
    assert apart(nan=6) == "a: nan 6 instead of 5"
    assert apart(formats={"int8": {"noise": 2.5}}) == "a: noise of int8 2.5 instead of 2.0"
    assert commands._activations_apart([], []) == "it measured other layers than on the CPU"
