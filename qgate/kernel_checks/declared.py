"""Declared quantization of arguments and results: a format, a quantizer, a convention, code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.expected.conventions import MSE, Convention, conventions, definition_of
from qgate.expected.noise import Expected
from qgate.expected.stages import StageCast
from qgate.formats import Encoded, Quantizer
from qgate.formats.encoded import encode_tensor
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings
from qgate.stats.bits import short_name

Declared = str | Quantizer | Convention | Encoded | Callable[[Tensor], Tensor]
"""A format's name (any convention of it), a quantizer, one convention, or code that quantizes."""


@dataclass(frozen=True)
class Quantization:
    """The conventions that one tensor may follow, the definition first."""

    name: str
    choices: tuple[Convention, ...]
    quantizer: QuantizerSettings | None = None
    is_packed: bool = False

    def ideal(self, x: Tensor, choice: int = 0) -> Tensor:
        """Quantize by one of the conventions; the values in float64, on the tensor's device."""
        return from_array(self.choices[choice](to_array(x)), x) if x.numel() else x.double()

    def alternatives(self, x: Tensor, choice: int) -> tuple[Tensor, Tensor]:
        """Return the values that codes within noise of a rounding boundary may have."""
        if not x.numel():
            return x.double(), x.double()
        lower, upper = self.choices[choice].alternatives(to_array(x))
        return from_array(lower, x), from_array(upper, x)

    def scales(self, x: Any, choice: int = 0) -> Tensor | None:
        """Return the scale of each element, None where elements are not codes times scales."""
        if isinstance(x, Encoded):
            return element_scales(x)
        of = self.choices[choice].scales
        return None if of is None or not x.numel() else from_array(of(to_array(x)), x)

    def cast(self, choice: int = 0) -> StageCast:
        """Return one of the conventions as the cast of a stage."""
        return StageCast(lambda x: self.ideal(x, choice), lambda x: self.scales(x, choice))

    def expected(self, expected: Expected, choice: int) -> Expected:
        """Quantize expected values; where noise may decide a code, both codes are within bounds."""
        values = expected.values
        ideal = self.ideal(values, choice)
        sign = torch.where(values < 0, -1.0, 1.0)
        noise = expected.width
        codes = [
            self.ideal(values + sign * noise, choice),
            self.ideal(values - sign * noise, choice),
            *self.alternatives(values, choice),
        ]
        stacked = torch.stack([ideal, *codes])
        # A product of a code and its scale is rounded once more; scales are made from noisy values.
        has_rows = values.dim() and values.numel()
        largest = values.abs().amax(-1, keepdim=True) if has_rows else values.abs()
        share = noise / largest.clamp_min(torch.finfo(torch.float64).tiny)
        share = share.nan_to_num(0.0, 0.0, 0.0)
        share = share.amax(-1, keepdim=True) if has_rows else share
        rounding = ideal.abs() * (share + 2.0**-22)
        low, high = stacked.amin(0) - rounding, stacked.amax(0) + rounding
        return Expected(ideal, low, high, sigma=expected.sigma)

    def pack(self, x: Tensor) -> Encoded:
        """Encode values for a kernel that takes its argument packed."""
        assert self.quantizer is not None
        return encode_tensor(x.float(), self.quantizer, "zero")

    @property
    def has_nan(self) -> bool:
        fmt = None if self.quantizer is None else self.quantizer.format
        return fmt is not None and (fmt.kind == "block" or fmt.nan_code is not None)

    @property
    def follows_magnitude(self) -> bool:
        """True if scales are made from the values, so that no magnitude is too large."""
        q = self.quantizer
        return q is not None and q.granularity is not None and q.scale is None

    @property
    def step(self) -> int:
        """Elements that share a scale along one axis."""
        q = self.quantizer
        if q is None or q.granularity != "block":
            return 1
        return q.block if q.tile is None else max(q.tile)


def declare(
    declared: Any, position: str, dtype: torch.dtype, convention: str | None = None
) -> Quantization:
    """Settle what was declared for an argument or a result; ValueError names the position."""
    if isinstance(declared, Encoded):
        q = declared.quantizer
        return Quantization(q.format.name, (definition_of(q),), q, is_packed=True)
    if isinstance(declared, Convention):
        return Quantization(declared.name, (declared,))
    if isinstance(declared, str):
        try:
            declared = Quantizer(declared)
        except QgateError as error:
            raise ValueError(f"{position}: {error}") from None
    if isinstance(declared, Quantizer):
        if declared.rounding == "stochastic":
            raise ValueError(
                f"{position} is {declared!r}: one tensor that was rounded at random has no expected"
                " value; give the function that rounds to check_kernel(cast, x, like=lambda x: x, "
                "output=…), which runs it with several seeds."
            )
        listed = conventions(declared, short_name(dtype), orders=True)
        return Quantization(declared.format.name, _chosen(listed, convention, position), declared)
    if callable(declared):
        name = getattr(declared, "__name__", type(declared).__name__)
        return Quantization(name, (Convention(name, _from_function(declared)),))
    raise ValueError(
        f"{position} is declared as {declared!r}; allowed are a format's name, a qgate.Quantizer, "
        "a convention, or a function from a tensor to its quantized values."
    )


def by_position(
    inputs: Mapping[int, Any] | Sequence[Any] | None, arguments: Sequence[Any]
) -> dict[int, Any]:
    """Return declared formats by position; a list has one for each argument, None for no format."""
    if inputs is None or isinstance(inputs, Mapping):
        return dict(inputs or {})
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise ValueError(
            f"inputs is {inputs!r}; give a dict, position to format, or a list with a format or "
            "None for each argument."
        )
    if len(inputs) > len(arguments):
        raise ValueError(
            f"inputs lists {len(inputs)} formats for {len(arguments)} arguments; give one for "
            "each, None where the kernel quantizes nothing."
        )
    return {position: value for position, value in enumerate(inputs) if value is not None}


def _chosen(
    listed: list[Convention], convention: str | None, position: str
) -> tuple[Convention, ...]:
    """Return all conventions, or those whose name holds the words that were asked for."""
    if convention is None or convention == MSE:
        return tuple(listed)
    matching = [choice for choice in listed if convention in choice.name]
    if not matching:
        names = ", ".join(repr(choice.name) for choice in listed)
        raise ValueError(
            f"{position} has no convention {convention!r}; there are {names} and {MSE!r}."
        )
    return tuple(matching)


def _from_function(function: Callable[[Tensor], Tensor]) -> Callable[[Floats, float], Floats]:
    def values(x: Floats, _nudge: float) -> Floats:
        return to_array(function(torch.from_numpy(x).float()))

    return values


def element_scales(encoded: Encoded) -> Tensor:
    """Return the scale that each element's code is multiplied with."""
    element = encoded.quantizer.format.element
    largest = element.max if element.is_codebook else 1.0
    plain = QuantizerSettings(element, {"scale": 1.0})
    codes = encode_tensor(torch.full(encoded.codes.shape, largest), plain, "zero").codes
    return replace(encoded, codes=codes.to(encoded.codes)).decode(torch.float64) / codes.new_tensor(
        largest, dtype=torch.float64
    )


def to_array(x: Tensor) -> Floats:
    """Return a tensor's values as float64."""
    return np.asarray(x.detach().double().cpu().numpy())


def from_array(values: Floats, like: Tensor) -> Tensor:
    """Return values as a float64 tensor on the device of another."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
