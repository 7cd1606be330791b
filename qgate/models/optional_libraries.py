"""Optional libraries, imported without their warnings and progress bars."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from qgate.errors import QgateError


@contextlib.contextmanager
def load_quietly(
    library: str, bars: tuple[str, str, str], needs: str, advice: str, level: int
) -> Iterator[Any]:
    """Yield a library whose warnings, and records up to a level, are off.

    `bars` are the module of its progress bars and the functions that switch them off and on.
    """
    disabled = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                module = importlib.import_module(library)
                progress, off, on = importlib.import_module(bars[0]), bars[1], bars[2]
            except ImportError as error:
                raise QgateError(f"{needs} ({error}): {advice}") from None
            was_shown = progress.is_progress_bar_enabled()
            getattr(progress, off)()
            try:
                yield module
            finally:
                if was_shown:
                    getattr(progress, on)()
    finally:
        logging.disable(disabled)
