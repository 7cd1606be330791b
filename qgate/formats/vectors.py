"""Conformance vectors of a format: the value of every code, and casts of hard values."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from qgate._version import __version__
from qgate.formats._block import BlockFormat, Format
from qgate.formats._element import ElementFormat
from qgate.formats.choosing import ChoosingFormat, is_signed_choice
from qgate.formats.encoded import Encoded
from qgate.formats.quantizer import Quantizer
from qgate.formats.settings import QuantizerSettings

Array = npt.NDArray[np.generic]
Singles = npt.NDArray[np.float32]
RANDOM = 256
"""Normal values among the casts of an element format, from seed 0."""
TABLE_BITS = 8
"""Bits up to which every code is listed."""


def conformance_vectors(fmt: Format) -> dict[str, Array]:
    """Return arrays by name; `meta` has what they are as JSON, in bytes of UTF-8.

    Values are float64, inputs float32 and codes uint8 (uint16 for formats of 16 bits); scales of
    codebooks are float32. Casts stand
    under `cast_input`, and for each convention under `CONVENTION_codes`, `CONVENTION_values` and,
    in block formats, `CONVENTION_scales`. Where the sign bit of a scale chooses the grid, codes
    below it have `second_values`.
    """
    arrays: dict[str, Array] = {}
    conventions = dict(_conventions(fmt))
    if fmt.bits <= TABLE_BITS:
        arrays["codes"] = np.arange(2**fmt.bits, dtype=np.uint8)
        arrays["values"] = fmt.element.code_values()
    if isinstance(fmt, BlockFormat) and fmt.stored_dtype == "uint8":
        arrays |= _scale_table(fmt, conventions)
    if isinstance(fmt, ChoosingFormat) and fmt.signed:
        arrays["second_values"] = fmt.second_values()
    with np.errstate(over="ignore"):  # what lies beyond float32 becomes Inf
        hard = _hard_blocks(fmt) if isinstance(fmt, BlockFormat) else _hard_values(fmt)
        arrays["cast_input"] = hard
    for name, quantizer in conventions.items():
        arrays |= {f"{name}_{part}": array for part, array in _casts(arrays, quantizer)}
    arrays["meta"] = np.frombuffer(_meta(fmt, conventions, arrays).encode(), dtype=np.uint8)
    return arrays


def _conventions(fmt: Format) -> Iterator[tuple[str, Quantizer]]:
    """List the ways to cast: what becomes of overflow, or how a block's scale is made."""
    if not isinstance(fmt, BlockFormat):
        if "narrow" in fmt.options and fmt.code_values().min() < 0:  # without the lowest code
            yield "narrow", Quantizer(fmt.name, scale=1.0)
            yield "saturating", Quantizer(fmt.name, scale=1.0, narrow=False)
            return
        yield "saturating", Quantizer(fmt.name, scale=1.0, saturate=True)
        if fmt.nan_code is not None:
            yield "overflowing", Quantizer(fmt.name, scale=1.0, saturate=False)
    elif "scale_rule" in fmt.options:
        for rule in ("floor", "ceil", "even", "rceil"):
            yield rule, Quantizer(fmt.name, scale_rule=rule)
    else:
        yield "cast", Quantizer(fmt.name)


def _hard_values(fmt: ElementFormat) -> Singles:
    """Return values of the format, ties between them, and what lies beyond either end."""
    listed = fmt.values()
    listed = listed[np.isfinite(listed)]
    if fmt.bits > TABLE_BITS:  # each power of two, and the ends
        listed = listed[:: 2 ** (fmt.bits - TABLE_BITS)]
    ties = ((listed[1:] + listed[:-1]) / 2).astype(np.float32)
    step = float(listed[-1] - listed[-2])
    ends = np.array(
        [fmt.max + step / 2, fmt.max + step, 2 * fmt.max, 3e38, fmt.min_subnormal / 2,
         fmt.min_subnormal / 4, 1e-45, 0.0],
        dtype=np.float32,
    )  # fmt: skip
    beside = [np.nextafter(sides, sides + side) for sides in (ties, ends) for side in (-1, 1)]
    draws = np.random.default_rng(0).normal(size=RANDOM) * (fmt.max / 4 if fmt.max < 256 else 4)
    special = [np.inf, np.nan] if fmt.nan_code is not None else [np.inf]
    parts = [listed, ties, *beside, ends, -ends, draws, special, [-np.inf]]
    return np.concatenate([np.asarray(part, dtype=np.float32) for part in parts])


def _hard_blocks(fmt: BlockFormat) -> Singles:
    """Return blocks, one a row: zeros, boundaries of scales, ties, ends of float32, NaN and Inf."""
    draws = np.random.default_rng(0).normal(size=(20, fmt.block)).astype(np.float32)
    blocks = [np.zeros(fmt.block), *draws[:6], *(draws[6] * 2.0**e for e in (-140, -126, -60, 60))]
    blocks += [draws[7] * (3e38 / np.abs(draws[7]).max())]
    values = fmt.values()
    values = values[np.isfinite(values)]
    between = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    blocks += [np.resize(between, fmt.block), np.resize(between[::-1], fmt.block) * 0.75]
    for largest in (1.0, fmt.max, fmt.max * (1 + 2**-10), fmt.max * (1 - 2**-10), fmt.max * 1.5):
        blocks.append(np.clip(draws[8] * largest / 8, -largest / 2, largest / 2))
        blocks[-1][3] = -largest
    alone, negative = np.zeros(fmt.block), np.full(fmt.block, -0.0)
    alone[-1] = 1e-45
    blocks += [alone, negative, np.full(fmt.block, 1.0)]
    for special in (np.nan, np.inf, -np.inf):
        block = draws[9].copy()
        block[5] = special
        blocks.append(block)
    return np.stack([np.asarray(block, dtype=np.float32) for block in blocks])


def _scale_table(fmt: BlockFormat, conventions: dict[str, Quantizer]) -> dict[str, Array]:
    """Return the value of each code of a scale, from an element that is one."""
    quantizer = next(iter(conventions.values()))
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    values, signed = fmt.element.code_values(), is_signed_choice(fmt)
    one = int(np.flatnonzero(values == 1.0)[0])
    ones = torch.full((256, fmt.block), one, dtype=fmt.element.code_dtype())
    micro = torch.zeros(256, 3, dtype=torch.uint8) if "micro" in fmt.stored else None
    state = torch.ones((), dtype=torch.float32) if fmt.needs_amax else None
    stored = codes & 127 if signed else codes
    encoded = Encoded(quantizer, ones, torch.float64, stored, state, micro)
    return {
        "scale_codes": codes.reshape(-1).numpy(),
        "scale_values": encoded.decode(torch.float64)[:, 0].numpy(),
    }


def _casts(arrays: dict[str, Array], quantizer: QuantizerSettings) -> Iterator[tuple[str, Array]]:
    """Cast the hard values; each block is a tensor of its own, whose scale no other one moves."""
    fmt = quantizer.format
    rows = torch.from_numpy(arrays["cast_input"].copy())
    parts = rows if isinstance(fmt, BlockFormat) else rows[None]
    listed = [quantizer.encode(row) for row in parts]  # type: ignore[attr-defined]
    stacked = torch.stack([encoded.codes for encoded in listed])
    mask = 2**fmt.bits - 1
    wide = np.uint16 if fmt.bits > TABLE_BITS else np.uint8
    codes = (stacked.to(torch.int32) & mask).numpy().astype(wide)
    values = torch.stack([encoded.decode(torch.float64) for encoded in listed]).numpy()
    is_block = isinstance(fmt, BlockFormat)
    yield "codes", codes if is_block else codes[0]
    yield "values", values if is_block else values[0]
    for name, of in (("scales", "scales"), ("micro", "micro"), ("tensor_scales", "tensor_scale")):
        if is_block and getattr(listed[0], of) is not None:
            yield name, torch.stack([getattr(encoded, of) for encoded in listed]).numpy()


def _meta(fmt: Format, conventions: dict[str, Quantizer], arrays: dict[str, Array]) -> str:
    """Return what a reader has to know, as JSON."""
    facts = {name: getattr(fmt, name) for name in ("name", "kind", "bits", "layout", "rounding",
             "max", "min_normal", "min_subnormal", "block", "scale", "notes")}  # fmt: skip
    listed = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
    return json.dumps(
        {
            "kind": "qgate vectors 1",
            "version": __version__,
            "format": facts,
            "conventions": {name: repr(quantizer) for name, quantizer in conventions.items()},
            "arrays": listed,
        },
        indent=1,
    )
