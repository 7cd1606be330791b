"""Faults planted into GGUF files: what was changed, and words of the finding."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.checkpoints.faults import ExportFault
from tests.checkpoints.gguf_exports import (
    Array,
    GgufExport,
    export,
    in_rope_order,
    parent_tensors,
    quantized,
)

Q, UP, DOWN = "blk.0.attn_q.weight", "blk.1.ffn_up.weight", "blk.0.ffn_down.weight"


def _change(name: str, change: Callable[[Array], Array]) -> Callable[[GgufExport], None]:
    """Change the blocks x bytes of a tensor."""

    def plant(made: GgufExport) -> None:
        data, kind = made.tensors[name]
        blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
        made.tensors[name] = change(blocks).reshape(data.shape), kind

    return plant


def _put(name: str, parent: str, reorder: int = 0) -> Callable[[GgufExport], None]:
    """Quantize another tensor of the parent, or the same with rows in another order."""

    def plant(made: GgufExport) -> None:
        kind = made.tensors[name][1]
        x = parent_tensors()[parent].float().numpy()
        made.tensors[name] = quantized(in_rope_order(x, reorder) if reorder else x, kind), kind

    return plant


def _nibbles_swapped(start: int) -> Callable[[Array], Array]:
    def change(blocks: Array) -> Array:
        codes = blocks[:, start:]
        blocks[:, start:] = codes >> 4 | codes << 4
        return blocks

    return change


def _in_neighbors(start: int, group: int) -> Callable[[Array], Array]:
    """Pack neighbors into a byte, not the halves of a group."""

    def change(blocks: Array) -> Array:
        codes = blocks[:, start:].reshape(len(blocks), -1, group)
        flat = np.concatenate([codes & 15, codes >> 4], 2)
        blocks[:, start:] = (flat[..., 0::2] | flat[..., 1::2] << 4).reshape(len(blocks), -1)
        return blocks

    return change


def _set(at: slice, value: int | bytes, rows: slice = slice(3)) -> Callable[[Array], Array]:
    def change(blocks: Array) -> Array:
        blocks[rows, at] = list(value) if isinstance(value, bytes) else value
        return blocks

    return change


def _swap(first: slice, second: slice) -> Callable[[Array], Array]:
    def change(blocks: Array) -> Array:
        first_blocks = blocks[:, first].copy()
        blocks[:, first], blocks[:, second] = blocks[:, second], first_blocks
        return blocks

    return change


def _roll_scales(blocks: Array) -> Array:
    blocks[:, :2] = np.roll(blocks[:, :2], 1, 0)
    return blocks


def _double_scales(blocks: Array) -> Array:
    blocks[:, :2] = (blocks[:, :2].copy().view(np.float16) * 2).view(np.uint8)
    return blocks


def _roll_rows(made: GgufExport) -> None:
    data, kind = made.tensors[UP]
    made.tensors[UP] = np.roll(data, 1, 0), kind


def _declare(kind: Kind) -> Callable[[GgufExport], None]:
    def plant(made: GgufExport) -> None:
        made.tensors[UP] = made.tensors[UP][0], kind

    return plant


def _with(**changed: object) -> Callable[[GgufExport], None]:
    def plant(made: GgufExport) -> None:
        for name, value in changed.items():
            setattr(made, name, value)

    return plant


def _norm_plus_one(made: GgufExport) -> None:
    data, kind = made.tensors["output_norm.weight"]
    made.tensors["output_norm.weight"] = data + 1, kind


def _lose(name: str) -> Callable[[GgufExport], None]:
    return lambda made: made.tensors.__delitem__(name)


def _extra(made: GgufExport) -> None:
    made.tensors["blk.7.extra.weight"] = np.ones(4, np.float32), Kind.F32


INFINITY = b"\x00\x7c"
UP_PARENT = "model.layers.0.mlp.up_proj.weight"
Q_PARENT = "model.layers.0.self_attn.q_proj.weight"
FAULTS = (
    ExportFault("nibbles swapped", Kind.Q4_0, UP, "halves of each byte are swapped", _change(UP, _nibbles_swapped(2))),
    ExportFault("nibbles of Q5_1 swapped", Kind.Q5_1, UP, "halves of each byte are swapped", _change(UP, _nibbles_swapped(8))),
    ExportFault("nibbles of Q4_K swapped", Kind.Q4_K, UP, "halves of each byte are swapped", _change(UP, _nibbles_swapped(16))),
    ExportFault("neighbors in a byte", Kind.Q4_0, UP, "bytes hold neighboring codes", _change(UP, _in_neighbors(2, 16))),
    ExportFault("neighbors in a byte of Q4_K", Kind.Q4_K, UP, "bytes hold neighboring codes", _change(UP, _in_neighbors(16, 32))),
    ExportFault("q not reordered", Kind.Q8_0, Q, "reorders the rows of each head of q and k for the rope of llama", _put(Q, Q_PARENT)),
    ExportFault("q of qwen2 reordered", Kind.Q4_K, Q, "reordered as for llama's rope", _with(architecture="qwen2")),
    ExportFault("scales beyond float16", Kind.Q8_0, UP, "3 of .* scales are NaN or infinite", _change(UP, _set(slice(0, 2), INFINITY))),
    ExportFault("minima beyond float16", Kind.Q4_K, UP, "values are NaN or infinite", _change(UP, _set(slice(2, 4), INFINITY))),
    ExportFault("blocks never written", Kind.Q4_0, DOWN, "3 blocks were never written", _change(DOWN, _set(slice(None), b"\x00\x00" + b"\x88" * 16))),
    ExportFault("super-blocks never written", Kind.Q4_K, DOWN, "3 blocks were never written", _change(DOWN, _set(slice(None), 0))),
    ExportFault("tensor never written", Kind.Q6_K, DOWN, "all values are zero", _change(DOWN, np.zeros_like)),
    ExportFault("another layer's tensor", Kind.Q4_0, UP, "was made from model.layers.0.mlp.up_proj.weight, not from", _put(UP, UP_PARENT)),
    ExportFault("another tensor of the shape", Kind.Q4_K, UP, "was made from model.layers.0.mlp.gate_proj.weight, not from",
                _put(UP, "model.layers.0.mlp.gate_proj.weight")),
    ExportFault("scales for minima", Kind.Q4_K, UP, "scales and minima of blocks are swapped", _change(UP, _swap(slice(0, 2), slice(2, 4)))),
    ExportFault("scales for minima of Q4_1", Kind.Q4_1, UP, "scales and minima of blocks are swapped", _change(UP, _swap(slice(0, 2), slice(2, 4)))),
    ExportFault("sub-block scales for minima", Kind.Q4_K, UP, "scales and minima of sub-blocks are swapped",
                lambda made: (_change(UP, _swap(slice(4, 8), slice(8, 12)))(made), _change(UP, _last_swapped)(made))[0]),
    ExportFault("sub-block scales for minima of Q2_K", Kind.Q2_K, UP, "scales and minima of sub-blocks are swapped", _change(UP, lambda b: _q2_swapped(b))),
    ExportFault("scales of the block before", Kind.Q4_0, UP, "every scale belongs to the group before it", _change(UP, _roll_scales)),
    ExportFault("scales twice too high", Kind.Q8_0, UP, "all scales are 2 times too high", _change(UP, _double_scales)),
    ExportFault("blocks moved by one", Kind.Q4_K, UP, "every block is that", _change(UP, lambda b: np.roll(b, 1, 0))),
    ExportFault("rows moved", Kind.Q8_0, UP, "rows stand in another order: moved by one", _roll_rows),
    ExportFault("Q4_0 declared IQ4_NL", Kind.Q4_0, UP, "its blocks are Q4_0, and it is declared IQ4_NL", _declare(Kind.IQ4_NL)),
    ExportFault("Q4_K declared Q4_0", Kind.Q4_K, UP, "its blocks are Q4_K, and it is declared Q4_0", _declare(Kind.Q4_0)),
    ExportFault("another mix", Kind.Q8_0, "general.file_type", "it says Q4_K_M, which is mostly Q4_K, and the layers are 100 % Q8_0", _with(file_type=15)),
    ExportFault("1 added to a norm", Kind.Q8_0, "output_norm.weight", "1 is added to it", _norm_plus_one),
    ExportFault("a norm is lost", Kind.Q8_0, "model.norm.weight", "it is in the parent alone", _lose("output_norm.weight")),
    ExportFault("a tensor too many", Kind.Q8_0, "blk.7.extra.weight", "it is in the child alone", _extra),
)  # fmt: skip


def _last_swapped(blocks: Array) -> Array:
    blocks[:, 12:16] = blocks[:, 12:16] >> 4 | blocks[:, 12:16] << 4
    return blocks


def _q2_swapped(blocks: Array) -> Array:
    blocks[:, :16] = blocks[:, :16] >> 4 | blocks[:, :16] << 4
    return blocks


def planted(fault: ExportFault) -> GgufExport:
    gguf_export = export(fault.scheme)
    fault.plant(gguf_export)
    return gguf_export
