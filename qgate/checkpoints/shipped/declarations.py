"""Check what config.json declares beside formats of weights: how they are packed, and the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.shipped.files import ShippedFiles
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.text import counted

SCALES = ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")
"""Endings of scales of a cache."""
INPUTS = ("input_scale", "input_global_scale")
KINDS = {"I8": "int-quantized", "F8_E4M3": "float-quantized", "I32": "pack-quantized"}
"""Formats of compressed-tensors by the dtype of codes."""


def declaration_findings(
    child: Checkpoint, weights: Sequence[StoredWeight], recipe: Recipe
) -> Iterator[CheckpointFinding]:
    """Find what a configuration declares, or not, and the tensors have not, or have."""
    settings = child.model_settings.get("quantization_config")
    quantized = [weight for weight in weights if weight.packing is not None]
    yield from _lone_inputs(child, quantized, settings)
    network = child.model_settings
    is_model = "model_type" in network and "quantization_config" not in network
    if is_model and not recipe.method and quantized and not child.is_gguf and not child.has_graph:
        yield CheckpointFinding(
            "config.json quantization_config",
            f"it is missing, and codes are stored for {counted(len(quantized), 'weight')}: loaders "
            "take them for values; declare the recipe",
        )
    other = ShippedFiles(child).settings("hf_quant_config.json").get("quantization")
    if isinstance(other, Mapping) and isinstance(settings, Mapping):
        algorithms = [side.get("quant_algo") for side in (other, settings)]
        if None not in algorithms and algorithms[0] != algorithms[1]:
            yield CheckpointFinding(
                "hf_quant_config.json quantization.quant_algo",
                f"it is {algorithms[0]!r} here and {algorithms[1]!r} in config.json: loaders read "
                "either; write both alike",
            )
    if not isinstance(settings, Mapping) or settings.get("quant_method") != "compressed-tensors":
        return
    cache = settings.get("kv_cache_scheme")
    is_static = isinstance(cache, Mapping) and cache.get("dynamic") in (None, False)
    if is_static and not any(name.endswith(SCALES) for name in child.entries):
        yield CheckpointFinding(
            "config.json quantization_config.kv_cache_scheme",
            "it declares a cache with static scales, and no k_scale or v_scale is stored: engines "
            "take 1; calibrate the cache, or leave it out",
        )
    parts = [weight.parts for weight in quantized]
    codes = [p.get("weight_packed") or p.get("weight") for p in parts]
    dtypes = {entry.dtype for entry in codes if entry is not None}
    kinds = {KINDS[dtype] for dtype in dtypes if dtype in KINDS}
    declared = settings.get("format")
    if declared in KINDS.values() and len(dtypes) == len(kinds) == 1 and declared not in kinds:
        yield CheckpointFinding(
            "config.json quantization_config.format",
            f"it is {declared!r}, and codes are stored as in {kinds.pop()!r}: correct it",
        )


def _lone_inputs(
    child: Checkpoint, quantized: Sequence[StoredWeight], settings: object
) -> Iterator[CheckpointFinding]:
    """Find weights without a scale of inputs, where it is declared or most others have one."""
    names = [weight.name.removesuffix(".weight") for weight in quantized]
    lone = [name for name in names if not any(f"{name}.{end}" in child.entries for end in INPUTS)]
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    inputs = [
        group.get("input_activations")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]
    is_declared = bool(inputs) and all(
        isinstance(x, Mapping) and x.get("dynamic") in (None, False) for x in inputs
    )
    if lone and (is_declared or 0 < len(lone) < len(names) / 2):
        why = "which the recipe declares static" if is_declared else "and the others have one"
        yield CheckpointFinding(
            f"{lone[0]}.input_scale",
            f"it is missing for {counted(len(lone), 'weight')} of {len(names):,}, {why}: calibrate "
            "again",
        )
