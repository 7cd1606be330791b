"""The options of a quantizer, checked and completed with the format's defaults."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, get_args

from qgate.errors import QgateError, unknown
from qgate.formats._block import Format
from qgate.formats._work import ChunkDraws
from qgate.formats.options import (
    ROUNDINGS,
    SCALE_RULES,
    CastOptions,
    Granularity,
    InfPolicy,
    SaturatedGrad,
    ZeroPoint,
)
from qgate.loading import LateModule

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.formats import groups as listed_groups
else:
    listed_groups = LateModule("qgate.formats.groups")

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_EVERYWHERE = frozenset({"dtype", "rotation", "saturated_grad"})
_ELEMENT_BLOCK = 128


class QuantizerSettings(CastOptions):
    """A format with all options of a quantizer; `Quantizer` explains them."""

    def __init__(self, fmt: Format, options: Mapping[str, Any]) -> None:
        """Check options that are not None; omitted ones get the format's default."""
        _check_names(fmt, options)
        check_choice("rounding", options.get("rounding"), ROUNDINGS)
        check_choice("scale rule", options.get("scale_rule"), SCALE_RULES)
        check_choice("granularity", options.get("granularity"), get_args(Granularity))
        check_choice("inf policy", options.get("inf"), get_args(InfPolicy))
        check_choice("saturated_grad", options.get("saturated_grad"), get_args(SaturatedGrad))
        for name in ("saturate", "narrow"):
            if not isinstance(options.get(name, True), bool):
                raise TypeError(f"{name} is True or False, not {options[name]!r}.")
        if options.get("groups") is not None:
            options = {**options, "groups": listed_groups.as_groups(options["groups"])}
        self.format = fmt
        self.options = options
        self.groups = options.get("groups")
        self.scale = _checked_scale(options.get("scale"))
        self.granularity: Granularity | None = options.get("granularity") or self._own_granularity()
        self.axis = _whole("axis", options.get("axis"), None)
        self.tile = _checked_tile(options.get("block"))
        whole = math.prod(self.tile) if self.tile else _whole("block", options.get("block"), 1)
        self.block = whole or fmt.block or _ELEMENT_BLOCK
        self.scale_rule = options.get("scale_rule", fmt.default_rule)
        self.scale_bits = _whole("scale_bits", options.get("scale_bits"), 2, 8) or 8
        self.rounding = options.get("rounding", fmt.rounding)
        self.saturate = options.get("saturate", True)
        self.inf = options.get("inf", "nan")
        self.zero_point = self._checked_zero_point(options.get("zero_point"))
        self.narrow = options.get("narrow", self.zero_point is None)
        self.generator = options.get("generator")
        self.rotation = _checked_rotation(options.get("rotation"))
        self.dtype = options.get("dtype")
        self.saturated_grad: SaturatedGrad = options.get("saturated_grad", "zero")
        # Options that passed their check on a device, where the host would wait for each answer:
        # by name and whether for float64, the value and its number of changes.
        self.checked: dict[tuple[str, bool], tuple[object, int]] = {}
        self._check_together(options)

    def _own_granularity(self) -> Granularity | None:
        if self.format.kind == "block":
            return "block"
        if self.groups is not None:
            return "groups"
        return "tensor" if self.scale is not None or self.format.always_scaled else None

    def _checked_zero_point(self, given: Any) -> Any:
        """Return "minmax", a number, a tensor, or None for codes that are the integers."""
        if given is None:
            fits = self.format.kind == "element" and not self.format.signed
            own = "zero_point" in self.format.options and self.scale is None
            return "minmax" if fits and own else None
        if isinstance(given, str):
            check_choice("zero point", given, get_args(ZeroPoint))
            if self.scale is not None:
                raise QgateError(
                    "zero_point='minmax' makes the scale too; leave out scale, or give the zero "
                    "point as a number."
                )
            return given
        if self.scale is None:
            raise QgateError(
                f"zero_point={_shape_or_value(given)} needs scale=…, one for each zero point."
            )
        is_tensor = hasattr(given, "dim")
        return given if is_tensor else _whole("zero_point", given, *self._codes())

    def _codes(self) -> tuple[int, int]:
        low, high = self.format.element.bounds(narrow=False)
        return int(low), int(high)

    def _check_together(self, options: Mapping[str, Any]) -> None:
        name = self.format.name
        if self.tile is not None and self.axis is not None:
            raise QgateError(
                f"axis={self.axis} is for blocks along one axis; tiles of {self.block_words} lie "
                "over the last two. Leave axis out."
            )
        if self.tile is not None and self.format.kind == "block" and self.format.by_rows:
            raise QgateError(
                f"{name} has a scale for each row, which tiles of {self.block_words} lie across; "
                "nvfp4 has one for the tensor."
            )
        if self.tile is not None and self.format.kind == "block" and not self.format.takes_tiles:
            raise QgateError(
                f"{name} is scaled by the mean of squares, which zeros that fill up tiles of "
                f"{self.block_words} lower; pass the size of a block along one axis."
            )
        if self.granularity == "channel" and self.axis is None:
            raise QgateError(
                f"granularity 'channel' needs axis=…: which axis of x has {name}'s scales?"
            )
        if (self.groups is None) != (self.granularity != "groups"):
            raise QgateError(
                f"granularity {self.granularity!r} with groups={self.groups!r}: groups= has a "
                "function from rows and columns to numbers of groups; leave granularity out."
            )
        if self.groups is not None and self.format.kind == "element" and self.format.tapered:
            raise QgateError(
                f"{name} takes the better of two scales by the error of whole groups, which lie "
                "along an axis or in tiles; take fp8_e4m3 or int8 with groups."
            )
        if self.format.kind == "element":
            if "axis" in options and self.granularity not in ("channel", "block"):
                raise QgateError(
                    f"axis={self.axis} needs granularity 'channel' or 'block'; pass one of them."
                )
            if "block" in options and self.granularity != "block":
                block = options["block"]
                raise QgateError(f"block={block} needs granularity 'block'; pass it as well.")
            if "inf" in options and (self.granularity is None or self.scale is not None):
                raise QgateError(
                    f"inf={self.inf!r} is for scales that are made from x; pass a granularity and "
                    "no scale."
                )
            if not self.saturate and self.format.nan_code is None:
                raise QgateError(
                    f"{name} has neither Inf nor NaN and always saturates; saturate=False is for "
                    "formats with a code for overflow."
                )
            if "narrow" in options and not self.format.signed:
                raise QgateError(
                    f"narrow={self.narrow} leaves out the lowest code of signed integers; that of "
                    f"{name} is zero. Leave the option out."
                )
        if self.generator is not None and self.rounding != "stochastic":
            raise QgateError(f"a generator needs rounding 'stochastic', not {self.rounding!r}.")
        allowed = [f"torch.{name}" for name in _DTYPES]
        if self.dtype is not None and (
            isinstance(self.dtype, str) or str(self.dtype) not in allowed
        ):
            raise TypeError(f"dtype {self.dtype!r} is not one of {', '.join(allowed)}.")
        if self.generator is not None and not (
            self.is_named or hasattr(self.generator, "initial_seed")
        ):
            raise TypeError(
                f"a generator is a torch.Generator or a Philox(seed), not {self.generator!r}."
            )

    @property
    def is_named(self) -> bool:
        """Tell if it rounds at random by a generator whose draws follow from places."""
        return hasattr(self.generator, "uniform")

    def draws_of(self, x: Tensor) -> Tensor | None:
        """Return the draws of each element where a named generator rounds at random."""
        if self.rounding != "stochastic" or not self.is_named:
            return None
        return self.generator.uniform(tuple(x.shape), x.device)  # type: ignore[no-any-return]

    def drawing(self, draws: Tensor) -> Self:
        """Return the quantizer of a chunk, whose elements have these draws."""
        of_chunk = copy.copy(self)
        of_chunk.generator = ChunkDraws(draws)
        return of_chunk

    @property
    def rotation_axis(self) -> int:
        """The axis that rotated blocks run along: that of blocks with one scale, or the last."""
        along = self.axis if self.granularity == "block" else None
        return -1 if along is None else int(along)

    @property
    def block_words(self) -> str:
        """The size of a block in words: 32, or 16x16."""
        return str(self.block) if self.tile is None else "x".join(map(str, self.tile))

    def deterministic(self) -> Self:
        """Return this quantizer with the format's own rounding in place of a random one."""
        if self.rounding != "stochastic":
            return self
        twin = copy.copy(self)
        twin.rounding, twin.generator = self.format.rounding, None
        return twin

    def axis_of(self, ndim: int) -> int:
        """Return the axis as a number from 0, for a tensor of that many dimensions."""
        axis = -1 if self.axis is None else self.axis
        dims = max(ndim, 1)
        if not -dims <= axis < dims:
            raise QgateError(f"axis {axis} is out of range for a tensor of {ndim} dimensions.")
        return int(axis % dims)

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={_shape_or_value(v)}" for k, v in self.options.items())
        return f"Quantizer({self.format.name}{', ' if options else ''}{options})"


def _check_names(fmt: Format, options: Mapping[str, Any]) -> None:
    allowed = fmt.options | _EVERYWHERE
    if fmt.kind == "block" and options.get("granularity") == "block":
        allowed = allowed | {"granularity"}
    for name in options:
        if name not in allowed:
            raise QgateError(
                f"{fmt.name} has no option {name!r} (given {options[name]!r}); "
                f"it takes {', '.join(sorted(allowed))}."
            )


def check_choice(label: str, choice: object, allowed: tuple[str, ...]) -> None:
    if choice is not None and choice not in allowed:
        raise unknown(label, choice, allowed)


def _whole(name: str, value: Any, low: int | None, high: int | None = None) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is a whole number, not {value!r}.")
    number = value.__index__()
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise QgateError(f"{name} {number} is not allowed; it is {bounds}.")
    return number


def _checked_tile(block: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a tile, None for a block along one axis."""
    if not isinstance(block, tuple | list):
        return None
    if len(block) != 2:
        raise QgateError(
            f"block={block!r} is not allowed; a tile has two numbers, such as (16, 16)."
        )
    return _whole("block", block[0], 1), _whole("block", block[1], 1)


def _checked_rotation(signs: Any) -> tuple[int, ...] | None:
    if signs is None:
        return None
    listed = signs.tolist() if hasattr(signs, "tolist") else signs
    if not isinstance(listed, list | tuple) or not all(sign in (1, -1) for sign in listed):
        raise QgateError(
            f"rotation={_shape_or_value(signs)} is not allowed; it lists signs, 1 or -1."
        )
    if len(listed) < 2 or len(listed) & (len(listed) - 1):
        raise QgateError(f"a rotation of {len(listed)} signs is not allowed; take a power of two.")
    return tuple(int(sign) for sign in listed)


def _checked_scale(scale: Any) -> float | Tensor | None:
    if scale is None or hasattr(scale, "dim"):
        return scale  # type: ignore[no-any-return]
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale is a number or a tensor, not {scale!r}.")
    if isinstance(scale, int):
        scale = float(scale) if abs(scale) < 2**1023 else math.inf
    if not (math.isfinite(scale) and scale > 0):
        raise QgateError(f"scale {scale!r} is not allowed; it is a finite number above zero.")
    return float(scale)


def _shape_or_value(value: object) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"<{'x'.join(map(str, shape)) or 'scalar'}>"
