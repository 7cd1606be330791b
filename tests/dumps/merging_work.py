"""Ranks put together by workers that die."""

import os
import signal
from pathlib import Path

from qgate.dumps.merging import MergedDump, RankPart, merge_rank


def killed_once(part: RankPart) -> MergedDump:
    """After all is written, but before anybody is told of it; later tries are whole."""
    home = part.output if isinstance(part.output, Path) else None
    merged = merge_rank(part)
    assert home is not None
    marker = home.parent / f"killed{part.rank}"
    if part.rank == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return merged
