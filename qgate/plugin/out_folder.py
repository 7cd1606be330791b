"""The folder that a run writes to: `qgate-out`, or the next one while another run writes there."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

import pytest

from qgate.storage.files import lock_or_none

OUT = "qgate-out"
_LOCK = ".run"
_MOST = 100
_FOLDER: pytest.StashKey[Path] = pytest.StashKey()
_WORKER_INPUT = "qgate_out"


def reserve_out_folder(config: pytest.Config, home: Path) -> None:
    """Hold the first folder that no other run holds to the end of this run."""
    for number in range(1, _MOST):
        folder = home / (OUT if number == 1 else f"{OUT}-{number}")
        try:
            folder.mkdir(exist_ok=True)
            handle = lock_or_none(folder / _LOCK)
        except OSError:  # nothing can be written here, which the run says where it has to
            return
        if handle is not None:
            config.stash[_FOLDER] = folder
            config.add_cleanup(functools.partial(_release, folder, handle))
            return


def out_folder_notes(config: pytest.Config) -> list[str]:
    """Say where a run wrote that is not the usual place."""
    name = config.stash.get(_FOLDER, Path(OUT)).name
    return [] if name == OUT else [f"another run writes to {OUT}: this one wrote to {name}"]


def out_folder(config: pytest.Config, home: Path) -> Path:
    """Return the folder of this run, which workers of pytest-xdist are told."""
    folder_name = getattr(config, "workerinput", {}).get(_WORKER_INPUT)
    return Path(folder_name) if folder_name else config.stash.get(_FOLDER, home / OUT)


def tell_worker(config: pytest.Config, workerinput: dict[str, object]) -> None:
    if _FOLDER in config.stash:
        workerinput[_WORKER_INPUT] = str(config.stash[_FOLDER])


def _release(folder: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        (folder / _LOCK).unlink()
    os.close(handle)
    with contextlib.suppress(OSError):  # of a run that had nothing to write
        folder.rmdir()
