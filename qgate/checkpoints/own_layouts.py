"""Layouts of one's own: a file names the tensors of weights and how their codes are packed.

Each entry of `[[weights]]` is one layout; `*` in a name stands for the module. A Python file of the
user's own has a function `layout` that returns the same.
"""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qgate.checkpoints.grids import FP4_UNIT, QuantizedWeight, as_rows, decode_e8m0, fp4_values
from qgate.checkpoints.recipe_files import ELEMENTS, recipe_of
from qgate.checkpoints.recipes import Recipe, own_method
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.tiles import Tile, counts
from qgate.checkpoints.weight_parts import MisfitError, Packing, Parts, StoredWeight
from qgate.errors import QgateError, unknown
from qgate.interruptions import raise_interruption, raised_by_users
from qgate.storage.documents import read_document
from qgate.storage.locations import user_location
from qgate.text import one_line, shortened

KINDS = (".toml", ".yaml", ".json")
NAMES = ("codes", "scales", "zero_points", "offsets", "whole_scale")
"""Keys whose values are patterns of the tensors of a weight."""
CHOICES: Mapping[str, tuple[object, ...]] = {
    "format": ELEMENTS,
    "packing": ("none", "low first", "high first"),
    "packed_along": ("inputs", "outputs"),
    "zero_points_packed_along": ("none", "inputs", "outputs"),
    "interleaved": (True, False),
    "transposed": (True, False),
    "scales_transposed": (True, False),
    "scales_divide": (True, False),
    "whole_scale_divides": (True, False),
}
NUMBERS = ("code_offset", "zero_point_offset")
KEYS = (*NAMES, "weight", "unused", *CHOICES, *NUMBERS, "order", "group")
_SHOWN = 4

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class OwnLayout:
    """The layout of the weights whose tensors have names of these patterns.

    names    the pattern of each tensor of a weight, by what it holds
    weight   the pattern of the parent's names
    unused   patterns of tensors beside them that hold no values of weights
    """

    names: Mapping[str, str]
    weight: str
    unused: tuple[str, ...]
    codes: CodeLayout

    def stems(self, checkpoint: Checkpoint) -> list[str]:
        """List the modules that have codes of this layout."""
        return _stems(self.names["codes"], checkpoint)


@dataclass(frozen=True)
class LayoutFile:
    """A file of layouts."""

    path: str
    layouts: tuple[OwnLayout, ...]

    def weights(self, checkpoint: Checkpoint) -> Iterator[StoredWeight]:
        """Group the tensors that the layouts name into weights."""
        for layout in self.layouts:
            for stem in layout.stems(checkpoint):
                yield _weight(layout, stem, checkpoint.entries)

    def unused(self, checkpoint: Checkpoint) -> set[str]:
        """List the tensors that hold no values of weights."""
        patterns = [pattern for layout in self.layouts for pattern in layout.unused]
        return {
            name
            for pattern in patterns
            for name in (_filled(pattern, stem) for stem in _stems(pattern, checkpoint))
        }

    def check(self, *checkpoints: Checkpoint) -> None:
        """Refuse a layout that fits no tensor."""
        for layout in self.layouts:
            if not any(layout.stems(checkpoint) for checkpoint in checkpoints):
                names = [shortened(one_line(name)) for name in checkpoints[0].entries]
                more = ", …" if len(names) > _SHOWN else ""
                raise QgateError(
                    f"no tensor of {checkpoints[0].label!r} has a name like "
                    f"{layout.names['codes']!r}; it has {', '.join(names[:_SHOWN])}{more}. Correct "
                    f"codes in {self.path!r}."
                )


def _stems(pattern: str, checkpoint: Checkpoint) -> list[str]:
    expression = re.compile("(.*)".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    matches = (expression.fullmatch(name) for name in checkpoint.entries)
    return [match[1] for match in matches if match]


def _filled(pattern: str, stem: str) -> str:
    return pattern.replace("*", stem)


def _weight(layout: OwnLayout, stem: str, entries: Mapping[str, StoredEntry]) -> StoredWeight:
    names = {role: _filled(pattern, stem) for role, pattern in layout.names.items()}
    parts = {role: entries[name] for role, name in names.items() if name in entries}
    missing = tuple(name.removeprefix(f"{stem}.") for name in names.values() if name not in entries)
    codes = layout.codes
    together = [role for role in parts if role != "whole_scale"]
    by_columns = [role for role in together if codes.is_turned(role)]
    packing = Packing(
        f"the layout of {layout.names['codes']}",
        partial(decode_own, codes),
        by_rows=tuple(role for role in together if role not in by_columns),
        by_columns=tuple(by_columns),
        count_rows=lambda _, stored: codes.rows_of(stored["codes"].shape),
    )
    return StoredWeight(_filled(layout.weight, stem), packing, parts, missing)


def with_layout(
    recipe_file: str | None, layout_file: str | None, *checkpoints: Checkpoint
) -> list[Recipe]:
    """Give checkpoints the layout of a file, and return their recipes.

    The layout describes what a method of one's own means.
    """
    if layout_file is not None:
        layouts = read_layouts(layout_file)
        layouts.check(*checkpoints)
        for checkpoint in checkpoints:
            checkpoint.layout = layouts
    return [
        Recipe()
        if recipe_file is None and layout_file is not None and own_method(checkpoint.configuration)
        else recipe_of(checkpoint.label, checkpoint.configuration, recipe_file)
        for checkpoint in checkpoints
    ]


# Files --------------------------------------------------------------------------------------------


def read_layouts(path: str) -> LayoutFile:
    """Read layouts from a file; one clear error for what cannot be one."""
    try:
        if path.endswith(".py"):
            document = _returned_tables(path)
        else:
            document = read_document(user_location(path), "layout", KINDS)
        if extra := [key for key in document if key != "weights"]:
            raise ValueError(
                f"the key {extra[0]!r} is unknown; a layout file has [[weights]] alone"
            )
        entries = document.get("weights")
        if not isinstance(entries, list) or not entries:
            raise ValueError("it has no [[weights]]: give codes, scales and format of one layout")
        return LayoutFile(path, tuple(_layout(entry) for entry in entries))
    except ValueError as error:
        raise QgateError(f"the layout {path!r} cannot be used: {error}.") from None


def _returned_tables(path: str) -> Mapping[str, object]:
    """Return what the function `layout` of a Python file on this machine returns."""
    file = Path(path).expanduser()
    if not file.is_file():  # a pipe would wait, and a device never end
        raise QgateError(f"the layout {path!r} is no file: give one that has a function layout().")
    try:
        function = runpy.run_path(str(file)).get("layout")
        tables = function() if callable(function) else None
    except raised_by_users() as error:
        raise_interruption()
        words = one_line(f"{type(error).__name__}: {error}")
        raise QgateError(f"the layout {path!r} cannot be run: {words}.") from error
    if not callable(function):
        raise ValueError("it has no function layout() that returns [[weights]]")
    if not isinstance(tables, Mapping):
        raise ValueError(
            f"its function layout returns {type(tables).__name__} and not keys with values"
        )
    return tables


def _layout(entry: object) -> OwnLayout:
    if not isinstance(entry, Mapping):
        raise ValueError(f"[[weights]] has {entry!r}, and not keys with values")
    for key in entry:
        if key not in KEYS:
            raise ValueError(str(unknown("key", key, KEYS)).rstrip("."))
    for key in ("codes", "scales", "format"):
        if key not in entry:
            raise ValueError(f"[[weights]] has no {key}; codes, scales and format are needed")
    for key, allowed in CHOICES.items():
        if key in entry and entry[key] not in allowed:
            texts = ", ".join(map(_toml_text, allowed))
            raise ValueError(f"{key} is {entry[key]!r}; {texts} are allowed")
    names = {key: _pattern(key, entry[key]) for key in NAMES if key in entry}
    unused = entry.get("unused", [])
    if not isinstance(unused, list):
        raise ValueError(f"unused is {unused!r}, and not a list of names")
    return OwnLayout(
        names,
        _pattern("weight", entry.get("weight", "*.weight")),
        tuple(_pattern("unused", name) for name in unused),
        _code_layout(entry),
    )


def _toml_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pattern(key: str, value: object) -> str:
    if not isinstance(value, str) or value.count("*") != 1:
        raise ValueError(
            f"{key} is {value!r}; give a name with one * for the module, such as *.W_q"
        )
    return value


def _code_layout(entry: Mapping[str, object]) -> CodeLayout:
    form = str(entry["format"])
    bits = int(re.findall(r"\d+", form)[0])
    offsets = [entry.get(key, 0) for key in NUMBERS]
    for key, value in zip(NUMBERS, offsets, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 1 << 8:
            raise ValueError(f"{key} is {value!r}, and not a whole number of up to 256")
    packing = str(entry.get("packing", "none"))
    order = entry.get("order")
    places = [n for n in order if isinstance(n, int)] if isinstance(order, list) else []
    if order is not None:
        is_list = isinstance(order, list) and len(places) == len(order)
        if not is_list or sorted(places) != list(range(len(places))) or len(places) * bits > 64:
            raise ValueError(
                f"order is {order!r}; give the place in a word of each code, such as "
                "[0, 4, 1, 5, 2, 6, 3, 7]"
            )
        if packing != "none":
            raise ValueError(f"order and packing {packing!r} exclude each other")
    if bits == 8 and (packing != "none" or order is not None):
        raise ValueError(f"{form} takes a byte each, and packing is {packing!r}")
    if "offsets" in entry and "zero_points" in entry:
        raise ValueError("offsets and zero_points exclude each other")
    flags = {key: bool(entry[key]) for key in CHOICES if entry.get(key) in (True, False)}
    flags.setdefault("scales_transposed", flags.get("transposed", False))
    return CodeLayout(
        form,
        bits,
        _group(entry.get("group")),
        packing=packing,
        order=tuple(places),
        packed_along=str(entry.get("packed_along", "inputs")),
        zero_points_packed_along=str(entry.get("zero_points_packed_along", "none")),
        code_offset=int(str(offsets[0])),
        zero_point_offset=int(str(offsets[1])),
        **flags,
    )


def _group(group: object) -> tuple[int | None, int | None] | None:
    """Return rows and columns that share a scale, None for all; None where shapes tell."""
    named: dict[object, tuple[int | None, int | None]] = {"row": (1, None), "tensor": (None, None)}
    if group is None:
        return None
    if isinstance(group, str) and group in named:
        return named[group]
    sides = group if isinstance(group, list) else [1, group]
    lengths = [n for n in sides if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    if len(sides) != 2 or len(lengths) != 2:
        raise ValueError(
            f'group is {group!r}; give the columns that share a scale, [rows, columns], "row" or '
            '"tensor"'
        )
    return lengths[0], lengths[1]


@dataclass(frozen=True)
class CodeLayout:
    """Rules by which the codes and scales of a weight are stored.

    format        of one code
    group         rows and columns that share a scale (None: all); None where the scales tell
    packing       "low first" or "high first": several codes in a word; "none": one each
    order         the place in a word of each code, instead of `packing`
    packed_along  the axis of the weight that has several codes in a word
    interleaved   neighbors share a word; else the codes of a word lie a share of the axis apart
    transposed    codes are stored as inputs x outputs
    code_offset   is subtracted from codes: 8 for offset binary of 4 bits
    zero_point_offset   is added to zero points
    """

    format: str
    bits: int
    group: tuple[int | None, int | None] | None = None
    packing: str = "none"
    order: tuple[int, ...] = ()
    packed_along: str = "inputs"
    zero_points_packed_along: str = "none"
    code_offset: int = 0
    zero_point_offset: int = 0
    interleaved: bool = True
    transposed: bool = False
    scales_transposed: bool = False
    scales_divide: bool = False
    whole_scale_divides: bool = False

    @property
    def is_packed(self) -> bool:
        return bool(self.order) or self.packing != "none"

    def is_turned(self, role: str) -> bool:
        """Return True for a tensor that is stored as inputs x outputs."""
        return self.transposed if role == "codes" else self.scales_transposed

    def rows_of(self, shape: tuple[int, ...]) -> int:
        """Return the rows of a weight that can be decoded some rows at a time; else 0."""
        if len(shape) != 2 or (self.is_packed and self.packed_along == "outputs"):
            return 0
        return shape[1] if self.transposed else shape[0]

    def positions(self, word_bits: int) -> tuple[int, ...]:
        """Return the place in a word of each code."""
        if self.order:
            return self.order
        places = tuple(range(word_bits // self.bits))
        return places if self.packing == "low first" else places[::-1]


def decode_own(layout: CodeLayout, parts: Parts) -> QuantizedWeight:
    """Decode the tensors of a weight, or some rows of them."""
    codes = _in_rows(parts["codes"], turned=layout.transposed)
    if layout.is_packed:
        codes = _unpacked(codes, layout, layout.packed_along)
    elements = _elements(codes, layout)
    rows, columns = elements.shape
    stored = _in_rows(parts["scales"], turned=layout.scales_transposed)
    scales, tile = _in_tiles("scales", _scale_values(stored), layout, parts, (rows, columns))
    if layout.scales_divide:
        scales = 1 / scales
    whole = parts.get("whole_scale")
    if whole is not None:
        factor = whole.float().reshape(-1)[0]
        scales = scales / factor if layout.whole_scale_divides else scales * factor
    has_codes = stored.dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
    stored = stored.view(torch.uint8) if stored.dtype == torch.float8_e8m0fnu else stored
    return QuantizedWeight(
        layout.format,
        elements,
        scales,
        tile,
        _zero_points(layout, parts, scales, (rows, columns)),
        scale_codes=stored.reshape(scales.shape) if has_codes else None,
        unit=FP4_UNIT if layout.format == "fp4_e2m1" else 1.0,
    )


def _in_rows(x: Tensor, *, turned: bool) -> Tensor:
    """View a tensor as rows; of several stacked matrices, one below the other."""
    return as_rows(x.transpose(-1, -2).contiguous() if turned and x.dim() > 1 else x)


def _unpacked(words: Tensor, layout: CodeLayout, along: str) -> Tensor:
    """Return the codes of words along the inputs or the outputs of a weight."""
    if words.is_floating_point():
        raise MisfitError(f"its codes are {words.dtype}, and no words that hold codes")
    words = words.T if along == "outputs" else words
    positions = layout.positions(8 * words.dtype.itemsize)
    mask = (1 << layout.bits) - 1
    codes = [(words >> layout.bits * place & mask).to(torch.uint8) for place in positions]
    axis = 2 if layout.interleaved else 1
    unpacked = torch.stack(codes, axis).reshape(len(words), -1)
    return unpacked.T.contiguous() if along == "outputs" else unpacked


def _elements(codes: Tensor, layout: CodeLayout) -> Tensor:
    """Return what codes stand for: integers, or values of a small float."""
    if layout.format in FP8:
        if codes.dtype not in (FP8[layout.format], torch.uint8, torch.int8):
            raise MisfitError(f"its codes are {codes.dtype}, and {layout.format} is declared")
        return codes.view(FP8[layout.format])
    if codes.is_floating_point():
        raise MisfitError(f"its codes are {codes.dtype}, and {layout.format} is declared")
    if layout.format == "fp4_e2m1":
        return fp4_values(codes.to(torch.uint8))
    is_signed = layout.format.startswith("int")
    half = 1 << (layout.bits - 1)
    numbers = codes.to(torch.int16)
    if layout.code_offset:
        numbers = numbers - layout.code_offset
    elif is_signed and (layout.is_packed or codes.dtype == torch.uint8):
        numbers = (numbers ^ half) - half
    low, high = (-half, half - 1) if is_signed else (0, 2 * half - 1)
    if numbers.numel() and not low <= int(numbers.min()) <= int(numbers.max()) <= high:
        least, most = int(numbers.min()), int(numbers.max())
        raise MisfitError(
            f"its codes are {least} to {most}, and {layout.format} has {low} to {high}: correct "
            "packing, code_offset or format in the layout"
        )
    return numbers.to(torch.int8 if is_signed else torch.uint8)


def _scale_values(stored: Tensor) -> Tensor:
    """Return scales as numbers; bytes are exponents of two."""
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return decode_e8m0(stored.view(torch.uint8))
    return stored.float()


def _in_tiles(
    role: str, values: Tensor, layout: CodeLayout, parts: Parts, shape: tuple[int, int]
) -> tuple[Tensor, Tile]:
    """Return numbers of tiles as rows of tiles, and the tile."""
    rows, columns = shape
    if layout.group is None:
        return parts.fit_tile(role, values, shape)
    tile = layout.group[0] or parts.rows or rows, layout.group[1] or columns
    needed = counts(parts.rows or rows, columns, tile)
    whole = tuple(parts.shapes.get(role, values.shape))
    if math.prod(whole) != math.prod(needed):
        raise MisfitError(
            f"its {role} have shape {whole}, and groups of {tile[0]} x {tile[1]} in a weight of "
            f"{parts.rows or rows} x {columns} are {needed[0]} x {needed[1]}"
        )
    return values.reshape(-1, needed[1]), tile


def _zero_points(
    layout: CodeLayout, parts: Parts, scales: Tensor, shape: tuple[int, int]
) -> Tensor | None:
    """Return zero points in units of codes; numbers that are added to values are some, too."""
    added = parts.get("offsets")
    if added is not None:
        values = _in_rows(added.float(), turned=layout.scales_transposed)
        return -_in_tiles("offsets", values, layout, parts, shape)[0] / scales
    zeros = parts.get("zero_points")
    if zeros is None:
        return None
    zeros = _in_rows(zeros, turned=layout.scales_transposed)
    if layout.zero_points_packed_along != "none":
        zeros = _unpacked(zeros, layout, layout.zero_points_packed_along)
        values = zeros.float() + layout.zero_point_offset
        return values.reshape(scales.shape)
    values = zeros.float() + layout.zero_point_offset
    return _in_tiles("zero_points", values, layout, parts, shape)[0]
