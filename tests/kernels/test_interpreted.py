"""The kernels give torch's bits, run by triton's interpreter: all 65,536 patterns, every option."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import checks
from tests.shares import asked_values, share

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("triton", reason="there is no triton for this platform")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest) -> Any:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    names = asked_values(request, "name") or ["mx"]  # without names it runs all
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", *names],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@share(24)
@pytest.mark.parametrize("name", checks.CHECKS)
def test_the_kernel_gives_the_definitions_bits(said: Any, name: str) -> None:
    assert said["found"][name] == ""


def test_wrong_kernels_are_noticed(said: Any) -> None:
    cast, errors = said["wrong"]
    assert "values differ, the first is" in cast
    assert errors.startswith("sums: ")
    assert "values differ, the first is" in errors
