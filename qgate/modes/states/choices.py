"""Choices of a mode that quantizes recurrent states: formats, scales, and rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from qgate import formats
from qgate.errors import QgateError, unknown

Share = Literal["none", "tensor", "channel", "token"]
SIDES = ("conv", "ssm")


@dataclass(frozen=True)
class StateChoice:
    """The format of one state, the elements that share a scale, and the rounding.

    format      name of an element format
    share       "none" casts without a scale; "tensor" and "channel" have static scales from the
                calibration samples; "token" has scales made at each token: one for each channel of
                a scan's state, one for all channels of a token that a convolution keeps
    stochastic  rounds up or down at random, up as often as the value is near to it
    remainder   format in which the rounding error is stored as well, to be added when the state is
                read (error feedback); its scales are those of "token"
    """

    format: str
    share: Share = "none"
    stochastic: bool = False
    remainder: str = ""

    def __post_init__(self) -> None:
        if self.share not in get_args(Share):
            raise unknown("share of a state", self.share, get_args(Share))
        for name in filter(None, (self.format, self.remainder)):
            if formats.get(name).kind != "element":
                raise QgateError(
                    f"{name} has scales of its own blocks; states take element formats such as "
                    "bf16, fp8_e4m3 and int8."
                )
        if self.stochastic and self.remainder:
            raise QgateError(
                "a state that is rounded stochastically keeps no remainder: choose stochastic=True "
                "or remainder=…."
            )

    @property
    def is_static(self) -> bool:
        """Tell if its scales come from the calibration samples."""
        return self.share in ("tensor", "channel")

    def words(self) -> str:
        """Say the format, the share and the rounding, for plans."""
        shares = {
            "none": "", "tensor": " per tensor", "channel": " per channel", "token": " per token",
        }  # fmt: skip
        text = f"{self.format}{shares[self.share]}"
        text += ", rounded stochastically" if self.stochastic else ""
        return f"{text}, its error in {self.remainder}" if self.remainder else text


@dataclass(frozen=True)
class StateChoices:
    """The quantized states of every mixer.

    conv  the last inputs of the convolution; None for those that stay as they are
    ssm   the state of the scan
    seed  of random rounding
    """

    conv: StateChoice | None = None
    ssm: StateChoice | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.chosen:
            raise QgateError("state choices that quantize nothing are no mode: give ssm=….")
        if not 0 <= self.seed < 2**32:
            raise QgateError(f"seed {self.seed} is not allowed; it is from 0 to 2^32 - 1.")

    @property
    def chosen(self) -> dict[str, StateChoice]:
        """Return the choices by state, in the order of the data."""
        sides = {name: getattr(self, name) for name in SIDES}
        return {name: choice for name, choice in sides.items() if choice is not None}

    @property
    def is_static(self) -> bool:
        """Tell if any scale comes from the calibration samples."""
        return any(choice.is_static for choice in self.chosen.values())

    @property
    def is_stochastic(self) -> bool:
        """Tell if any state is rounded at random."""
        return any(choice.stochastic for choice in self.chosen.values())

    @property
    def formats(self) -> frozenset[str]:
        names = {name for c in self.chosen.values() for name in (c.format, c.remainder)}
        return frozenset(names - {""})
