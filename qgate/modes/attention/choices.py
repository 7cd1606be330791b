"""Choices of a mode that quantizes attention: the formats and shares of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from qgate.errors import QgateError, unknown

Share = Literal["tensor", "head", "token", "token_head", "group", "format", "unit"]
SIDES = ("queries", "keys", "values", "weights", "output")


@dataclass(frozen=True)
class TensorChoice:
    """The format of one tensor of attention, and which of its elements share a scale.

    format   name of a format
    share    "tensor" and "head" have static, calibrated scales; "token" one scale for all heads of
             a token, "token_head" one for each head of it, "group" one for each `group` channels
             of a head, "format" what the format does by itself (its blocks, along the channels),
             "unit" the scale that puts 1 at the largest value of the format
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
            "unit": "of 0 to 1",
        }  # fmt: skip
        return f"{self.format} {shares[self.share]}".strip()


@dataclass(frozen=True)
class AttentionChoices:
    """The quantized tensors of attention.

    keys, values  as the cache stores them; None for those that stay as they are
    queries       after rotary positions
    weights       the output of softmax: share "unit", or "format" with blocks along the tokens
    output        the context, which the output projection reads
    before_rope   keys are stored before rotary positions, and turned when they are read
    rotated       keys are multiplied by a Hadamard matrix before they are quantized
    values_rotated  so are values
    sinks         the first tokens, which stay as they are
    window        the last tokens, that of the query among them, which stay as they are
    """

    keys: TensorChoice | None = None
    values: TensorChoice | None = None
    queries: TensorChoice | None = None
    weights: TensorChoice | None = None
    output: TensorChoice | None = None
    before_rope: bool = False
    rotated: bool = False
    values_rotated: bool = False
    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if not self.chosen:
            raise QgateError("attention choices that quantize nothing are no mode: give keys=….")
        for side, choice in self.chosen.items():
            is_unit = choice.share == "unit"
            if side == "weights" and choice.share not in ("unit", "format"):
                raise QgateError(
                    f"weights per {choice.share!r} are not allowed: they lie between 0 and 1, in "
                    "rows that grow. Take share 'unit', or 'format' for blocks."
                )
            if (is_unit and side != "weights") or (choice.is_static and side == "output"):
                raise QgateError(
                    f"share {choice.share!r} of {side} is not allowed: 'unit' is for weights, "
                    "calibrated ones for queries, keys and values. Take 'token_head'."
                )
        if (self.before_rope or self.rotated) and self.keys is None:
            raise QgateError("before_rope and rotated are about keys: give keys=TensorChoice(…).")
        if self.rotated and self.keys is not None and self.keys.is_static:
            raise QgateError(
                f"rotated keys with scales {self.keys.words()} are not allowed: calibration sees "
                "keys that are not rotated. Take share 'token', 'token_head' or 'group'."
            )
        if self.values_rotated and (self.values is None or self.values.is_static):
            raise QgateError(
                "values_rotated is about values whose scales are not calibrated: give "
                "values=TensorChoice(…) with share 'format', 'token', 'token_head' or 'group'."
            )
        for name in ("sinks", "window"):
            if getattr(self, name) < 0:
                raise QgateError(f"{name} {getattr(self, name)} is not allowed; it is from 0.")

    @property
    def chosen(self) -> dict[str, TensorChoice]:
        """Return the choices by the tensor that they are of, in the order of the data."""
        sides = {name: getattr(self, name) for name in SIDES}
        return {name: choice for name, choice in sides.items() if choice is not None}

    def rotates(self, side: str) -> bool:
        """Tell if a tensor is multiplied by a Hadamard matrix before it is quantized."""
        return {"keys": self.rotated, "values": self.values_rotated}.get(side, False)

    @property
    def is_computed(self) -> bool:
        """Tell if more is quantized than what the cache stores."""
        return not self.chosen.keys() <= {"keys", "values"}

    @property
    def keeps_some(self) -> bool:
        """Tell if some tokens of the cache stay as they are."""
        return bool(self.sinks or self.window)

    @property
    def is_static(self) -> bool:
        """Tell if any scale is calibrated."""
        return any(choice.is_static for choice in self.chosen.values())

    @property
    def formats(self) -> frozenset[str]:
        return frozenset(choice.format for choice in self.chosen.values())
