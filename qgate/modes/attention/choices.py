"""Choices of a mode that quantizes attention: formats and shares of stored keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from qgate.errors import QgateError, unknown

Share = Literal["tensor", "head", "token", "token_head", "group", "format"]


@dataclass(frozen=True)
class TensorChoice:
    """The format of one tensor of attention, and which of its elements share a scale.

    format   name of a format
    share    "tensor" and "head" have static, calibrated scales; "token" one scale for all heads of
             a token, "token_head" one for each head of it, "group" one for each `group` channels
             of a head, "format" what the format does by itself (its blocks, along the channels)
    options  further options of the quantizer
    """

    format: str
    share: Share = "token_head"
    group: int = 32
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.share not in get_args(Share):
            raise unknown("share of a choice", self.share, get_args(Share))
        if self.group < 1:
            raise QgateError(f"group {self.group} is not allowed; it is a whole number from 1.")

    @property
    def is_static(self) -> bool:
        """Tell if its scales are calibrated."""
        return self.share in ("tensor", "head")

    def words(self) -> str:
        """Say the format and the share, for plans."""
        shares = {
            "tensor": "per tensor", "head": "per head", "token": "per token",
            "token_head": "per token and head", "group": f"per {self.group}", "format": "",
        }  # fmt: skip
        return f"{self.format} {shares[self.share]}".strip()


@dataclass(frozen=True)
class AttentionChoices:
    """The quantized tensors of attention.

    keys, values  as the cache stores them; None for those that stay as they are
    before_rope   keys are stored before rotary positions, and turned when they are read
    rotated       keys are multiplied by a Hadamard matrix before they are quantized
    sinks         the first tokens, which stay as they are
    window        the last tokens, that of the query among them, which stay as they are
    """

    keys: TensorChoice | None = None
    values: TensorChoice | None = None
    before_rope: bool = False
    rotated: bool = False
    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.keys is None and self.values is None:
            raise QgateError("attention choices that quantize nothing are no mode: give keys=….")
        if (self.before_rope or self.rotated) and self.keys is None:
            raise QgateError("before_rope and rotated are about keys: give keys=TensorChoice(…).")
        if self.rotated and self.keys is not None and self.keys.is_static:
            raise QgateError(
                f"rotated keys with scales {self.keys.words()} are not allowed: calibration sees "
                "keys that are not rotated. Take share 'token', 'token_head' or 'group'."
            )
        for name in ("sinks", "window"):
            if getattr(self, name) < 0:
                raise QgateError(f"{name} {getattr(self, name)} is not allowed; it is from 0.")

    @property
    def keeps_some(self) -> bool:
        """Tell if some tokens of the cache stay as they are."""
        return bool(self.sinks or self.window)

    @property
    def is_static(self) -> bool:
        """Tell if any scale is calibrated."""
        return any(side is not None and side.is_static for side in (self.keys, self.values))

    @property
    def formats(self) -> frozenset[str]:
        return frozenset(side.format for side in (self.keys, self.values) if side is not None)
