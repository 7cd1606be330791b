"""How far long work has come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Any]:
    """A bar on a terminal; elsewhere a line now and then would be noise in a log."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", file=sys.stderr, leave=False) as bar:

        def step(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield step
