"""One writer at a time, over processes; a killed one leaves no lock behind."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from qgate.storage.files import lock

NAME = ".lock"


def locked(folder: Path, timeout: float) -> AbstractContextManager[None]:
    """Hold the lock of a folder of baselines; the file is there only while it is held."""
    return lock(folder / NAME, timeout, f"the baselines in {str(folder)!r} are")
