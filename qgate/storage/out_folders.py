"""The folder that a run writes to: `qgate-out`, or the next one while another run writes there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from qgate.storage.files import lock_or_none

OUT = "qgate-out"
# The file in it that a run holds locked to its end.
RUNNING = ".run"
_MOST = 100


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
        with contextlib.suppress(OSError):
            (folder / RUNNING).unlink()
        os.close(handle)
        with contextlib.suppress(OSError):  # of a run that had nothing to write
            folder.rmdir()
