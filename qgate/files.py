"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A neighbor to write to, which takes the place of `path` at the end.

    Whatever goes wrong inside, a full disk or a kill, `path` is what it was, or not there.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.close(handle)
    written = Path(name)
    try:
        yield written
        mask = os.umask(0)
        os.umask(mask)
        written.chmod(0o666 & ~mask)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
