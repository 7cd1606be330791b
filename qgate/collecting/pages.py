"""What was written does not stay in memory: a dump is larger than what training can spare.

Shards that are finished are sent to the disk and their pages handed back, without waiting for it.
The next shard is written into the same pages, which saves finding new ones for all of them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from qgate.dumps.layout import shards_in
from qgate.dumps.writing import DumpWriter

_EVERY = 64 << 20
_LATEST = 4


class Pages:
    """Hands back the pages of a writer's shards, each some times: only clean ones go."""

    def __init__(self) -> None:
        self._seen = 0

    def give_back(self, writer: DumpWriter) -> None:
        """After a record; mostly there is nothing to do."""
        if writer.bytes_written - self._seen < _EVERY:
            return
        self._seen = writer.bytes_written
        path = writer.home.path
        if path is not None:
            for name in list(shards_in(writer.home).values())[-_LATEST:]:
                _hand_back(path / name)


def _hand_back(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
