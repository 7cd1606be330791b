"""Blocks of GGUF's IQ types from their parts: rows, signs, codes of scales, and shifts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass
class IqParts:
    """Blocks x groups of row codes, x eights of sign bytes, x tiles of scale codes and shifts."""

    d: npt.NDArray[np.float16]
    rows: Ints
    signs: Ints
    scales: Ints
    down: Ints


def _bytes(values: Ints, dtype: str = "<u1") -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(len(values), -1)


def _joined(values: Ints, width: int, count: int) -> Ints:
    """Join `count` neighbors of so many bits, the first lowest."""
    shifts = width * np.arange(count)
    return np.asarray((values.reshape(len(values), -1, count) << shifts).sum(2))


def _words(of: IqParts) -> npt.NDArray[np.uint8]:
    return _bytes(_joined(of.signs & 127, 7, 4) | of.scales << 28, "<u4")


def _iq2_xxs(of: IqParts) -> list[npt.NDArray[np.uint8]]:
    pairs = [_bytes(of.rows).reshape(-1, 8, 4), _words(of).reshape(-1, 8, 4)]
    return [np.concatenate(pairs, 2).reshape(len(of.rows), -1)]


def _iq1_m(of: IqParts) -> list[npt.NDArray[np.uint8]]:
    d = of.d.reshape(-1, 1).view(np.uint16).astype(np.int64) >> 4 * np.arange(4) & 15
    words = _bytes(_joined(of.scales, 3, 4) | d << 12, "<u2")
    high = _bytes(_joined(of.rows >> 8 | of.down << 3, 4, 2))
    return [_bytes(of.rows & 255), high, words]


def _iq4(of: IqParts, group: int = 16) -> npt.NDArray[np.uint8]:
    halves = of.rows.reshape(len(of.rows), -1, 2, group)
    return _bytes((halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(of.rows), -1))


PACK: dict[str, Callable[[IqParts], list[npt.NDArray[np.uint8]]]] = {
    "iq1_s": lambda of: [
        _bytes(of.rows & 255),
        _bytes(_joined(of.rows >> 8, 3, 4) | of.scales << 12 | of.down[:, ::4] << 15, "<u2"),
    ],
    "iq1_m": _iq1_m,
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": lambda of: [
        _bytes(of.rows | (of.signs & 127) << 9, "<u2"), _bytes(_joined(of.scales, 4, 2)),
    ],
    "iq2_s": lambda of: [
        _bytes(of.rows & 255), _bytes(of.signs), _bytes(_joined(of.rows >> 8, 2, 4)),
        _bytes(_joined(of.scales, 4, 2)),
    ],
    "iq3_xxs": lambda of: [_bytes(of.rows), _words(of)],
    "iq3_s": lambda of: [
        _bytes(of.rows & 255), _bytes(_joined(of.rows >> 8, 1, 8)), _bytes(of.signs),
        _bytes(_joined(of.scales, 4, 2)),
    ],
    "iq4_nl": lambda of: [_iq4(of)],
    "iq4_xs": lambda of: [
        _bytes(_joined(of.scales >> 4, 2, 8), "<u2"), _bytes(_joined(of.scales & 15, 4, 2)),
        _iq4(of),
    ],
}  # fmt: skip


def packed(name: str, of: IqParts) -> npt.NDArray[np.uint8]:
    """Return blocks x bytes."""
    first = [] if name == "iq1_m" else [of.d.view(np.uint8).reshape(-1, 2)]
    return np.concatenate([*first, *PACK[name](of)], axis=1)
