"""Check what config.json declares beside formats of weights: how they are packed, and the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight

SCALES = ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")
"""Endings of scales of a cache."""
KINDS = {"I8": "int-quantized", "F8_E4M3": "float-quantized", "I32": "pack-quantized"}
"""Formats of compressed-tensors by the dtype of codes."""


def declaration_findings(
    child: Checkpoint, weights: Sequence[StoredWeight]
) -> Iterator[CheckpointFinding]:
    """Find what a configuration of compressed-tensors declares, and the tensors have not."""
    settings = child.model_settings.get("quantization_config")
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
    parts = [weight.parts for weight in weights if weight.packing is not None]
    codes = [p.get("weight_packed") or p.get("weight") for p in parts]
    dtypes = {entry.dtype for entry in codes if entry is not None}
    kinds = {KINDS[dtype] for dtype in dtypes if dtype in KINDS}
    declared = settings.get("format")
    if declared in KINDS.values() and len(dtypes) == len(kinds) == 1 and declared not in kinds:
        yield CheckpointFinding(
            "config.json quantization_config.format",
            f"it is {declared!r}, and codes are stored as in {kinds.pop()!r}: correct it",
        )
