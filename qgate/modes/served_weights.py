"""Modes of linear layers in four and eight bits as engines serve them.

They are asked for by name, or by a pattern that begins with a letter (`served-*`): "all" leaves
them out. A mode of your own is one more literal like these.
"""

from __future__ import annotations

from collections.abc import Mapping

from qgate.modes.mode import Mode, Rule

Choice = tuple[str, Mapping[str, object]]
"""A format with its options."""
# One draw of signs, the same for inputs and weights, so that the rotations cancel in the product.
SIGNS = (1, 1, -1, 1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, -1)


def _mode(
    name: str,
    about: str,
    weight: Choice,
    inputs: Choice | None = None,
    *,
    causal: bool = True,
) -> Mode:
    rules = [Rule(":weight$", weight[0], options=weight[1])]
    if inputs is not None:
        rules.append(Rule(":input$", inputs[0], options=inputs[1]))
    return Mode(f"served-{name}", about, rules=tuple(rules), causal=causal, by_name=True)


_ROTATED: Choice = ("nvfp4", {"rotation": SIGNS})
_HALF_BLOCKS: Choice = ("mxfp4_e2m1", {"block": 16})
_TILES = {"granularity": "block", "block": (128, 128)}
_GROUPS = {"granularity": "block", "block": 128, "axis": -1}

SERVED_WEIGHT_MODES = (
    _mode(
        "nvfp4-tiles", "NVFP4, a block scale per 16x16 tile of weights and per 16 of inputs",
        ("nvfp4", {"block": (16, 16)}), ("nvfp4", {}), causal=False,
    ),
    _mode(
        "nvfp4-4over6", "NVFP4, the largest of a block at 6 or at 4, whichever errs less",
        ("nvfp4_4over6", {}), ("nvfp4_4over6", {}), causal=False,
    ),
    _mode(
        "nvfp4-rotated", "NVFP4, each 16 features multiplied by a random Hadamard matrix",
        _ROTATED, _ROTATED, causal=False,
    ),
    _mode("mxfp4-16", "MXFP4 weights and inputs in blocks of 16", _HALF_BLOCKS, _HALF_BLOCKS),
    _mode(
        "int4-zero", "INT4 weights with a scale and a zero point per 128 features; inputs as they "
        "are", ("uint4", {**_GROUPS, "zero_point": "minmax"}),
    ),
    _mode(
        "fp8-tiles", "FP8 (E4M3), a scale per 128x128 tile of weights and per 128 of inputs",
        ("fp8_e4m3", _TILES), ("fp8_e4m3", _GROUPS),
    ),
)  # fmt: skip
