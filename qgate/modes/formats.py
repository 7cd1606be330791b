"""Modes of any model: a number format in its linear layers, or a dtype for the whole of it.

The weights and inputs of every linear layer are quantized except those of the head, and of every
convolution except depthwise ones, which have one channel to share a scale in. A mode of your own is
one more literal like these.
"""

from __future__ import annotations

from qgate.modes.mode import Mode, Per, Rule


def _both(name: str, fmt: str, about: str, per: Per = "format", causal: bool = True) -> Mode:
    rule = Rule(":(input|weight)$", fmt, of="product", per=per)
    return Mode(name, about, rules=(rule,), causal=causal)


FP32 = Mode("fp32", "the reference: nothing is quantized")

FORMAT_MODES = (
    _both("mxfp8", "mxfp8_e4m3", "MXFP8 (E4M3) weights and inputs"),
    _both("mxfp8_e5m2", "mxfp8_e5m2", "MXFP8 (E5M2) weights and inputs"),
    _both("mxfp6_e3m2", "mxfp6_e3m2", "MXFP6 (E3M2) weights and inputs"),
    _both("mxfp6_e2m3", "mxfp6_e2m3", "MXFP6 (E2M3) weights and inputs"),
    _both("mxfp4", "mxfp4_e2m1", "MXFP4 weights and inputs"),
    _both("nvfp4", "nvfp4", "NVFP4 weights and inputs, tensor scale from the tensor", causal=False),
    _both("hif8", "hif8", "HiF8 weights and inputs, cast without a scale"),
    _both("hif4", "hif4", "HiF4 weights and inputs"),
    _both("int8", "int8", "INT8, a scale per output channel and per token", per="row"),
    _both(
        "fp8_e4m3", "fp8_e4m3", "FP8 (E4M3), a scale per output channel and per token", per="row"
    ),
    Mode(
        "w8",
        "INT8 weights, a scale per output channel; inputs as they are",
        rules=(Rule(":weight$", "int8", of="product", per="row"),),
    ),
    Mode(
        "w4",
        "INT4 weights, a scale per 128 features; inputs as they are",
        rules=(Rule(":weight$", "int4", of="product", per="group"),),
    ),
    Mode("fp16", "the whole model in float16", fits="other", dtype="float16"),
    Mode("bf16", "the whole model in bfloat16", fits="other", dtype="bfloat16"),
)
