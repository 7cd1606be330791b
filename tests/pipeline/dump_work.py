"""Looks at tensors by workers that die of one."""

from __future__ import annotations

import os
import signal

from qgate.drawing.tensor_pass import Batch, Looked, look

DEADLY = 2


def look_or_die(batch: Batch) -> Looked:
    if any(place.record.order == DEADLY for place in batch.places):
        os.kill(os.getpid(), signal.SIGKILL)
    return look(batch)
