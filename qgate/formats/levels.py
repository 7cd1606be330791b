"""Levels of codebooks, as libraries and papers list them."""

from __future__ import annotations

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""NormalFloat of QLoRA (arXiv 2305.14314), as bitsandbytes has it."""
BNB_FP4 = (
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
    0.1666666716337204, 0.25, -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
    -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
)  # fmt: skip
"""FP4 of bitsandbytes, which is not E2M1: twelfths of 1/16, 2, 3, 4, 6, 8 and 12."""
IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
"""IQ4_NL and IQ4_XS of GGUF."""
IQ2, TERNARY = (8.0, 25.0, 43.0), (-1.0, 0.0, 1.0)
IQ3 = (4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0)
IQ3_ODD = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
"""Magnitudes of GGUF's IQ2 and IQ3 types, and elements of IQ1: vectors of them have codes."""


def mirrored(*magnitudes: float) -> tuple[float, ...]:
    return (*(-magnitude for magnitude in reversed(magnitudes)), *magnitudes)


LLOYD = {
    1: mirrored(0.7978845834732056),
    2: mirrored(
        0.4527800381183624, 1.5104175806045532,
    ),
    3: mirrored(
        0.2450941801071167, 0.7560052871704102, 1.3439092636108398, 2.1519455909729004,
    ),
    4: mirrored(
        0.12839503586292267, 0.38804829120635986, 0.6567591428756714, 0.9423404335975647,
        1.2562311887741089, 1.6180464029312134, 2.069017171859741, 2.7325894832611084,
    ),
}  # fmt: skip
"""Levels with the least squared error for a normal distribution of variance 1, by bits.

Each is the mean of the numbers that are nearest to it (Lloyd, Max), rounded to float32. TurboQuant
(arXiv 2504.19874) rounds rotated vectors to them.
"""
