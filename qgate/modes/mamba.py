"""Modes of a Mamba model: its W8A8 block, and what each mode does to the convolution's output.

All live in the folded and rotated basis. y is the float32 output of convolution and SiLU, s the
static scale of x_proj's input, Q(y) its codes.
"""

from __future__ import annotations

from typing import Any

from qgate.modes.mode import MambaChoices, Mode, Rule

_LINEARS = r"\.mixer\.(in|x|dt|out)_proj:(input|weight|output)$"

# Beyond the largest number a float is Inf, and has to be seen.
_INF = {"saturate": False}


def _float(name: str, fmt: str) -> Mode:
    """Weights and everything that linears, convolution and scan read or write, rounded."""
    return Mode(
        name,
        f"products in float32; weights, inputs and outputs rounded to {name}",
        basis="rotated",
        fits="mamba",
        rules=(
            Rule(_LINEARS, fmt, options=_INF),
            # The convolution and its SiLU are one kernel, rounded once.
            Rule(r"\.mixer\.conv1d:(input|weight)$", fmt, of="conv", options=_INF),
            Rule(r"\.mixer\.act:output$", fmt, of="activation", options=_INF),
            Rule(r"\.mixer\.scan:(u|dt|B|C|z|output)$", fmt, of="scan", options=_INF),
        ),
    )


def _mode(
    name: str, about: str, *choices: Any, equals: str = "", causal: bool = True, **more: Any
) -> Mode:
    return Mode(
        name,
        about,
        basis="rotated",
        fits="mamba",
        choices=MambaChoices(*choices, **more),
        equals=tuple(equals.split()),
        causal=causal,
    )


MAMBA_MODES = (
    _float("fp16", "fp16"),
    _float("bf16", "bf16"),
    _mode("0", "x_proj and scan read Q(y)", "away", "codes", "codes", "block", equals="2-0 5-0 2-1"),
    _mode("2-0", "as 0, u dequantized and quantized once more", "away", "codes", "requantized", "block", equals="0"),
    _mode("2-1", "Q(y), dequantized at the start of a time loop", "away", "codes", "codes", "loop", equals="2-2 0"),
    _mode("2-2", "the grid values of Q(y) in float32, time loop", "away", "codes", "grid", "loop", equals="2-1"),
    _mode("2-3", "y rounded half to even for both, time loop", "even", "codes", "codes", "loop", equals="2-1"),
    _mode("2-4", "the scan reads y: not rounded, not clipped", "even", "codes", "exact", "loop"),
    _mode(
        "3",
        "as 2-4, the convolution's input on a scale of its own largest value (an interpretation)",
        "even", "codes", "exact", "einsum", causal=False, dynamic_conv=True,
    ),
    _mode("4", "on the grid where it reaches, y beyond it", "even", "codes_of_u", "selective", "loop"),
    _mode("5-0", "as 0, u handed over in float32", "away", "codes_of_u", "codes", "block", equals="0"),
    _mode("5-1", "as 2-4, rounded half away", "away", "codes_of_u", "exact", "block", equals="2-4"),
    _mode("5-2", "as 4, rounded half away", "away", "codes_of_u", "selective", "block", equals="4"),
    _mode("5-3", "outliers on a second grid up to the largest of them", "away", "codes_of_u", "second_grid", "block", causal=False),
    _mode("5-4", "a quarter of the step below code 32", "away", "codes_of_u", "quarter_grid", "block"),
    _mode("5-6", "a quarter of the step up to 8 s, powers of two beyond", "away", "codes_of_u", "powers", "block"),
    _mode("5-7", "three zones: steps of s / 4, s and 4 s", "away", "codes_of_u", "three_zones", "block"),
    _mode("6-0", "as 0, x_proj and dt_proj multiply in float32", "even", "u", "codes", "einsum", float_products=True, regridded="products"),
    _mode("6-1", "y for both, x_proj and dt_proj in float32, nothing put on a grid", "even", "u", "exact", "einsum", float_products=True),
    _mode("6-2", "on the grid where it reaches, y beyond it; products in float32", "even", "u", "selective", "einsum", float_products=True),
    _mode("6-3", "half the step below code 64; products in float32", "even", "u", "half_grid", "einsum", float_products=True),
    _mode("6-4", "outliers on the grid calibrated with alpha 1; products in float32", "even", "u", "wide_grid", "block", float_products=True, regridded="scan"),
)  # fmt: skip
