"""GGUF files of a small llama, quantized by gguf itself; K types by the rules of their structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from tests.checkpoints import exports

Array = NDArray[Any]
WIDTH, INNER, HEADS, KEY_HEADS = 256, 512, 4, 2
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.layers.": "blk.",
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
}  # fmt: skip


def parent_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a llama whose rows are whole blocks of 256, in bfloat16."""
    return exports.parent_tensors(seed, SHAPES, WIDTH)


def llama_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def in_rope_order(x: Array, heads: int) -> Array:
    """Reorder rows as llama.cpp's converter does for q and k of llama."""
    return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


@dataclass
class GgufExport:
    """What a GGUF file is written from: tensors by name with their types, and fields."""

    tensors: dict[str, tuple[Array, Kind]]
    architecture: str = "llama"
    file_type: int = 15
    heads: tuple[int, int] = (HEADS, KEY_HEADS)
    fields: dict[str, int] = field(default_factory=dict)

    def write(self, path: Path, split: int = 0) -> Path:
        """Write the file, or parts of at most `split` tensors."""
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=split)
        writer.add_block_count(2)
        writer.add_head_count(self.heads[0])
        writer.add_head_count_kv(self.heads[1])
        writer.add_file_type(self.file_type)
        writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(96)])
        for name, (data, kind) in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def export(
    kind: Kind, parent: dict[str, Tensor] | None = None, reorders: bool = True
) -> GgufExport:
    """Quantize all matrices to one type, as llama.cpp's converter lays them out."""
    tensors: dict[str, tuple[Array, Kind]] = {}
    for name, tensor in (parent or parent_tensors()).items():
        x = tensor.float().numpy()
        if reorders and "q_proj" in name:
            x = in_rope_order(x, HEADS)
        if reorders and "k_proj" in name:
            x = in_rope_order(x, KEY_HEADS)
        tensors[llama_name(name)] = (
            (x, Kind.F32) if x.ndim == 1 else (quantized(x, kind), kind)
        )  # fmt: skip
    return GgufExport(tensors, file_type=FILE_TYPES.get(kind.name, 15))


FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
              "Q2_K": 10, "Q4_K": 15, "Q6_K": 18, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38}  # fmt: skip


def quantized(x: Array, kind: Kind) -> Array:
    """Return the blocks of rows: by gguf, or of K types, which it does not write, by a writer."""
    if kind not in WRITERS:
        return gguf.quantize(x, kind)
    blocks = x.reshape(-1, 256)
    return WRITERS[kind](blocks).reshape(len(x), -1)


# K types ------------------------------------------------------------------------------------------


def _halves(numbers: Array) -> Array:
    return numbers.astype(np.float16).view(np.uint8)


def _affine(x: Array, size: int, high: int, steps: int) -> tuple[Array, ...]:
    """Quantize sub-blocks between a minimum of at most 0 and their maximum."""
    tiles = x.reshape(len(x), -1, size)
    least = np.minimum(tiles.min(2), 0)
    scales = (tiles.max(2) - least) / high
    d = (scales.max(1, keepdims=True) / steps).astype(np.float16).astype(np.float32)
    m = (-least.min(1, keepdims=True) / steps).astype(np.float16).astype(np.float32)
    scale_codes = np.rint(scales / d).astype(np.uint8)
    minimum_codes = np.rint(-least / m).astype(np.uint8)
    exact = np.maximum(d * scale_codes, 1e-12)[..., None]
    codes = np.rint((tiles + (m * minimum_codes)[..., None]) / exact).clip(0, high).astype(np.uint8)
    return codes.reshape(len(x), 256), scale_codes, minimum_codes, _halves(d), _halves(m)


def _nibbles(codes: Array, group: int) -> Array:
    halves = codes.reshape(len(codes), -1, 2, group)
    return (halves[:, :, 0] & 15 | (halves[:, :, 1] & 15) << 4).reshape(len(codes), -1)


def _pairs(codes: Array) -> Array:
    quarters = codes.reshape(len(codes), -1, 4, 32) & 3
    shifted = quarters << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=2).reshape(len(codes), -1)


def _q4_k(x: Array) -> Array:
    codes, scales, minima, d, m = _affine(x, 32, 15, 63)
    stored = np.concatenate([
        scales[:, :4] | (scales[:, 4:] >> 4) << 6,
        minima[:, :4] | (minima[:, 4:] >> 4) << 6,
        scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
    ], 1)  # fmt: skip
    return np.concatenate([d, m, stored, _nibbles(codes, 32)], 1)


def _q2_k(x: Array) -> Array:
    codes, scales, minima, d, m = _affine(x, 16, 3, 15)
    return np.concatenate([scales | minima << 4, _pairs(codes), d, m], 1)


def _q6_k(x: Array) -> Array:
    tiles = x.reshape(len(x), 16, 16)
    scales = np.abs(tiles).max(2) / 31
    d = (scales.max(1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    steps = np.rint(scales / d).astype(np.int8)
    exact = np.maximum(d * steps, 1e-12)[..., None]
    codes = (np.rint(tiles / exact).clip(-32, 31) + 32).astype(np.uint8).reshape(len(x), 256)
    return np.concatenate(
        [_nibbles(codes, 64), _pairs(codes >> 4), steps.view(np.uint8), _halves(d)], 1
    )


WRITERS: dict[Kind, Callable[[Array], Array]] = {
    Kind.Q2_K: _q2_k, Kind.Q4_K: _q4_k, Kind.Q6_K: _q6_k,
}  # fmt: skip
RIGHT = (
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q4_K, Kind.Q6_K,
    Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4,
)  # fmt: skip
