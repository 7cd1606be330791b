"""Memory of freed tensors stays with the process, where its allocator has a setting for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from qgate import devices

PASSES = """
import resource
import numpy as np
from qgate.devices import keep_freed_memory

KEEP
for _ in range(12):
    tensors = [np.ones(1 << 20) for _ in range(6)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def page_faults(statement: str, **environment: str) -> int:
    """Count the pages that a process fetches which makes and frees 48 MB a dozen times."""
    done = subprocess.run(
        [sys.executable, "-c", PASSES.replace("KEEP", statement)],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of GNU alone")
def test_freed_memory_stays() -> None:
    returned = page_faults("pass")
    assert page_faults("keep_freed_memory()") < returned / 2
    assert page_faults("keep_freed_memory()", MALLOC_TOP_PAD_="0") > returned / 2


@pytest.mark.parametrize("has_setting", [True, False])
def test_other_allocators_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, has_setting: bool
) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(
        **({"mallopt": lambda *given: calls.append(given)} if has_setting else {})
    )
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    devices.keep_freed_memory()
    assert not calls
    monkeypatch.setattr(devices.sys, "platform", "linux")
    devices.keep_freed_memory()
    assert len(calls) == 2 * has_setting
