"""What a byte model has to beat: how well counts of bytes and of byte pairs predict a text."""

from __future__ import annotations

import numpy as np


def unigram_bits(train: bytes, text: bytes) -> float:
    """Bits per byte of `text` under the byte frequencies of `train`, each counted once more."""
    counts = np.bincount(np.frombuffer(train, np.uint8), minlength=256) + 1.0
    return float(-np.log2(counts / counts.sum())[np.frombuffer(text, np.uint8)][1:].mean())


def bigram_bits(train: bytes, text: bytes) -> float:
    """The same for each byte given the one before, backed by the byte frequencies."""
    seen = np.frombuffer(train, np.uint8).astype(np.int64)
    single = np.bincount(seen, minlength=256) + 1.0
    pairs = np.bincount(seen[:-1] * 256 + seen[1:], minlength=65536).reshape(256, 256)
    backed = pairs + single / single.sum()
    bits = -np.log2(backed / backed.sum(1, keepdims=True))
    told = np.frombuffer(text, np.uint8)
    return float(bits[told[:-1], told[1:]].mean())
