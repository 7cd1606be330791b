"""Mixes of types that llama.cpp names: what a GGUF file says it is, beside what its blocks are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from qgate.text.wording import percent

CONFIGURATION = "gguf"
"""The name under which a checkpoint's configuration has the fields of its first head."""
FILE_TYPES: Mapping[int, tuple[str, str]] = {
    2: ("Q4_0", "Q4_0"), 3: ("Q4_1", "Q4_1"), 7: ("Q8_0", "Q8_0"), 8: ("Q5_0", "Q5_0"),
    9: ("Q5_1", "Q5_1"), 10: ("Q2_K", "Q2_K"), 11: ("Q3_K_S", "Q3_K"), 12: ("Q3_K_M", "Q3_K"),
    13: ("Q3_K_L", "Q3_K"), 14: ("Q4_K_S", "Q4_K"), 15: ("Q4_K_M", "Q4_K"),
    16: ("Q5_K_S", "Q5_K"), 17: ("Q5_K_M", "Q5_K"), 18: ("Q6_K", "Q6_K"),
    19: ("IQ2_XXS", "IQ2_XXS"), 20: ("IQ2_XS", "IQ2_XS"), 21: ("Q2_K_S", "Q2_K"),
    22: ("IQ3_XS", "IQ3_S IQ3_XXS"), 23: ("IQ3_XXS", "IQ3_XXS"), 24: ("IQ1_S", "IQ1_S"),
    25: ("IQ4_NL", "IQ4_NL"), 26: ("IQ3_S", "IQ3_S"), 27: ("IQ3_M", "IQ3_S"),
    28: ("IQ2_S", "IQ2_XS IQ2_S"), 29: ("IQ2_M", "IQ2_S"), 30: ("IQ4_XS", "IQ4_XS"),
    31: ("IQ1_M", "IQ1_M"), 36: ("TQ1_0", "TQ1_0"), 37: ("TQ2_0", "TQ2_0"),
    38: ("MXFP4_MOE", "MXFP4"), 39: ("NVFP4", "NVFP4"), 40: ("Q1_0", "Q1_0"), 41: ("Q2_0", "Q2_0"),
}  # fmt: skip
"""The name of each mix by `general.file_type`, and the types that most of its weights have."""
FALLBACKS: Mapping[str, str] = {
    "Q2_K": "Q4_0 IQ4_NL", "Q3_K": "Q4_0 IQ4_NL", "IQ4_XS": "Q5_0 IQ4_NL", "Q4_K": "Q5_0",
    "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0",
}  # fmt: skip
"""What llama.cpp takes for rows that are no multiple of 256; IQ4_NL where none is listed."""
LEAST_SHARE = 0.25
"""Share of the layers' parameters that the main types of a mix have at least."""
BLOCK = "blk."


def file_type_name(fields: Mapping[object, object]) -> str:
    """Return the name of the mix that a head states; empty where it states no quantized one."""
    number = fields.get("general.file_type")
    return FILE_TYPES[number][0] if isinstance(number, int) and number in FILE_TYPES else ""


def main_types(name: str) -> list[str]:
    """Return the types that most weights of a mix have."""
    return next((types for mix, types in FILE_TYPES.values() if mix == name), "").split()


def mix_cause(types: Counter[str], name: str) -> str:
    """Compare the types of the parameters in layers, counted, with those that a mix has.

    Empty where they fit.
    """
    total = sum(types.values())
    main = main_types(name)
    if not total or not main:
        return ""
    others = (FALLBACKS.get(kind, "IQ4_NL").split() for kind in main)
    expected = {*main, *chain.from_iterable(others)}
    share = sum(types[kind] for kind in expected) / total
    if share >= LEAST_SHARE:
        return ""
    listed = ", ".join(f"{percent(n / total)} {kind}" for kind, n in types.most_common(3))
    return f"it says {name}, which is mostly {' or '.join(main)}, and the layers are {listed}"
