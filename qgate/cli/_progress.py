"""Progress bars on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from qgate.cli._console import shows_progress

if TYPE_CHECKING:
    from tqdm import tqdm


@contextlib.contextmanager
def progress_bars(unit: str = "it") -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar per title on a terminal, and nothing in a log."""
    bars: dict[str, tqdm[NoReturn]] = {}

    def step(title: str, done: int, total: int) -> None:
        if title not in bars:
            from tqdm import tqdm

            for other in bars.values():
                other.close()
            bars[title] = tqdm(desc=title or None, unit=unit, file=sys.stderr, leave=False)
        bars[title].total = total
        bars[title].update(done - bars[title].n)

    try:
        yield step if shows_progress(sys.stderr) else lambda _what, _done, _total: None
    finally:
        for bar in bars.values():
            bar.close()


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show one bar, from the first step on."""
    with progress_bars(f" {unit}") as step:
        yield lambda done, total: step("", done, total)
