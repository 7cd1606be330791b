"""Settings of a run of sweeps: options of `qgate sweep`, and keys of the project's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qgate.project.options import CommandSettings
from qgate.settings import setting, shared


@dataclass(frozen=True)
class SweepSettings:
    """Formats and scales that are tried, and the results that are wanted."""

    formats: tuple[str, ...] = setting(
        ("fp8_e4m3",),
        "formats to sweep: F,F (default fp8_e4m3, and a table of formats to choose from); trained4 "
        "is a codebook of 4 bits that is trained on each tensor",
        "F",
        option="elem-format",
        is_repeatable=True,
    )
    granularity: Literal["tensor", "block"] | None = setting(
        None, "sweep only one scale for the tensor, or only one for each block (default: both)"
    )
    levels: int = setting(
        21,
        "number of levels, that is, scales to try, at even steps",
        "N",
        low=1,
        option="num-levels",
    )
    max_exp: float | None = setting(
        None,
        "largest exponent to try; with --granularity block, an offset to that of each block",
        "X",
        low=-1000,
        high=1000,
        option="max-scale-exp",
    )
    min_exp: float | None = setting(
        None,
        "smallest exponent to try; with --granularity block, an offset to that of each block",
        "Y",
        low=-1000,
        high=1000,
        option="min-scale-exp",
    )
    alignment: Literal["exact", "documented"] = shared(
        CommandSettings, "sweep_alignment", option=None
    )
    scale_bits: int = shared(CommandSettings, "sweep_scale_bits", option=None)
    block: int = shared(CommandSettings, "sweep_block", option=None)
    axis: int = shared(CommandSettings, "sweep_axis", option=None)
    via: Literal["bf16", "fp16"] | None = setting(
        None,
        "convert tensors first: faster for 32-bit tensors, and needed for integers",
        option="cast via",
    )
    plots: bool = False
    compares: bool = False
    """True to measure the formats that people choose between, too."""

    @property
    def granularities(self) -> tuple[str, ...]:
        return (self.granularity,) if self.granularity else ("tensor", "block")
