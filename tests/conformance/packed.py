"""A weight that another library packed, held against qgate's formats."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import qgate
from qgate.formats.options import Options
from tests.conformance.reading import assert_same_codes, decode, near_ties, normal_numbers
from tests.formats.oracles import assert_same_bits, to_float64

SHAPE = (32, 256)
FULL_RANGE: Options = {"narrow": False}


@dataclass(frozen=True)
class Packed:
    """The codes and scales in the bytes of a library, and the values that it reads from them.

    `options` say which elements share a scale. `encode_options` are those of the block formats that
    make the scales, too.
    """

    format: str
    codes: Tensor
    scales: Tensor
    values: Tensor
    options: Options = field(default_factory=Options)
    encode_options: Options = field(default_factory=Options)
    tensor_scale: Tensor | None = None
    zero_points: Tensor | None = None

    @property
    def is_block_format(self) -> bool:
        return qgate.formats.get(self.format).kind == "block"


def weight() -> Tensor:
    """Return a weight whose largest magnitude gives NVFP4 a tensor scale that is a power of two."""
    w = normal_numbers(SHAPE)
    w[3, 7] = 42.0
    assert w.abs().max() == 42
    return w


def check_decoded(packed: Packed) -> None:
    """Expect the values that the library reads, bit for bit."""
    ours = decode(
        packed.codes,
        packed.format,
        packed.scales,
        tensor_scale=packed.tensor_scale,
        zero_points=packed.zero_points,
        dtype=packed.values.dtype,
        **packed.options,
    )
    assert ours.dtype == packed.values.dtype
    assert_same_bits(ours, to_float64(packed.values), packed.format)


def check_encoded(packed: Packed) -> None:
    """Expect the codes that the library made of the same weight, except near ties."""
    w = weight()
    element = qgate.formats.get(packed.format).element
    if packed.is_block_format:
        ours = qgate.encode(w, packed.format, **packed.options, **packed.encode_options)
        assert ours.scales is not None
        assert torch.equal(ours.scales, packed.scales)
    else:
        options: Options = {**packed.options, "scale": packed.scales}
        if packed.zero_points is not None:
            options["zero_point"] = packed.zero_points
        ours = qgate.encode(w, packed.format, **options)
    one = int(np.flatnonzero(element.code_values() == 1)[0])
    factors = decode(
        torch.full_like(packed.codes, one),
        packed.format,
        packed.scales,
        tensor_scale=packed.tensor_scale,
        **packed.options,
    )
    may_differ = near_ties(
        w.double() / factors,
        element.name,
        zero_points=_per_element(packed),
        narrow=packed.options.get("narrow", True),
    )
    assert_same_codes(
        decode(ours.codes, element), decode(packed.codes, element), may_differ, packed.format
    )


def _per_element(packed: Packed) -> Tensor | None:
    """Return the zero point of each element."""
    if packed.zero_points is None:
        return None
    zeros = torch.zeros_like(packed.codes)
    ones = torch.ones_like(packed.scales)
    return -decode(zeros, packed.format, ones, zero_points=packed.zero_points, **packed.options)


def assert_own_scales(packed: Packed) -> None:
    """Expect the scales that qgate makes itself to be those of the library."""
    ours = qgate.encode(weight(), packed.format, **packed.options).scales
    assert ours is not None
    assert torch.equal(ours, packed.scales)
