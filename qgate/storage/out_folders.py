"""The folder that a run writes to: `qgate-out`, or the next one while another run writes there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from qgate.errors import QgateError
from qgate.storage.files import lock_or_none
from qgate.storage.removing import remove_empty_folder, remove_files

OUT = "qgate-out"
# The file in it that a run holds locked to its end.
RUNNING = ".run"
REPRODUCTIONS, CANDIDATES = "repro", "candidates"
REPRODUCTION_FILES = ("inputs.safetensors", "run.py")
WRITTEN = (
    "results.jsonl",
    "results.csv",
    "report.html",
    f"{CANDIDATES}/*.json",
    *(f"{REPRODUCTIONS}/*/{name}" for name in REPRODUCTION_FILES),
)
"""The files that a run writes to its folder, as patterns of their paths in it."""
_MOST = 100


def check_out_folder(folder: Path) -> None:
    """Refuse what has the name of the folder and is none."""
    if os.path.lexists(folder) and not folder.is_dir():
        target = "a file" if folder.exists() else "nothing"
        kind = f"a link to {target}" if folder.is_symlink() else target
        raise QgateError(
            f"{str(folder)!r} is {kind}, and results need a folder of that name: remove it, or "
            "give it another name."
        )


@contextlib.contextmanager
def held_out_folder(home: Path) -> Iterator[Path]:
    """Hold the first folder that no other run holds; an OSError says why there is none."""
    for number in range(1, _MOST):
        folder = home / (OUT if number == 1 else f"{OUT}-{number}")
        folder.mkdir(exist_ok=True)
        handle = lock_or_none(folder / RUNNING)
        if handle is not None:
            break
    else:
        raise OSError(
            errno.EAGAIN, f"{_MOST - 1} other runs write to folders of that name", str(folder)
        )
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError, QgateError):
            remove_files(home, f"{folder.name}/{RUNNING}")
        os.close(handle)
        remove_empty_folder(folder)  # of a run that had nothing to write
