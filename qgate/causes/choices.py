"""Block scales read in another format, and blocks that a kernel puts on the wrong grid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from qgate.causes.faults import WrongCast
from qgate.expected.conventions import with_options
from qgate.formats import get
from qgate.formats.choosing import ChoosingFormat, is_signed_choice
from qgate.formats.definition import quantize as define
from qgate.formats.encoded import encode_tensor
from qgate.formats.nvfp4 import Nvfp4Format
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

SIGN = 128
SCALE_TYPES = "fp8_e4m3", "fp8_ue5m3"
"""Types of one byte that block scales of NVFP4 have."""


def scale_type_faults(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List scales that are stored in one type and read in another one."""
    fmt = q.format
    if not isinstance(fmt, Nvfp4Format):
        return
    for name in SCALE_TYPES:
        other = get(name).element
        if other == fmt.scale_element or is_signed_choice(fmt):
            continue
        own, read = (
            scale.name.removeprefix("fp8_").upper() for scale in (fmt.scale_element, other)
        )
        changed = with_options(q, format=replace(fmt, scale_element=other))
        yield WrongCast(
            f"has block scales stored as {own} and read as {read}",
            lambda x, changed=changed: _decoded(x, q, changed),  # type: ignore[misc]
        )
        if other.signed:
            yield WrongCast(
                f"has block scales stored as {own} and read as {read} without their highest bit",
                lambda x, changed=changed: _decoded(x, q, changed, keep=SIGN - 1),  # type: ignore[misc]
            )


def choice_faults(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List blocks that choose by another rule, or whose choice is not read."""
    fmt = q.format
    if not isinstance(fmt, ChoosingFormat):
        return
    names = [re.sub("fp[46]_", "", grid.element.name).upper() for grid in fmt.grids]
    for grid, name in zip(fmt.grids, names, strict=True):
        only = with_options(q, format=replace(fmt, grids=(grid, grid), signed=False))
        side = (
            f"on {name}" if fmt.signed else f"with their largest at {grid.largest / grid.factor:g}"
        )
        yield WrongCast(
            f"has all blocks {side}: none chooses",
            lambda x, only=only: define(x, only),  # type: ignore[misc]
        )
    yield WrongCast(
        "has every block on the grid with the larger error", lambda x: _worse(x, q, fmt)
    )
    if not fmt.signed:
        return
    first, second = names
    one_grid = Nvfp4Format(fmt.name, fmt.element, fmt.scale_element)
    yield WrongCast(
        f"has its {second} blocks decoded as {first}: the sign bit of scales is not read",
        lambda x: _decoded(x, q, q, keep=SIGN - 1),
    )
    yield WrongCast(
        f"has its {second} blocks decoded as {first} with negative scales: the bit that chooses is "
        "taken as a sign",
        lambda x: _decoded(x, q, with_options(q, format=one_grid)),
    )
    if (unit := fmt.grids[1].unit) != 1:
        plain = replace(fmt, grids=(fmt.grids[0], replace(fmt.grids[1], unit=1.0)))
        yield WrongCast(
            f"has its {second} blocks decoded without the factor {unit:.4g}",
            lambda x: _decoded(x, q, with_options(q, format=plain)),
        )


def _worse(x: Floats, q: QuantizerSettings, fmt: ChoosingFormat) -> Floats:
    first, second = (
        define(x, with_options(q, format=replace(fmt, grids=(grid, grid), signed=False)))
        for grid in fmt.grids
    )
    return np.where(define(x, q) == first, second, first)


def _decoded(x: Floats, q: QuantizerSettings, read: QuantizerSettings, keep: int = 255) -> Floats:
    """Encode in one way, and decode in another one, with some bits of each scale."""
    encoded = encode_tensor(torch.from_numpy(x).float(), q, "error")
    assert encoded.scales is not None
    values = replace(encoded, quantizer=read, scales=encoded.scales & keep).decode(torch.float64)
    return values.numpy()
