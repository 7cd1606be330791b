"""All formats, one line each; a new format of an existing family is one more line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from qgate.formats._block import Format
from qgate.formats._codebook import BNB_FP4, LLOYD, NF4, Codebook
from qgate.formats._grids import BlockGrid
from qgate.formats.choosing import ChoosingFormat
from qgate.formats.codebook import CodebookFormat
from qgate.formats.floats import FloatFormat
from qgate.formats.hif4 import Hif4Format
from qgate.formats.hif8 import HiF8Format
from qgate.formats.integers import IntFormat
from qgate.formats.mx import MxFormat
from qgate.formats.nvfp4 import Nvfp4Format
from qgate.formats.p3109 import p3109_format
from qgate.loading import LateModule
from qgate.registry import Registry
from qgate.text.format_names import FORMAT_ALIASES

if TYPE_CHECKING:
    from qgate.formats import by_name as by_name
else:
    by_name = LateModule("qgate.formats.by_name")

FORMATS: Registry[Format] = Registry("format")

E4M3 = FloatFormat("fp8_e4m3", 4, 3, "nan", bias=7)
E5M2 = FloatFormat("fp8_e5m2", 5, 2, "ieee", bias=15)
E4M3FNUZ = FloatFormat("fp8_e4m3fnuz", 4, 3, "fnuz", bias=8)
E5M2FNUZ = FloatFormat("fp8_e5m2fnuz", 5, 2, "fnuz", bias=16)
E4M3B11FNUZ = FloatFormat("fp8_e4m3b11fnuz", 4, 3, "fnuz", bias=11)
E3M2 = FloatFormat("fp6_e3m2", 3, 2, "none", bias=3)
E2M3 = FloatFormat("fp6_e2m3", 2, 3, "none", bias=1)
E2M1 = FloatFormat("fp4_e2m1", 2, 1, "none", bias=1)
FP16 = FloatFormat("fp16", 5, 10, "ieee", bias=15)
BF16 = FloatFormat("bf16", 8, 7, "ieee", bias=127)

UE5M3 = FloatFormat("fp8_ue5m3", 5, 3, "nan", bias=15, signed=False)

# Not formats of their own: the elements of MXINT8, HiF4, IF3 and MixFP4, and the scale types.
MXINT8_ELEMENT = IntFormat("mxint8 element", 8, fraction_bits=6)
S1P2 = FloatFormat("S1P2", 1, 2, "none", bias=1)
E8M0 = FloatFormat("E8M0", 8, 0, "nan", bias=127, signed=False, subnormals=False)
E6M2 = FloatFormat("E6M2", 6, 2, "nan", bias=48, signed=False, subnormals=False)
E2M0 = FloatFormat("E2M0", 2, 0, "none", bias=1)
E1M2 = FloatFormat("E1M2", 1, 2, "none", bias=-1)
INT3, INT4, INT6 = (IntFormat(f"int{bits}", bits) for bits in (3, 4, 6))
INT3_CODES = FloatFormat("E1M1", 1, 1, "none", bias=0)
INT6_CODES = FloatFormat("E1M4", 1, 4, "none", bias=-3)


FOUR_OVER_SIX = BlockGrid(E2M1, 6.0), BlockGrid(E2M1, 6.0, factor=1.5)


def four_over_six_format(name: str) -> ChoosingFormat | None:
    """Return a variant of nvfp4_4over6 by name: _mse, _256, which is the largest scale, or both."""
    match = re.fullmatch(r"nvfp4_4over6(_mse)?(_256)?", name)
    if match is None:
        return None
    error: Literal["mae", "mse"] = "mse" if match[1] else "mae"
    at_most = 256.0 if match[2] else 448.0
    return ChoosingFormat(
        name, E2M1, E4M3, grids=FOUR_OVER_SIX, error=error, signed=False, largest_scale=at_most
    )


FOUR_OVER_SIX_NAMES = ["nvfp4_4over6_mse", "nvfp4_4over6_256", "nvfp4_4over6_mse_256"]

for _format in (
    E4M3,
    E5M2,
    E4M3FNUZ,
    E5M2FNUZ,
    E4M3B11FNUZ,
    UE5M3,
    E3M2,
    E2M3,
    E2M1,
    HiF8Format("hif8"),
    IntFormat("int8", 8),
    INT4,
    IntFormat("int2", 2),
    IntFormat("uint8", 8, signed=False),
    IntFormat("uint4", 4, signed=False),
    IntFormat("uint2", 2, signed=False),
    FP16,
    BF16,
    MxFormat("mxfp8_e4m3", E4M3),
    MxFormat("mxfp8_e5m2", E5M2),
    MxFormat("mxfp6_e3m2", E3M2),
    MxFormat("mxfp6_e2m3", E2M3),
    MxFormat("mxfp4_e2m1", E2M1),
    MxFormat("mxint8", MXINT8_ELEMENT),
    Nvfp4Format("nvfp4", E2M1, scale_element=E4M3),
    Nvfp4Format("nvfp4_row", E2M1, scale_element=E4M3, by_rows=True),
    Nvfp4Format("nvfp4_ue5m3", E2M1, scale_element=UE5M3),
    ChoosingFormat("nvfp4_4over6", E2M1, E4M3, grids=FOUR_OVER_SIX, error="mae", signed=False),
    MxFormat("nvfp4_pow2", E2M1, size=16, default_rule="rceil"),
    ChoosingFormat(
        "if4", E2M1, E4M3, grids=(BlockGrid(E2M1, 6.0), BlockGrid(INT4, 6.0, unit=6 / 7))
    ),
    ChoosingFormat(
        "if3",
        E2M0,
        E4M3,
        grids=(BlockGrid(E2M0, 4.0), BlockGrid(INT3, 4.0, unit=4 / 3, codes=INT3_CODES)),
    ),
    ChoosingFormat(
        "if6_e2m3",
        E2M3,
        E4M3,
        grids=(BlockGrid(E2M3, 7.5), BlockGrid(INT6, 7.5, unit=7.5 / 31, codes=INT6_CODES)),
    ),
    ChoosingFormat(
        "if6_e3m2",
        E3M2,
        E4M3,
        grids=(BlockGrid(E3M2, 28.0), BlockGrid(INT6, 28.0, unit=28 / 31, codes=INT6_CODES)),
    ),
    ChoosingFormat(
        "mixfp4", E2M1, E4M3, grids=(BlockGrid(E2M1, 6.0), BlockGrid(E1M2, 7.0)), second_wins=True
    ),
    Hif4Format("hif4", S1P2, scale_element=E6M2),
    CodebookFormat("nf4", Codebook("NF4 levels", NF4)),
    CodebookFormat("bnb_fp4", Codebook("bnb_fp4 levels", BNB_FP4)),
    CodebookFormat("lloyd2", Codebook("lloyd2 levels", LLOYD[2]), size=128, scaled_by="rms"),
    CodebookFormat("lloyd3", Codebook("lloyd3 levels", LLOYD[3]), size=128, scaled_by="rms"),
    CodebookFormat("lloyd4", Codebook("lloyd4 levels", LLOYD[4]), size=128, scaled_by="rms"),
):
    FORMATS.add(_format, *(name for name, of in FORMAT_ALIASES.items() if of == _format.name))

DOUBLE_NAMES = ["nf4_double", "bnb_fp4_double"]
RESIDUAL_NAMES = [f"lloyd{bits}_qjl" for bits in (1, 2, 3)]
VECTOR_NAMES = [
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs",
]  # fmt: skip


def _made_by_name(name: str) -> Format | None:
    """Return a codebook of a rarer kind, whose modules are loaded only then."""
    if name not in (*DOUBLE_NAMES, *RESIDUAL_NAMES, *VECTOR_NAMES):
        return None
    return by_name.codebook_named(name)


FORMATS.families += [p3109_format, four_over_six_format, _made_by_name]
