"""How much of qgate five gates load: what they do without stays on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaigns.forked import ran

ROOT = Path(__file__).parents[2]
MOST_LOADED = 300
"""Modules that five layer tests of tiny-mamba may load; the number only falls."""
MOST_LOADED_ELSEWHERE = 50
"""Modules of qgate that a run without gates may load; the number only falls."""
LAYERS, REFERENCE = "suites/test_layer_outputs.py", "suites/test_reference.py"
OPTIONS = ("--mode=2-1", "--samples=2", "--seqlen=32", "--calib-samples=2", "--calib-seqlen=32")
PROGRAM = """
import json, sys
import pytest
status = pytest.main(sys.argv[1:])
names = [name for name in sys.modules if name == "qgate" or name.startswith("qgate.")]
print("loaded", json.dumps([int(status), sorted(names)]))
"""


def loaded_modules(home: Path, *words: str, options: Sequence[str] = OPTIONS) -> list[str]:
    """Return the modules of qgate that a run loads in a process of its own, and passes."""
    plain = ["-q", "-p", "qgate.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *plain, *options, *words],
        cwd=home, capture_output=True, text=True, check=False,
        env={name: value for name, value in os.environ.items() if name != "CI"},
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("loaded "))
    status, names = json.loads(line.removeprefix("loaded "))
    assert status == 0, done.stdout
    return list(names)


def test_five_gates_load_little(tmp_path: Path) -> None:
    (tmp_path / "suites").mkdir()
    for name in (LAYERS, REFERENCE):
        shutil.copy(ROOT / name, tmp_path / name)
    words = ["-q", "-p", "no:cacheprovider", *OPTIONS, LAYERS, REFERENCE, "--update-baselines"]
    accepted = ran(lambda: int(pytest.main(words)), tmp_path)  # in a fork that has torch
    assert accepted.status == 0, accepted.said
    names = loaded_modules(tmp_path, LAYERS)
    assert "qgate.gate.measuring.model_gates" in names
    unneeded = ("checkpoints.", "engines.", "relations.", "activation_stats.", "causes.", "dumps.")
    loaded = [name for name in names if name.removeprefix("qgate.").startswith(unneeded)]
    assert [name for name in loaded if not name.endswith(".kind")] == []
    assert len(names) <= MOST_LOADED, f"{len(names)}: {names}"


def test_a_run_without_gates_loads_little(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    names = loaded_modules(tmp_path, options=())
    assert len(names) <= MOST_LOADED_ELSEWHERE, f"{len(names)}: {names}"
    heavy = ("qgate.storage.files", "qgate.devices", "qgate.documents", "qgate.results")
    assert [name for name in names if name.startswith(heavy)] == []
