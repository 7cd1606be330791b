"""Aliases of formats, for the registry and for pictures, which are drawn without torch."""

from __future__ import annotations

FORMAT_ALIASES = {
    "e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "float8_e5m2": "fp8_e5m2",
    "e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "e5m2fnuz": "fp8_e5m2fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
    "float8_e4m3b11fnuz": "fp8_e4m3b11fnuz",
    "ue5m3": "fp8_ue5m3",
    "e5m3": "fp8_ue5m3",
    "e3m2": "fp6_e3m2",
    "e2m3": "fp6_e2m3",
    "e2m1": "fp4_e2m1",
    "hifp8": "hif8",
    "hifloat8": "hif8",
    "float16": "fp16",
    "bfloat16": "bf16",
    "mxfp8": "mxfp8_e4m3",
    "mxfp4": "mxfp4_e2m1",
    "if6": "if6_e2m3",
    "hifloat4": "hif4",
}
