"""Inputs and results that microxcaling's tests state, as numbers.

github.com/microsoft/microxcaling, mx/tests at 7bc4195: test_corners_mx.py, test_fp8_e4m3_fix.py,
test_e5m0_scale.py and test_corners_elemwise.py. Its rounding "nearest" is ties away, its "floor" is
toward zero. The rows with subnormal numbers flushed to zero (allow_denorm=False) are left out: no
format of qgate does that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import IntFormat
from qgate.formats.mx import MxFormat
from qgate.formats.options import Options
from tests.formats.oracles import assert_same_bits

NAN, INF = math.nan, math.inf
# Elements of narrower integers, which OCP does not have: qgate's family without a name of theirs.
MXINT4 = MxFormat("mxint4", IntFormat("mxint4 element", 4, fraction_bits=2))
MXINT2 = MxFormat("mxint2", IntFormat("mxint2 element", 2))
MIN_NORMAL = 2.0**-14
BF16_MIN, BF16_TOP = 2.0**-126, 2.0**127


@dataclass(frozen=True)
class Vector:
    """One row of numbers, all of them one block, and what they become."""

    label: str
    format: str | MxFormat
    numbers: tuple[float, ...]
    results: tuple[float, ...]
    options: Options = field(default_factory=Options)

    @property
    def name(self) -> str:
        return self.format if isinstance(self.format, str) else self.format.name


AWAY: Options = {"rounding": "away"}
PLAIN: Options = {"rounding": "away", "saturate": False}
NARROW: Options = {"rounding": "away", "scale_bits": 5}

BESIDE_448 = (
    (485.0, 475.0, 400.0, -485.0, -475.0, -450.0, 2.0**-6, -(2.0**-6)),
    (448.0, 448.0, 416.0, -448.0, -448.0, -448.0, 2.0**-6, -(2.0**-6)),
)
WEIGHTS = (
    (
        -0.582733273506, -0.256973713636, 0.506033003330, 0.400039970875,
        -0.437093466520, 1.275019764900, -2.123294353485, 1.514909625053,
        -2.660086154938, -0.200791791081, -0.060985822231, -0.209203109145,
        2.385987281799, 0.062245476991, 0.217003762722, -0.857734560966,
        0.507945835590, 0.896152675152, -0.751049160957, -0.488164335489,
        0.805381953716, -0.172028362751, 0.271137863398, -0.503807783127,
        1.879478693008, -0.294227510691, 0.968807995319, 0.670037031174,
        -0.871595799923, 0.304561793804, -0.567594051361, -1.265962004662,
    ),
    (
        -0.5625, -0.25, 0.5, 0.40625, -0.4375, 1.25, -2, 1.5,
        -2.75, -0.203125, -0.0625, -0.203125, 2.5, 0.0625, 0.21875, -0.875,
        0.5, 0.875, -0.75, -0.5, 0.8125, -0.171875, 0.28125, -0.5,
        1.875, -0.28125, 1, 0.6875, -0.875, 0.3125, -0.5625, -1.25,
    ),
)  # fmt: skip


def _non_finite() -> list[Vector]:
    return [
        Vector(f"{bad} in a block", fmt, (bad, 0, BF16_TOP, 0), (NAN,) * 4, {"rounding": "zero"})
        for fmt in ("mxfp8_e4m3", "mxfp4_e2m1", MXINT4)
        for bad in (NAN, INF, -INF)
    ]


def _int8() -> list[Vector]:
    rows = (
        ((1,) * 10, (1,) * 10),
        ((1,) * 5 + (2,) * 5, (1,) * 5 + (2,) * 5),
        ((-1,) * 5 + (-2,) * 5, (-1,) * 5 + (-2,) * 5),
        ((1,) * 5 + (-2,) * 5, (1,) * 5 + (-2,) * 5),
        (
            (
                1.015625,
                1.0234375,
                1.03125,
                1.0390625,
                1.25,
                1.2578125,
                1.9375,
                1.9453125,
                1.984375,
                1.9921875,
            ),
            (
                1.015625,
                1.03125,
                1.03125,
                1.046875,
                1.25,
                1.265625,
                1.9375,
                1.953125,
                1.984375,
                1.984375,
            ),
        ),
        (
            (
                -1.984375,
                -1.9765625,
                -1.96875,
                -1.9609375,
                -1.9375,
                -1.9296875,
                -1.75,
                -1.7421875,
                -1.0,
                -1.9921875,
            ),
            (
                -1.984375,
                -1.984375,
                -1.96875,
                -1.96875,
                -1.9375,
                -1.9375,
                -1.75,
                -1.75,
                -1.0,
                -1.984375,
            ),
        ),
        (
            (
                1.99609375,
                1.98828125,
                0.0,
                0.00390625,
                0.0078125,
                0.01171875,
                -0.015625,
                -0.01171875,
                -0.0078125,
                -0.00390625,
            ),
            (
                1.984375,
                1.984375,
                0.0,
                0.0,
                0.015625,
                0.015625,
                -0.015625,
                -0.015625,
                -0.015625,
                0.0,
            ),
        ),
    )
    return [Vector(f"row {i}", "mxint8", *row, AWAY) for i, row in enumerate(rows)]


def _five_scale_bits() -> list[Vector]:
    """Scales of 5 bits: NaN above 2^15, and at least 2^-15."""
    rows = {
        2.0**16: NAN,
        2.0**15: 2.0**15,
        2.0**-16: 2.0**-15,
        2.0**-17: 0.0,
        2.0**-15: 2.0**-15,
        2.0**-14: 2.0**-14,
        1.0: 1.0,
        0.0: 0.0,
    }
    return [
        Vector(f"{sign * x:g}", MXINT2, (sign * x, *(0.0,) * 7), (sign * y, *(y * 0,) * 7), NARROW)
        for x, y in rows.items()
        for sign in (1, -1)
    ]


VECTORS = [
    *_non_finite(),
    Vector("-2 is not used", MXINT4, (-1.0, -1.75, -1.99, 1.99), (-1.0, -1.75, -1.75, 1.75), AWAY),
    Vector("-2 is not used, 1", MXINT4, (1.0, -1.75, -1.99, 1.99), (1.0, -1.75, -1.75, 1.75), AWAY),
    *_int8(),
    Vector("beside 448", "mxfp8_e4m3", *BESIDE_448, AWAY),
    Vector("beside 448, and a zero", "mxfp8_e4m3", *((*row, 0.0) for row in BESIDE_448), AWAY),
    Vector("beside 448, and 56", "mxfp8_e4m3", *((*row, *(0.0,) * 56) for row in BESIDE_448), AWAY),
    Vector("weights", "mxfp8_e4m3", *WEIGHTS, AWAY),
    Vector("weights, ties to even", "mxfp8_e4m3", *WEIGHTS),
    *_five_scale_bits(),
    Vector(
        "largest", "fp16", (65504, -65504, 65519, -65519, 65520, -65520),
        (65504, -65504, 65504, -65504, INF, -INF), PLAIN,
    ),
    Vector(
        "subnormal", "fp16",
        tuple(MIN_NORMAL * x for x in (1, 0.5, 2.0**-10, 2.0**-11, 2.0**-12, 1023 / 1024, 2047 / 2048)),
        tuple(MIN_NORMAL * x for x in (1, 0.5, 2.0**-10, 2.0**-10, 0, 1023 / 1024, 1)), PLAIN,
    ),
    Vector(
        "largest", "bf16", tuple(BF16_TOP * x for x in (255 / 128, -255 / 128, 1021 / 512, 1023 / 512, -1023 / 512)),
        (BF16_TOP * 255 / 128, -BF16_TOP * 255 / 128, BF16_TOP * 255 / 128, INF, -INF), PLAIN,
    ),
    Vector(
        "limits", "bf16", tuple(BF16_TOP * x for x in (1.9921875, 1.9921874, -1.9921875, 1.99609375, -1.99609375)),
        (BF16_TOP * 1.9921875, BF16_TOP * 1.9921875, -BF16_TOP * 1.9921875, INF, -INF), PLAIN,
    ),
    Vector("not finite", "bf16", (0, NAN, INF, 0), (0, NAN, INF, 0), PLAIN),
    Vector("not finite, ties to even", "bf16", (0, NAN, INF, 0), (0, NAN, INF, 0), {"saturate": False}),
    Vector(
        "powers of two", "bf16", (65535, 65536, 131072, 262144, 524288),
        (65536, 65536, 131072, 262144, 524288), PLAIN,
    ),
    Vector(
        "rounded", "bf16", (65535, -65535, -1.9985847, 0.4999000132083893, -0.49968934059143066),
        (65536, -65536, -2, 0.5, -0.5), PLAIN,
    ),
    Vector(
        "subnormal", "bf16",
        tuple(BF16_MIN * x for x in (1, 0.5, 2.0**-7, 2.0**-8, 2.0**-9, 127 / 128, 255 / 256)),
        tuple(BF16_MIN * x for x in (1, 0.5, 2.0**-7, 2.0**-7, 0, 127 / 128, 1)), PLAIN,
    ),
    Vector(
        "subnormal, ties to even", "bf16", (BF16_MIN * 253 / 256, BF16_MIN * 251 / 256),
        (BF16_MIN * 126 / 128, BF16_MIN * 126 / 128), {"saturate": False},
    ),
]  # fmt: skip
CHECKED = {"mxfp8_e4m3": 8, "mxfp4_e2m1": 3, "mxint8": 7, "fp16": 2, "bf16": 8}
"""The vectors of each format that has a name."""


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.name}: {vector.label}")
def test_vector(vector: Vector) -> None:
    x = torch.tensor(vector.numbers, dtype=torch.float32)
    options = dict(vector.options)
    if not (isinstance(vector.format, str) and vector.format in ("fp16", "bf16")):
        options["block"] = len(x)
    ours = qgate.quantize(x, vector.format, **options)
    expected = np.array(vector.results, dtype=np.float64)
    # microxcaling's zeros have no sign.
    assert_same_bits(ours + 0.0, expected + 0.0, vector.label, x)


def test_vectors_are_counted() -> None:
    names = [vector.name for vector in VECTORS]
    assert {name: names.count(name) for name in CHECKED} == CHECKED
    assert set(names) - set(CHECKED) == {"mxint4", "mxint2"}
