"""Rotary positions of decoders: how far each pair of channels turns from one token to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.models.llama import rotary, rotate

NONE = "none"
TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
"""Kinds of rotary positions that are computed, the last two up to the length trained on."""


@dataclass(frozen=True)
class RotaryPositions:
    """The turn of the first channels of a head from token to token; the others stay as they are.

    width    of the channels that turn, the pairs of which are half of it apart
    speeds   radians per token of each pair; those of the base where there are none
    factor   of the channels that turn
    longest  the number of tokens up to which this holds; 0 for any
    kind     the rope_type of transformers
    in_pairs True where the channels of a pair are neighbors
    """

    width: int
    base: float = 10000.0
    speeds: tuple[float, ...] = ()
    factor: float = 1.0
    longest: int = 0
    kind: str = "default"
    in_pairs: bool = False

    def turn(self, x: Tensor, start: int) -> Tensor:
        """Rotate tokens by position, the first of which is at `start`."""
        if not self.width:
            return x
        self.check_length(start + x.shape[2])
        cos, sin = rotary(start + x.shape[2], self.width, self.base, x.device, self.speeds)
        if self.factor != 1:
            cos, sin = cos * self.factor, sin * self.factor
        part = x[..., : self.width]
        if self.in_pairs:
            part = torch.cat([part[..., ::2], part[..., 1::2]], -1)
        turned = rotate(part, cos[start:], sin[start:])
        if self.in_pairs:
            turned = torch.stack(turned.chunk(2, -1), -1).flatten(-2)
        if self.width == x.shape[-1]:
            return turned
        return torch.cat([turned, x[..., self.width :]], -1)

    def check_length(self, tokens: int) -> None:
        """Refuse texts in which positions turn with the length of the text."""
        if 0 < self.longest < tokens:
            raise QgateError(
                f"rotary positions of type {self.kind!r} turn otherwise in texts of more than "
                f"{self.longest} tokens, and here are {tokens}: modes of the cache store keys that "
                f"are turned once. Take texts of {self.longest} tokens at most (--seqlen)."
            )


def positions_of(
    parameters: Mapping[str, Any], width: int, longest: int, *, in_pairs: bool = False
) -> RotaryPositions:
    """Return the positions of heads of `width` channels.

    parameters  the rope_parameters of transformers for one kind of layer
    longest     the max_position_embeddings of the model
    """
    kind = parameters.get("rope_type") or "default"
    if kind == NONE:
        return RotaryPositions(0, kind=kind)
    if kind not in TYPES:
        raise QgateError(
            f"the attention of this model has rotary positions of type {kind!r}, which modes of "
            f"the cache do not compute ({', '.join(TYPES)} are): choose another mode."
        )
    return replace(_of_kind(kind, parameters, width, longest), in_pairs=in_pairs)


def _of_kind(kind: str, parameters: Mapping[str, Any], width: int, longest: int) -> RotaryPositions:
    width = int(width * (parameters.get("partial_rotary_factor") or 1.0))
    base = float(parameters.get("rope_theta") or 10000.0)
    plain = [base ** (-2 * pair / width) for pair in range(width // 2)]
    if kind == "linear":
        speeds = [speed / float(parameters["factor"]) for speed in plain]
        return RotaryPositions(width, base, tuple(speeds), kind=kind)
    if kind == "llama3":
        return RotaryPositions(width, base, tuple(_llama3(plain, parameters)), kind=kind)
    if kind == "yarn":
        speeds, factor = _yarn(plain, parameters, base, longest)
        return RotaryPositions(width, base, tuple(speeds), factor, kind=kind)
    if kind == "longrope":
        trained = int(parameters["original_max_position_embeddings"])
        speeds = [
            speed / float(short)
            for speed, short in zip(plain, parameters["short_factor"], strict=True)
        ]
        factor = _longrope_factor(parameters, longest, trained)
        return RotaryPositions(width, base, tuple(speeds), factor, trained, kind)
    return RotaryPositions(width, base, longest=longest if kind == "dynamic" else 0, kind=kind)


def _llama3(plain: list[float], parameters: Mapping[str, Any]) -> list[float]:
    """Slow down pairs that turn less than `low_freq_factor` times in the text trained on."""
    slow, fast = (float(parameters[f"{word}_freq_factor"]) for word in ("low", "high"))
    length = float(parameters["original_max_position_embeddings"])
    factor, speeds = float(parameters["factor"]), []
    for speed in plain:
        turns = length * speed / (2 * math.pi)
        keep = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
        speeds.append(speed * (keep + (1 - keep) / factor))
    return speeds


def _yarn(
    plain: list[float], parameters: Mapping[str, Any], base: float, longest: int
) -> tuple[list[float], float]:
    """Return speeds and the factor of YaRN: pairs that turn seldom are slowed down, by a ramp."""
    trained = float(parameters["original_max_position_embeddings"])
    factor = float(parameters.get("factor") or longest / trained)
    pairs = len(plain)

    def pair_of(turns: float) -> float:
        """Return the pair that turns so many times in the text that was trained on."""
        return pairs * math.log(trained / (turns * 2 * math.pi)) / math.log(base)

    first = pair_of(float(parameters.get("beta_fast") or 32))
    last = pair_of(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last = last + 0.001 if first == last else last
    speeds = []
    for pair, speed in enumerate(plain):
        slowed = min(max((pair - first) / (last - first), 0.0), 1.0)
        speeds.append(speed * (1 - slowed) + speed / factor * slowed)
    whole = parameters.get("attention_factor")
    if whole is None:
        part, of_all = (float(parameters.get(f"mscale{of}") or 0) for of in ("", "_all_dim"))
        whole = yarn_scale(factor)
        if part and of_all:
            whole = yarn_scale(factor, part) / yarn_scale(factor, of_all)
    return speeds, float(whole)


def yarn_scale(factor: float, share: float = 1.0) -> float:
    """Return what YaRN multiplies by where texts are `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _longrope_factor(parameters: Mapping[str, Any], longest: int, trained: int) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = float(parameters.get("factor") or longest / trained)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
