"""The folder of one run, as pytest and its workers know it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import pytest

from qgate.storage.out_folders import OUT, REPRODUCTION_FILES, REPRODUCTIONS, held_out_folder
from qgate.storage.removing import LinkError, clear, remove_files

_FOLDER: pytest.StashKey[Path] = pytest.StashKey()
_WORKER_INPUT = "qgate_out"


def reserve_out_folder(config: pytest.Config, home: Path) -> None:
    """Hold a folder to the end of this run; where none can be written, the run says so later."""
    holding = contextlib.ExitStack()
    with contextlib.suppress(OSError):
        config.stash[_FOLDER] = holding.enter_context(held_out_folder(home))
    config.add_cleanup(holding.close)


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


def remove_reproductions(folder: Path, current: Collection[str]) -> list[str]:
    """Remove the reproductions of earlier runs; say why where they stay."""
    patterns = [f"*/{name}" for name in REPRODUCTION_FILES]
    try:
        clear(folder.parent, f"{folder.name}/{REPRODUCTIONS}", patterns, keep=current)
    except LinkError as error:
        return [f"reproductions of earlier runs are still there: {error}"]
    return []


def remove_stale(folder: Path, *current: str) -> None:
    """Remove results of an earlier run, which would pass for those that could not be written."""
    names = {"results.jsonl", "results.csv", "report.html"} - {*current}
    with contextlib.suppress(OSError, LinkError):
        remove_files(folder.parent, *(f"{folder.name}/{name}" for name in sorted(names)))
