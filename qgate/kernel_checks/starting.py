"""The start of a kernel's process, before torch is loaded here: both load it at the same time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel_process.py")
PACKAGE = SOURCE.resolve().parents[1]
OWN_CODE = "<kernel process>"
"""The name of the code in that process, in the place of a file and of a module."""
PROGRAM = (
    f"import sys; exec(compile(sys.argv[1], {OWN_CODE!r}, 'exec'), {{'__name__': {OWN_CODE!r}}})"
)


def start_process(quiet: bool) -> subprocess.Popen[bytes]:
    """Start a Python that knows of no test and does not load qgate."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("QGATE_", "PYTEST_"))
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, SOURCE.read_text(encoding="utf-8")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        env=environment,
    )


@contextlib.contextmanager
def kernel_python(quiet: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process of a kernel, which ends with this context."""
    process = start_process(quiet)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
