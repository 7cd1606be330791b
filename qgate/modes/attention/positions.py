"""Rotary positions of decoders: how far each pair of channels turns from one token to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qgate.errors import QgateError

NONE, TYPES = "none", ("default", "linear", "llama3")
"""Kinds of rotary positions that are computed; the others depend on the length of a text."""


def speeds_of(positions: Mapping[str, Any], width: int) -> tuple[float, ...]:
    """Return the radians per token of each pair, or nothing for those that the base tells.

    positions  the rope_parameters of transformers for one kind of layer
    """
    kind = positions.get("rope_type") or "default"
    share = positions.get("partial_rotary_factor") or 1.0
    if kind not in (NONE, *TYPES) or share != 1.0:
        problem = "of a part of the channels" if kind in TYPES else f"of type {kind!r}"
        raise QgateError(
            f"the attention of this model has rotary positions {problem}, which modes of the cache "
            f"do not compute ({', '.join(TYPES)} are): choose another mode."
        )
    if kind == NONE:
        return (0.0,) * (width // 2)
    if kind == "default":
        return ()
    base, factor = float(positions["rope_theta"]), float(positions["factor"])
    plain = [base ** (-2 * pair / width) for pair in range(width // 2)]
    if kind == "linear":
        return tuple(speed / factor for speed in plain)
    slow, fast = (float(positions[f"{word}_freq_factor"]) for word in ("low", "high"))
    length = float(positions["original_max_position_embeddings"])

    def scaled(speed: float) -> float:
        """Slow down pairs that turn less than `slow` times in the text that was trained on."""
        turns = length * speed / (2 * math.pi)
        keep = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
        return speed * (keep + (1 - keep) / factor)

    return tuple(map(scaled, plain))
