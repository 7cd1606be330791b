"""The streams of a command: one that was closed at the start, and pipes that nobody reads on."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import IO, Any

from qgate.storage.locks import open_handle

# Windows calls a closed pipe an invalid argument.
_CLOSED = {errno.EPIPE} | ({errno.EINVAL} if os.name == "nt" else set())


def prepare_streams() -> None:
    """Let this process, and programs that it starts, always have somewhere to write."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # one of ASCII lacks most signs
        setattr(sys, name, _open(descriptor) if stream is None else _dropping(stream, descriptor))


def _open(descriptor: int) -> IO[str]:
    """Open a stream for a descriptor that was closed when this process was started."""
    stream = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    try:  # the stream has taken the first free descriptor, which is not always its own
        os.set_inheritable(descriptor, True)
    except OSError:
        os.dup2(stream.fileno(), descriptor)
    return stream


def _dropping(stream: IO[str], descriptor: int) -> IO[str]:
    """Return a stream that goes on without its reader; a terminal, or one of a test, as it is."""
    if not isinstance(stream, io.TextIOWrapper) or stream.isatty():
        return stream
    try:
        if stream.fileno() != descriptor:
            return stream
    except OSError:
        return stream
    stream.flush()
    raw: Any = _DroppingFile(descriptor, "wb", closefd=False)
    is_raw = isinstance(stream.buffer, io.RawIOBase)  # as with `python -u`
    return io.TextIOWrapper(
        raw if is_raw else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _DroppingFile(io.FileIO):
    """A descriptor that leads nowhere once its pipe has no reader, so that the work goes on."""

    def write(self, data: memoryview | bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
        nowhere = open_handle(Path(os.devnull), os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return len(data)
