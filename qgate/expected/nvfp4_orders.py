"""The orders of float32 operations in which correct kernels make the scales of NVFP4."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qgate.expected.group_scales import by_groups
from qgate.formats.definition import round_by_list
from qgate.formats.nvfp4 import nvfp4_format
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

SCALES = (
    "block scale amax*(s/6)",
    "block scale amax/6*s",
    "block scale amax/6/(1/s)",
    "block scale amax/6/(largest/2688)",
)
ELEMENTS = (
    "elements times the reciprocal",
    "elements divided by the scale",
    "elements times a quotient of scales",
)


def nvfp4_values(
    q: QuantizerSettings, scales: int, elements: int
) -> Callable[[Floats, float], Floats]:
    """Quantize to NVFP4 with one of several orders of float32 operations for each scale."""

    def values(x: Floats, nudge: float) -> Floats:
        fmt = nvfp4_format(q.format)
        assert fmt is not None
        state, top = fmt.define_state(x), np.float32(fmt.max)
        encode, fp32 = np.float32(state), np.float32
        decode = fp32(1) / encode
        if scales == 3:
            largest = np.abs(np.nan_to_num(x, posinf=0.0, neginf=0.0)).max(initial=0.0)
            decode = fp32(largest) / fp32(fmt.bound) if largest else decode

        def rows(blocks: Floats) -> Floats:
            with np.errstate(all="ignore"):
                amax = np.abs(blocks).max(axis=1).astype(fp32)
                block_scales = (
                    amax * (encode * (fp32(1) / top)),
                    amax / top * encode,
                    amax / top / decode,
                    amax / top / decode,
                )[scales]
                scale = fmt.define_scale(block_scales * fp32(nudge))
                if elements == 1:
                    ratios = blocks / (scale * decode).astype(np.float64)[:, None]
                else:
                    quotient = fp32(1) / decode / scale if elements else fp32(1) / (scale * decode)
                    factor = np.minimum(quotient, np.finfo(fp32).max)
                    ratios = (blocks * factor.astype(np.float64)[:, None]).astype(fp32)
                ratios = np.nan_to_num(ratios.astype(np.float64), posinf=fmt.max, neginf=-fmt.max)
                codes = round_by_list(ratios * nudge, fmt.element, rounding=q.rounding)
                result = codes * scale.astype(np.float64)[:, None] * float(decode)
                poisoned = blocks if q.inf == "nan" else np.where(np.isnan(blocks), np.nan, 0.0)
                is_whole = np.isfinite(poisoned).all(axis=1, keepdims=True)
                return np.where(is_whole, result, np.nan)

        return by_groups(x, q, rows)

    return values
