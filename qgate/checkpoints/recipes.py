"""Recipes that configurations declare: which weights have which format.

Read from `quantization_config` of config.json or from hf_quant_config.json, in the manner of each
library. A method that is not listed here is named, and nothing is guessed from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qgate.checkpoints.gguf.recipes import CONFIGURATION, file_type_name
from qgate.errors import QgateError

Settings = Mapping[str, object]


@dataclass(frozen=True)
class DeclaredFormat:
    """A format of weights: the element, and rows and columns that share a scale (None: all)."""

    element: str
    tile: tuple[int | None, int | None]
    has_zero_points: bool = False

    def __str__(self) -> str:
        rows, columns = self.tile
        if rows is None and columns not in (None, 1):
            shared = f"per {columns} columns"
        elif rows is None or columns is None:
            shared = "per row" if rows else "per column" if columns else "per tensor"
        else:
            shared = f"per {columns}" if rows == 1 else f"in tiles of {rows} x {columns}"
        return f"{self.element} {shared}{' with zero points' if self.has_zero_points else ''}"


@dataclass(frozen=True)
class RecipeGroup:
    """The format of the modules that patterns name."""

    targets: tuple[str, ...]
    format: DeclaredFormat


@dataclass(frozen=True)
class Recipe:
    """A declared recipe.

    method  the library: "compressed-tensors", "gptq", …; empty where nothing is declared
    ignore  patterns of modules that stay in high precision
    bits    of packed integers, where the tensors do not tell
    mix     the mix of types that a GGUF file names
    zero    of all groups, which some kernels take instead of those that are stored; None for none
    has_zeros   it is said that zero points are stored for their values
    """

    method: str = ""
    groups: tuple[RecipeGroup, ...] = ()
    ignore: tuple[str, ...] = ()
    bits: int = 0
    mix: str = ""
    zero: int | None = None
    has_zeros: bool = False

    def ignores(self, module: str) -> bool:
        return any(matches(pattern, module) for pattern in self.ignore)

    def format_of(self, module: str) -> DeclaredFormat | None:
        """Return the format of a module that is a linear layer; the most special target wins."""
        general = None
        for group in self.groups:
            for target in group.targets:
                if target == "Linear":
                    general = group.format
                elif matches(target, module):
                    return group.format
        return general

    def bits_of(self, module: str) -> int:
        """Return the bits of packed integers in a module, 0 where the tensors tell them."""
        declared = self.format_of(module) if self.bits else None
        return self.bits if declared is None else int(re.sub(r"\D", "", declared.element))

    def tile_of(self, module: str) -> tuple[int | None, int | None]:
        """Return rows and columns that share a scale in a module, None where nothing tells."""
        declared = self.format_of(module)
        return (None, None) if declared is None else declared.tile

    def idle_patterns(self, modules: Iterable[str]) -> list[str]:
        """List the patterns of `ignore` that match no module."""
        names = list(modules)
        return [p for p in self.ignore if not any(matches(p, name) for name in names)]


def matches(pattern: str, module: str) -> bool:
    """Match a pattern as the libraries do: `re:` regular expressions, wildcards, names, ends."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


# Methods -----------------------------------------------------------------------------------------


def _compressed_tensors(settings: Settings) -> Recipe:
    groups = []
    for name, group in _settings(settings, "config_groups").items():
        if not isinstance(group, Mapping):
            raise ValueError(f"config_groups has {name!r}: {group!r}")
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            groups.append(RecipeGroup(_texts(group, "targets"), _scheme(weights)))
    return Recipe("compressed-tensors", tuple(groups), _texts(settings, "ignore"))


def _scheme(weights: Settings) -> DeclaredFormat:
    bits, kind = _number(weights, "num_bits"), weights.get("type", "int")
    element = f"int{bits}" if kind == "int" else {8: "fp8_e4m3", 4: "fp4_e2m1"}.get(bits, "")
    if not element:
        raise ValueError(f"num_bits {bits} of type {kind!r}")
    strategy = weights.get("strategy")
    if strategy == "block":
        return DeclaredFormat(element, _sides(weights, "block_structure") or (128, 128))
    size = weights.get("group_size")
    tiles: dict[object, tuple[int | None, int | None]]
    tiles = {"tensor": (None, None), "channel": (1, None)}
    tile = tiles.get(strategy, (1, size if isinstance(size, int) else 16))
    return DeclaredFormat(element, tile, weights.get("symmetric") is False)


def _gptq(settings: Settings) -> Recipe:
    bits = _number(settings, "bits")
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits is {bits}; 2, 3, 4 and 8 can be read")
    _check_layout(settings, "checkpoint_format", GPTQ_LAYOUTS)
    skipped = [] if settings.get("lm_head") is True else ["lm_head"]
    changes: Any = settings.get("dynamic") or {}
    skipped += [f"re:{pattern[2:]}" for pattern in changes if pattern.startswith("-:")]
    groups = [
        RecipeGroup((f"re:{pattern.removeprefix('+:')}",), _gptq_format({**settings, **change}))
        for pattern, change in changes.items()
        if not pattern.startswith("-:")
    ]
    blocks: Any = settings.get("modules_in_block_to_quantize") or [["Linear"]]
    targets = tuple(str(name) for block in blocks for name in block)
    groups.append(RecipeGroup(targets, _gptq_format(settings)))
    zero = 1 << (bits - 1) if settings.get("sym") is True else None
    return Recipe("gptq", tuple(groups), tuple(skipped), bits, zero=zero)


def _gptq_format(settings: Settings) -> DeclaredFormat:
    size = settings.get("group_size")
    columns = size if isinstance(size, int) and size > 0 else None
    return DeclaredFormat(f"uint{_number(settings, 'bits')}", (1, columns), has_zero_points=True)


GPTQ_LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""Layouts of GPTQ, and by how much they store zero points too low."""
AWQ_LAYOUTS = ("gemm",)


def gptq_zero_offset(files: Settings) -> int:
    """Return by how much zero points of GPTQ are stored too low, as configurations say."""
    for file, path, _ in CONFIGURED:
        layout = (_settings_of(files, file, path) or {}).get("checkpoint_format")
        if isinstance(layout, str) and layout in GPTQ_LAYOUTS:
            return GPTQ_LAYOUTS[layout]
    return 1


def _check_layout(settings: Settings, name: str, layouts: Iterable[str]) -> None:
    layout = settings.get(name)
    if layout is not None and str(layout).lower() not in layouts:
        raise ValueError(f"{name} is {layout!r}; {' and '.join(layouts)} can be read")


def _awq(settings: Settings) -> Recipe:
    _check_layout(settings, "version", AWQ_LAYOUTS)
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4:
        raise ValueError(f"bits is {bits!r}; 4 can be read")
    size = settings.get("group_size", settings.get("q_group_size", 128))
    declared = DeclaredFormat(
        "uint4", (1, size if isinstance(size, int) else 128), has_zero_points=True
    )
    skipped = _texts(settings, "modules_to_not_convert")
    zero = 8 if settings.get("zero_point") is False else None
    groups = (RecipeGroup(("Linear",), declared),)
    has_zeros = settings.get("zero_point") is True
    return Recipe("awq", groups, (*skipped, "lm_head"), 4, zero=zero, has_zeros=has_zeros)


def _fp8(settings: Settings) -> Recipe:
    declared = DeclaredFormat("fp8_e4m3", _sides(settings, "weight_block_size") or (None, None))
    skipped = _texts(settings, "modules_to_not_convert") or _texts(settings, "ignored_layers")
    return Recipe("fp8", (RecipeGroup(("Linear",), declared),), skipped)


def _modelopt(settings: Settings) -> Recipe:
    settings = _settings(settings, "quantization") or settings
    algorithm = str(settings.get("quant_algo", ""))
    declared = {
        "NVFP4": DeclaredFormat("fp4_e2m1", (1, 16)),
        "FP8": DeclaredFormat("fp8_e4m3", (None, None)),
    }.get(algorithm)
    if declared is None:
        raise ValueError(f"quant_algo {algorithm!r}")
    skipped = _texts(settings, "exclude_modules") or _texts(settings, "ignore")
    return Recipe("modelopt", (RecipeGroup(("Linear",), declared),), skipped)


def _mxfp4(settings: Settings) -> Recipe:
    declared = DeclaredFormat("fp4_e2m1", (1, 32))
    skipped = _texts(settings, "modules_to_not_convert")
    return Recipe("mxfp4", (RecipeGroup(("re:.*experts.*",), declared),), skipped)


def _bitsandbytes(settings: Settings) -> Recipe:
    if settings.get("load_in_8bit") is True:
        declared = DeclaredFormat("int8", (1, None))
    elif settings.get("load_in_4bit") is True:
        kind = settings.get("bnb_4bit_quant_type", "fp4")
        if kind not in BNB_ELEMENTS:
            raise ValueError(f"bnb_4bit_quant_type is {kind!r}")
        size = settings.get("bnb_4bit_blocksize", 64)
        declared = DeclaredFormat(
            BNB_ELEMENTS[str(kind)], (1, size if isinstance(size, int) else 64)
        )
    else:
        raise ValueError("neither load_in_4bit nor load_in_8bit is true")
    skipped = _texts(settings, "llm_int8_skip_modules") or ("lm_head",)
    return Recipe("bitsandbytes", (RecipeGroup(("Linear",), declared),), skipped)


BNB_ELEMENTS = {"nf4": "nf4", "fp4": "bnb_fp4"}


def _torchao(settings: Settings) -> Recipe:
    """Return the format of the default entry of quant_type; one that is not listed says nothing."""
    config = _settings(_settings(settings, "quant_type"), "default")
    data = _settings(config, "_data")
    declared = TORCHAO_ELEMENTS.get(str(config.get("_type")))
    skipped = _texts(settings, "modules_to_not_convert") or ("lm_head",)
    if declared is None:
        return Recipe("torchao", (), _texts(settings, "modules_to_not_convert"))
    element, columns = declared
    dtype = data_of(data, "weight_dtype")
    element = TORCHAO_NAMES.get(dtype, dtype) or element
    granularity = data.get("granularity", data.get("weight_granularity"))
    tile: tuple[int | None, int | None] = (1, columns)
    if isinstance(granularity, Mapping):
        size = _settings(granularity, "_data").get("group_size")
        tile = (1, size if isinstance(size, int) else None)
        tile = (None, None) if granularity.get("_type") == "PerTensor" else tile
    return Recipe("torchao", (RecipeGroup(("Linear",), DeclaredFormat(element, tile)),), skipped)


def _hqq(settings: Settings) -> Recipe:
    """Return the format of all layers, or of each of the named ones that have their own."""
    stated = _settings(settings, "quant_config")
    by_target = {"Linear": stated} if "weight_quant_params" in stated else stated
    groups = []
    for target, config in by_target.items():
        if not isinstance(config, Mapping):
            raise ValueError(f"quant_config has {target!r}: {config!r}")
        params = _settings(config, "weight_quant_params")
        size = params.get("group_size")
        tile = (1, size if isinstance(size, int) else None)
        declared = DeclaredFormat(f"uint{_number(params, 'nbits')}", tile, has_zero_points=True)
        groups.append(RecipeGroup((target,), declared))
    skipped = _texts(settings, "skip_modules") or ("lm_head",)
    return Recipe("hqq", tuple(groups), skipped)


def data_of(settings: Settings, name: str) -> str:
    """Return a dtype as torchao writes one; empty where there is none."""
    value = settings.get(name)
    return str(value.get("_data", "")) if isinstance(value, Mapping) else ""


TORCHAO_ELEMENTS: dict[str, tuple[str, int | None]] = {
    "Int8WeightOnlyConfig": ("int8", None),
    "Int8DynamicActivationInt8WeightConfig": ("int8", None),
    "IntxWeightOnlyConfig": ("int8", None),
    "Int8DynamicActivationIntxWeightConfig": ("int8", None),
    "Float8WeightOnlyConfig": ("fp8_e4m3", None),
    "Float8DynamicActivationFloat8WeightConfig": ("fp8_e4m3", None),
    "MXDynamicActivationMXWeightConfig": ("fp8_e4m3", 32),
    "NVFP4WeightOnlyConfig": ("fp4_e2m1", 16),
    "NVFP4DynamicActivationNVFP4WeightConfig": ("fp4_e2m1", 16),
}
"""The element and the columns of a block of each configuration of torchao."""
TORCHAO_NAMES = {
    "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float4_e2m1fn_x2": "fp4_e2m1",
}  # fmt: skip
METHODS: dict[str, Callable[[Settings], Recipe]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "hqq": _hqq,
}


def read_recipe(label: str, files: Settings) -> Recipe:
    """Return what the configuration files declare, by name; nothing where they say nothing.

    label   the checkpoint, to be shown
    """
    fields = files.get(CONFIGURATION)
    if isinstance(fields, Mapping):
        mix = file_type_name(fields)
        return Recipe(f"gguf {mix}" if mix else "", mix=mix)
    for file, path, default in CONFIGURED:
        settings = _settings_of(files, file, path)
        if settings is not None:
            method = str(settings.get("quant_method", default))
            return _parsed(f"{label}/{file}", method, settings)
    return Recipe()


CONFIGURED = (
    ("config.json", "quantization_config", ""),
    ("hf_quant_config.json", "", "modelopt"),
    ("quantize_config.json", "", "gptq"),
)
"""Files with recipes, the entry of each, and the method where it names none."""


def own_method(files: Settings) -> bool:
    """Return True if a configuration names a method that no library here has."""
    for file, path, default in CONFIGURED:
        settings = _settings_of(files, file, path)
        if settings is not None:
            return str(settings.get("quant_method", default)) not in METHODS
    return False


def _settings_of(files: Settings, file: str, path: str) -> Settings | None:
    settings = files.get(file)
    if path and isinstance(settings, Mapping):
        settings = settings.get(path)
    return settings if isinstance(settings, Mapping) else None


def _parsed(where: str, method: str, settings: Settings) -> Recipe:
    if method not in METHODS:
        raise QgateError(
            f"{where!r} declares quant_method {method!r}, which qgate does not know; it knows "
            f"{', '.join(METHODS)}. If the weights have a layout of your own, describe it with "
            "--layout FILE; if the tensors can be read, say what was meant with --recipe FILE."
        )
    try:
        return METHODS[method](settings)
    except (ValueError, TypeError) as error:
        raise QgateError(f"{where!r} declares what {method} does not have: {error}.") from None


def _settings(settings: Settings, name: str) -> Settings:
    value = settings.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}")
    return value


def _number(settings: Settings, name: str) -> int:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}")
    return value


def _sides(settings: Settings, name: str) -> tuple[int, int] | None:
    """Return rows and columns of a tile, `[128, 128]` or `128x128`; None without any."""
    value = settings.get(name)
    if value is None:
        return None
    sides = (
        [int(s) if s.isdecimal() else s for s in value.split("x")]
        if isinstance(value, str)
        else value
    )
    if (
        not isinstance(sides, list)
        or len(sides) != 2
        or not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sides)
    ):
        raise ValueError(f"{name} is {value!r}, and not two sides such as [128, 128]")
    return sides[0], sides[1]


def _texts(settings: Settings, name: str) -> tuple[str, ...]:
    value = settings.get(name) or []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} is {value!r}")
    return tuple(value)
