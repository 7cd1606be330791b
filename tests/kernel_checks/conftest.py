"""A folder with a reference, where `qgate check` starts the processes of kernels fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.kernel_checks.cheating_kernels import REFERENCE
from tests.kernel_checks.warm_kernels import WarmKernels

FILES = ("kernel", "reference", "helper", "example", "broken")


@pytest.fixture(scope="session")
def kernel_server() -> Iterator[WarmKernels]:
    kernels = WarmKernels()
    yield kernels
    kernels.close()


@pytest.fixture
def warm_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_server: WarmKernels
) -> Path:
    """Return a folder with `reference.py`, `helper.py` and `example.py`, in which commands are run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in FILES:  # loaded here by name, and gone after the test
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delenv("QGATE_SEED", raising=False)
    monkeypatch.setattr("qgate.kernel_checks.starting.start_process", kernel_server.start)
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "helper.py").write_text("def product(x, w):\n    return x @ w.T\n")
    rows = "lambda generator: (torch.randn(24, 64, generator=generator), -1)"
    (tmp_path / "example.py").write_text(f"import torch\nrows = {rows}\n")
    return tmp_path
