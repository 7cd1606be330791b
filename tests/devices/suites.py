"""The suites of users under pytest, in a project of its own: none of the tests' plugins load."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.devices.cases import Cases, Setting
from tests.devices.journal import Journal
from tests.devices.lanes import ROOT
from tests.devices.outcomes import JOURNAL
from tests.devices.record import Row

MODELS = ("tiny-llama", "tiny-mamba")
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
_PROJECT = ("suites", "baselines", "conftest.py", "pyproject.toml", "qgate.toml")


def project(folder: Path) -> Path:
    """Make a project of this checkout's suites and baselines, without its tests."""
    home = folder / "project"
    if home.exists():
        shutil.rmtree(home)
    home.mkdir(parents=True)
    for name in _PROJECT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, home / name)
    return home


def pytest_row(
    setting: Setting,
    name: str,
    *options: str,
    jobs: int = 1,
    environment: dict[str, str] | None = None,
) -> Row:
    """Run pytest in a fresh project; each test is a row, and the result is a row of them all."""
    folder = setting.folder / name.replace(" ", "-")
    home = project(folder)
    journal = Journal(setting.journal.path)
    before = len(journal.read().rows)
    command = [sys.executable, "-m", "pytest", *options, "--device", setting.device]
    # By name: a checkout that is not installed has no entry point.
    command += [
        "-p",
        "qgate.plugin",
        "-p",
        "tests.devices.outcomes",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
    ]
    # Warnings of plugins that are installed beside ours, and are not what is tested.
    command += ["-W", "default::pytest.PytestWarning"]
    if setting.device.startswith("sim"):
        command += ["-p", "tests.devices.plugin"]
    if jobs > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(jobs)]
    log = setting.folder / f"{name.replace(' ', '-')}.txt"
    began = time.monotonic()
    with log.open("wb") as file:
        status = subprocess.run(
            command, cwd=home, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False,
            env={**os.environ, **(environment or {}), JOURNAL: str(journal.path)},
        ).returncode  # fmt: skip
    seconds = round(time.monotonic() - began, 2)
    rows = journal.read().rows[before:]
    figures = {
        "passed": sum(row.status == "right" for row in rows),
        "failed": sum(row.status == "wrong" for row in rows),
        "skipped": sum(row.status == "noted" for row in rows),
        "exit_status": status,
    }
    gates, held_gates = _gates(home)
    figures |= {"gates": gates, "held": held_gates}
    text = f"{figures['passed']} passed, {figures['failed']} failed, {held_gates} of {gates} gates held"
    if status in (0, 1) and figures["passed"]:
        wrong = status == 1 and not figures["failed"]
        text += ", and pytest ended with status 1: see its log" if wrong else ""
        return Row(name, "wrong" if wrong else "noted", text, seconds, figures)
    lines = log.read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it printed nothing"
    return Row(name, "wrong", f"pytest ended with status {status}: {last}", seconds, figures)


def _gates(home: Path) -> tuple[int, int]:
    """Return how many gates a run had and how many it held, from its results."""
    try:
        with (home / "qgate-out/results.jsonl").open(encoding="utf-8") as file:
            extent = json.loads(file.readline()).get("extent", {})
    except (OSError, ValueError):
        return 0, 0
    return extent.get("gates", 0), extent.get("judged", 0)


def cases(_: Setting) -> Cases:
    """All modes of both models at once."""
    options = ["suites", "--mode", "all"]
    for model in MODELS:
        options += ["--model", model]
    return {
        "all modes": lambda setting: pytest_row(setting, "all modes", *options, jobs=setting.jobs)
    }


def timed_cases(setting: Setting) -> Cases:
    """One mode as a user runs it, first with empty caches, then again."""
    caches = {name: str(setting.folder / "caches" / name.lower()) for name in _CACHES}

    def first(setting: Setting) -> Row:
        shutil.rmtree(setting.folder / "caches", ignore_errors=True)
        return pytest_row(setting, "first run", "suites", "--mode", "2-1", environment=caches)

    def second(setting: Setting) -> Row:
        return pytest_row(setting, "second run", "suites", "--mode", "2-1", environment=caches)

    return {"first run": first, "second run": second}
