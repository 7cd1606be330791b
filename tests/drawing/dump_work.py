"""Summarize tensors in workers that die of one of them."""

from __future__ import annotations

import os
import signal

from qgate.drawing.tensor_pass import Batch, BatchSummary, summarize_batch

DEADLY = 2


def summarize_or_die(batch: Batch) -> BatchSummary:
    if any(located.record.order == DEADLY for located in batch.records):
        os.kill(os.getpid(), signal.SIGKILL)
    return summarize_batch(batch)
