"""Recipes as files: what was meant, where a checkpoint does not say it, and what a checkpoint is.

A file has `targets`, patterns of modules with the formats of their weights, and `ignore`, patterns
of modules that stay in high precision. Formats have the names that qgate has for them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from qgate.checkpoints.accounting import is_skipped
from qgate.checkpoints.recipes import DeclaredFormat, Recipe, RecipeGroup, Settings, read_recipe
from qgate.checkpoints.record import CheckpointRecord, RecipeEntry, WrittenRecipe
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.errors import QgateError, unknown
from qgate.storage.documents import read_document
from qgate.storage.locations import user_location

KINDS = (".yaml", ".yml", ".toml", ".json")
BLOCK_FORMATS: Mapping[str, DeclaredFormat] = {
    "nvfp4": DeclaredFormat("fp4_e2m1", (1, 16)),
    "mxfp4_e2m1": DeclaredFormat("fp4_e2m1", (1, 32)),
    "mxfp8_e4m3": DeclaredFormat("fp8_e4m3", (1, 32)),
    "mxfp8_e5m2": DeclaredFormat("fp8_e5m2", (1, 32)),
}
"""Formats with blocks of their own."""
ELEMENTS = (
    "int8", "int4", "int3", "int2", "uint8", "uint4", "uint3", "uint2", "fp8_e4m3", "fp8_e5m2",
    "fp4_e2m1",
)  # fmt: skip
"""Elements that share scales as an entry says."""
ENTRY_KEYS = ("format", "granularity", "block", "zero_points")
METHOD = "a recipe file"


def recipe_of(label: str, configuration: Settings, file: str | None) -> Recipe:
    """Return the recipe in a file, or without one that which a checkpoint declares."""
    return read_recipe(label, configuration) if file is None else read_recipe_file(file)


def read_recipe_file(path: str) -> Recipe:
    """Read a recipe from a .yaml, .toml or .json file."""
    document = read_document(user_location(path), "recipe", KINDS)
    try:
        return parse_recipe(document)
    except ValueError as error:
        raise QgateError(f"the recipe {path!r} cannot be used: {error}.") from None


def parse_recipe(document: Mapping[Any, Any]) -> Recipe:
    """Check the entries of a recipe."""
    if extra := [key for key in document if key not in ("targets", "ignore")]:
        raise ValueError(f"the key {extra[0]!r} is unknown; a recipe file has targets and ignore")
    targets, ignore = document.get("targets"), document.get("ignore", [])
    if not isinstance(targets, Mapping) or not targets:
        raise ValueError(
            "it names no targets; give patterns of modules with formats, such as "
            "targets: {Linear: nvfp4}"
        )
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        raise ValueError(f"ignore is {ignore!r}, and not a list of patterns")
    groups = tuple(RecipeGroup((str(t),), _format(str(t), entry)) for t, entry in targets.items())
    for pattern in (*targets, *ignore):
        _check_pattern(str(pattern))
    bits = {_bits(group.format.element) for group in groups} - {0}
    return Recipe(METHOD, groups, tuple(ignore), bits.pop() if len(bits) == 1 else 0)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _bits(element: str) -> int:
    return int(element[-1]) if element.startswith(("int", "uint")) else 0


def _format(target: str, entry: object) -> DeclaredFormat:
    """Return the format of one target: a name, or a name with what shares a scale."""
    entry = {"format": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping) or "format" not in entry:
        raise ValueError(f"{target!r} is {entry!r}, and not a format")
    if extra := [key for key in entry if key not in ENTRY_KEYS]:
        raise ValueError(f"{target!r} has {extra[0]!r}; {', '.join(ENTRY_KEYS)} are known")
    name, granularity, block = (entry.get(key) for key in ENTRY_KEYS[:3])
    if name in BLOCK_FORMATS:
        if len(entry) > 1:
            raise ValueError(f"{target!r} has {name}, whose blocks are those of the format")
        return BLOCK_FORMATS[str(name)]
    if name not in ELEMENTS:
        allowed = [*BLOCK_FORMATS, *ELEMENTS]
        raise ValueError(f"{target!r}: {unknown('format', name, allowed)}".rstrip("."))
    zeros = entry.get("zero_points", str(name).startswith("uint"))
    if not isinstance(zeros, bool):
        raise ValueError(f"{target!r}: zero_points is {zeros!r}, and not true or false")
    return DeclaredFormat(str(name), _tile(target, granularity, block), zeros)


def _tile(target: str, granularity: object, block: object) -> tuple[int | None, int | None]:
    """Return rows and columns that share a scale, from words as quantizers have them."""
    if granularity is None:
        granularity = "tensor" if block is None else "block"
    if granularity in ("tensor", "channel"):
        if block is not None:
            raise ValueError(f"{target!r}: block needs granularity block, not {granularity}")
        return (None, None) if granularity == "tensor" else (1, None)
    if granularity != "block":
        raise ValueError(
            f"{target!r}: granularity is {granularity!r}; tensor, channel and block are known"
        )
    sides = block if isinstance(block, list) else [1, block]
    lengths = [n for n in sides if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    if len(sides) != 2 or len(lengths) != 2:
        raise ValueError(
            f"{target!r}: block is {block!r}; give the columns of a group, or rows and columns"
        )
    return lengths[0], lengths[1]


# Written out --------------------------------------------------------------------------------------


def write_out(
    record: CheckpointRecord, declared: Recipe, weights: list[StoredWeight]
) -> WrittenRecipe:
    """Return the recipe that a checkpoint has, in the form of a file.

    Declared patterns of what to ignore stay; modules without one are listed.
    """
    entries: dict[str, RecipeEntry] = {}
    formats: dict[str, str] = {}
    for weight in record.weights:
        if weight.stored is not None and weight.outcome == "quantized":
            module = weight.name.removesuffix(".weight")
            entries[module], formats[module] = _entry(weight.stored), weight.format
    if not entries:
        return {}
    general, _ = Counter(formats.values()).most_common(1)[0]
    targets: dict[str, RecipeEntry] = {}
    for module, form in formats.items():
        target = "Linear" if form == general else _pattern(module, form, formats)
        targets.setdefault(target, entries[module])
    recipe: WrittenRecipe = {"targets": dict(sorted(targets.items()))}
    recipe["ignore"] = list(declared.ignore)
    left_out = [w.name.removesuffix(".weight") for w in weights if is_skipped(w, _parsed(recipe))]
    return recipe | {"ignore": [*declared.ignore, *left_out]}


def _parsed(recipe: Mapping[Any, Any]) -> Recipe:
    """Parse a recipe that was written out; nothing of a format that files cannot name."""
    try:
        return parse_recipe(recipe)
    except ValueError:
        return Recipe()


def _entry(form: DeclaredFormat) -> RecipeEntry:
    for name, block_format in BLOCK_FORMATS.items():
        if form == block_format:
            return name
    rows, columns = form.tile
    entry: dict[str, str | int | list[int]] = {"format": form.element}
    if rows is None or columns is None:
        entry["granularity"] = "tensor" if rows is None else "channel"
    else:
        entry["block"] = columns if rows == 1 else [rows, columns]
    if form.has_zero_points != form.element.startswith("uint"):
        entry["zero_points"] = form.has_zero_points
    return entry


def _pattern(module: str, form: str, formats: Mapping[str, str]) -> str:
    """Return a pattern for the same module of all layers where all have one format."""
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", module)
    alike = re.compile(".*".join(map(re.escape, pattern.split("*"))))
    return pattern if all(f == form for m, f in formats.items() if alike.fullmatch(m)) else module
