"""Codebooks made by name only: GGUF's IQ types, double scales, TurboQuant's second stage."""

from __future__ import annotations

import functools

from qgate.formats._block import BlockFormat
from qgate.formats._codebook import (
    BNB_FP4,
    IQ2,
    IQ3,
    IQ3_ODD,
    IQ4,
    LLOYD,
    NF4,
    Codebook,
    mirrored,
)
from qgate.formats._vectors import ElementLevels
from qgate.formats.codebook import CodebookFormat
from qgate.formats.double_scales import DoubleFormat
from qgate.formats.residual import Projection, ResidualFormat
from qgate.formats.vector_codebook import VectorFormat

EIGHTHS, QUARTERS = (tuple((2 * code + 1) / part for code in range(16)) for part in (8, 4))
ODD = tuple(2.0 * code + 1 for code in range(16))
SHIFTED, BY_TWO, BY_THREE, ODD_LEVELS = (
    ElementLevels(f"{name} elements", mirrored(*magnitudes))
    for name, magnitudes in (("IQ1", (1, 7, 9)), ("IQ2", IQ2), ("IQ3", IQ3), ("odd IQ3", IQ3_ODD))
)
LEVELS = Codebook("IQ4 levels", IQ4)
VECTOR_FORMATS = {
    fmt.name: fmt
    for fmt in (
        VectorFormat("iq1_s", SHIFTED, "IQ1_S", 256, 32, EIGHTHS[:8], 1, shifted=32),
        VectorFormat("iq1_m", SHIFTED, "IQ1_S", 256, 16, EIGHTHS[:8], 1, shifted=8),
        VectorFormat("iq2_xxs", BY_TWO, "IQ2_XXS", 256, 32, EIGHTHS, 2, signs="even"),
        VectorFormat("iq2_xs", BY_TWO, "IQ2_XS", 256, 16, EIGHTHS, 2, signs="even"),
        VectorFormat("iq2_s", BY_TWO, "IQ2_S", 256, 16, EIGHTHS, 2, signs="free"),
        VectorFormat("iq3_xxs", BY_THREE, "IQ3_XXS", 256, 32, QUARTERS, 3, signs="even"),
        VectorFormat("iq3_s", ODD_LEVELS, "IQ3_S", 256, 32, ODD, 3, signs="free"),
        VectorFormat("iq4_nl", LEVELS, "", 32, 32, tuple(-n / 32 for n in range(20, 37)), 4),
        VectorFormat("iq4_xs", LEVELS, "", 256, 32, tuple(float(n) for n in range(-32, 32)), 4),
    )
}
"""Types of GGUF by name."""


@functools.cache
def codebook_named(name: str) -> BlockFormat:
    """Return such a format: iq2_xxs, nf4_double, or lloyd2_qjl, which has three bits."""
    if name in VECTOR_FORMATS:
        return VECTOR_FORMATS[name]
    book, _, kind = name.rpartition("_")
    if kind == "double":
        levels = NF4 if book == "nf4" else BNB_FP4
        return DoubleFormat(name, Codebook(f"{book} levels", levels))
    element = Codebook(f"{book} levels", LLOYD[int(book.removeprefix("lloyd"))])
    first = CodebookFormat(book, element, size=128, scaled_by="rms")
    return ResidualFormat(name, element, first, Projection.drawn(0, first.size))
