"""Write what a worker of an engine or a trainer holds: weights as loaded, layer outputs, KV scales.

This file needs torch alone and can be copied into an image where qgate is not installed.

  qgate.probe.snapshot(model, "probes/engine", step=42)     in a process that has the model
  with qgate.probe.outputs(model, "probes/engine"): ...     while one request is computed

  vLLM     LLM(..., worker_extension_cls="qgate.probe.WorkerExtension"), then in the driver
           llm.collective_rpc("qgate_snapshot", args=("probes/engine", 42)); or QGATE_PROBE alone,
           where qgate is installed: its plugin writes what a worker has loaded
  SGLang   --custom-weight-loader qgate.probe.sglang_snapshot, with QGATE_PROBE=probes/engine, then
           engine.update_weights_from_tensor([], load_format="qgate.probe.sglang_snapshot")

Each rank writes a file. Weights have the names and the shape of the checkpoint: fused projections
are split, stacked experts are taken apart, and of a shard its rows and columns in the whole weight
are written. The same rows and columns of a weight are sampled on every rank and in every program.
`qgate engines TRAINER ENGINE` compares two of these folders.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VERSION = 1
ROWS = COLUMNS = 64
"""Most rows and columns that are sampled of a weight."""
PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
"""Parts of fused projections, for models that do not say so in `packed_modules_mapping`."""
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_DIVIDED = {"VocabParallelEmbedding", "ColumnParallelLinear", "RowParallelLinear"}
_STACKS = ("w13_weight", "w2_weight")
_OWN_ORDER = re.compile(r"TRTLLM|TENSORRT|AITER|MARLIN|MOONEP|HUMMING|CPU|XPU")
"""Kernels of experts before which an engine puts the elements of weights into another order."""
_BLOCK = 128
LAYERS = r"(layers|blocks|h)\.\d+$|norm$|lm_head$|logits_processor$"
_EMBEDDING = re.compile(r"(embed_tokens|tok_embeddings|wte|embeddings)$")
_HEAD = re.compile(r"(lm_head|logits_processor|^output)$")
_AT_ONCE = 1 << 22
Names = Callable[[str], str] | Mapping[str, str] | None


@dataclass(frozen=True)
class Piece:
    """A shard of a weight of the checkpoint.

    name    in the checkpoint
    values  rows and columns of the shard, in the order of the checkpoint
    start   first row and column of the shard in the whole weight
    shape   of the whole weight, with a column for a vector
    scales  factors of codes, broadcast to the shard; None for plain weights
    """

    name: str
    values: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    scales: Tensor | None = None


def snapshot(
    model: nn.Module,
    folder: str | Path,
    step: int | None = None,
    *,
    rank: int | None = None,
    names: Names = None,
    only: str = "",
    seed: int = 0,
    interleaved: Mapping[str, int] | None = None,
) -> Path:
    """Write the weights and KV scales that a model holds now, and return the file.

    step   of the trainer whose weights these are, if the caller knows it
    rank   of this process; found from torch.distributed or RANK where it is not given
    names  turns names of modules into those of the checkpoint: a function, or patterns and texts;
           by default what the model of an engine says of its own
    only   pattern of the names that are written, such as "layers.7\\."
    seed   of the sampled rows and columns; the same in both programs
    interleaved  size of a head, by patterns of names, of weights whose rows are pairs of rotary
                 positions, as Meta's Llama and torchtitan have them: {"(wq|wk)": 128}. They are
                 written as checkpoints of Hugging Face have them
    """
    rank = _rank() if rank is None else rank
    names = names or checkpoint_names(model)
    tensors: dict[str, Tensor] = {}
    unread: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.no_grad():
        for piece in pieces(model, unread):
            name = rename(piece.name, names)
            head = [h for found, h in (interleaved or {}).items() if re.search(found, piece.name)]
            if re.search(only, name):
                try:
                    piece = halves_first(piece, head[0]) if head else piece
                except ValueError as error:
                    unread[name] = str(error)
                    continue
                key = f"{name}@{piece.start[0]},{piece.start[1]}"
                tensors |= {f"{key}/{part}": x for part, x in sample(piece, seed).items()}
                shapes[key] = (*piece.shape, *piece.values.shape)
        scales = {f"kv/{name}": x for name, x in _kv_scales(model) if re.search(only, name)}
    if not shapes:
        raise ValueError(
            f"no weight of {type(model).__name__} was written: {len(unread)} could not be read, "
            f"and `only` is {only!r}. Give the model whose modules hold the weights."
        )
    about = {"step": step, "rank": rank, "seed": seed, "shapes": shapes, "unread": unread}
    return _write(Path(folder) / f"probe-rank{rank:05d}.safetensors", tensors | scales, about)


def rename(name: str, names: Names) -> str:
    """Return the name of the checkpoint for that of a module's parameter."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    name = name.removeprefix("module.")
    if names is None:
        return name
    if callable(names):
        return names(name)
    for pattern, text in names.items():
        name = re.sub(pattern, text, name)
    return name


def checkpoint_names(model: nn.Module) -> Names:
    """Return what turns an engine's names back, by the mapper that it loads a checkpoint with."""
    mappers = (getattr(model, f"hf_to_{engine}_mapper", None) for engine in ("vllm", "sglang"))
    mapper = next((x for x in mappers if x is not None), None)
    suffixes, prefixes, substrings = (
        _turned(getattr(mapper, f"orig_to_new_{kind}", None) or {}, least)
        for kind, least in (("suffix", 1), ("prefix", 0), ("substr", 1))
    )
    if not (suffixes or prefixes or substrings):
        return None

    def name_in_checkpoint(name: str) -> str:
        for new, old in suffixes:
            name = name.removesuffix(new) + old if name.endswith(new) else name
        prefix = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        name = prefix[1] + name.removeprefix(prefix[0])
        for new, old in substrings:
            name = name.replace(new, old, 1)
        return name

    return name_in_checkpoint


def _turned(pairs: Mapping[str, str | None], least: int) -> list[tuple[str, str]]:
    """Return (new, old), the longest first, without what is made of several or of less."""
    news = list(pairs.values())
    turned = [(new, old) for old, new in pairs.items() if new is not None and news.count(new) == 1]
    return sorted((x for x in turned if len(x[0]) >= least), key=lambda pair: -len(pair[0]))


def order_of_halves(height: int, head: int) -> Tensor:
    """Return the rows of heads, the even ones of each before the odd ones."""
    return torch.arange(height).view(-1, head // 2, 2).transpose(1, 2).reshape(-1)


def halves_first(piece: Piece, head: int) -> Piece:
    """Put the even rows of each head before the odd ones."""
    height = len(piece.values)
    if head < 2 or head % 2 or height % head or piece.start[0] % head:
        raise ValueError(f"its {height} rows from {piece.start[0]} on are no whole heads of {head}")
    order = order_of_halves(height, head).to(piece.values.device)
    scales = None if piece.scales is None else piece.scales.expand(height, -1)[order]
    return replace(piece, values=piece.values[order], scales=scales)


# Sampling ----------------------------------------------------------------------------------------


def sampled_places(size: int, most: int, seed: int) -> Tensor:
    """Return the rows, or columns, of a weight that are sampled: the same for equal sizes."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + size)
    edges = torch.arange(min(most, size) + 1, dtype=torch.float64) * size / min(most, size)
    first, last = edges[:-1].long(), edges[1:].long()
    return first + (torch.rand(len(first), generator=generator) * (last - first)).long()


def sample(piece: Piece, seed: int) -> dict[str, Tensor]:
    """Return the sampled values of a shard, their scales, and a digest of each row."""
    height, width = piece.values.shape
    rows = sampled_places(piece.shape[0], ROWS, seed) - piece.start[0]
    columns = sampled_places(piece.shape[1], COLUMNS, seed) - piece.start[1]
    rows = rows[(rows >= 0) & (rows < height)]
    columns = columns[(columns >= 0) & (columns < width)]
    device = piece.values.device
    at = rows.to(device)[:, None], columns.to(device)
    parts = {"rows": rows + piece.start[0], "columns": columns + piece.start[1]}
    if piece.scales is None:
        digests = row_digests(piece.values, piece.start[1])
        return parts | {"values": piece.values[at].cpu(), "digests": digests}
    scales = piece.scales.expand(height, width)[at].float()
    # One element of 8 bits is read at a time by no kernel of some devices: whole rows are.
    codes = piece.values[at[0][:, 0]].float()[:, at[1]]
    name = str(piece.values.dtype).removeprefix("torch.").encode()
    kind = torch.tensor(list(name), dtype=torch.uint8)
    return parts | {"codes": codes.cpu(), "scales": scales.cpu(), "format": kind}


def row_digests(values: Tensor, first_column: int = 0) -> Tensor:
    """Return a digest of each row as bfloat16; those of shards of columns add up to the whole's."""
    columns = torch.arange(first_column, first_column + values.shape[1], device=values.device)
    factors = (columns * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01) | 1
    step = max(1, _AT_ONCE // max(values.shape[1], 1))
    sums = []
    for start in range(0, len(values), step):
        bits = values[start : start + step].to(torch.bfloat16).contiguous().view(torch.int16)
        mixed = (bits.long() + 0x10001) * factors
        sums.append((mixed ^ (mixed >> 29)).sum(1).cpu())
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64)


# Modules -----------------------------------------------------------------------------------------


def pieces(model: nn.Module, unread: dict[str, str]) -> Iterator[Piece]:
    """Yield the shards of all weights; what cannot be read is noted with the reason."""
    packed = {**PACKED, **(getattr(model, "packed_modules_mapping", None) or {})}
    experts = _expert_names(model)
    earlier: set[int] = set()
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        is_stack = _STACKS[0] in module._parameters
        own = path.rpartition(".")[2]
        for leaf, parameter in module._parameters.items():
            if parameter is None or _is_scale(leaf):
                continue
            name = f"{path}.{leaf}" if path else leaf
            # A tied head, or a router's bias that its experts have as well.
            if id(parameter) in earlier and (is_stack or _HEAD.search(path)):
                continue
            earlier.add(id(parameter))
            try:
                whole, start, shape = _whole(parameter)
                if is_stack:
                    yield from _fused_experts(path, module, leaf, whole, experts)
                elif whole.dim() == 3 and shape[1] != 1:
                    yield from _stacked(path, leaf, whole, start, shape)
                elif kinds & _DIVIDED or ("ReplicatedLinear" in kinds and own in packed):
                    owner = model.get_submodule(path.rpartition(".")[0])
                    whole = whole.squeeze(1) if whole.dim() == 3 else whole
                    yield from _parallel(path, (module, owner), leaf, whole, kinds, packed)
                else:
                    scales = _scales_of(module, leaf, whole)
                    yield _flat(Piece(name, whole, start, shape, scales))
            except ValueError as error:
                unread[name] = str(error)


def _is_scale(leaf: str) -> bool:
    return "scale" in leaf or leaf.endswith(("zero_point", "zeros", "g_idx"))


def _whole(parameter: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return the local values of a parameter, their start and the shape of the whole."""
    shape = tuple(parameter.shape)
    start: tuple[int, ...] = (0,) * len(shape)
    if hasattr(parameter, "to_local"):
        # Not every build of torch has it, and only parameters of FSDP need it.
        from torch.distributed.tensor import _utils

        mesh, placements = parameter.device_mesh, parameter.placements
        start = tuple(_utils.compute_local_shape_and_global_offset(shape, mesh, placements)[1])
        parameter = parameter.to_local()
    values: Tensor = parameter.detach()
    if values.dtype not in (*_PLAIN, *_CODES) or values.dim() not in (1, 2, 3):
        raise ValueError(f"{str(values.dtype)[6:]} of shape {list(shape)} is no layout known here")
    return values, start, shape


def _flat(piece: Piece) -> Piece:
    """Give a vector a column."""
    values = piece.values[:, None] if piece.values.dim() == 1 else piece.values
    if values.dim() == 3 and values.shape[1] == 1:  # a convolution of each channel
        return replace(piece, values=values[:, 0], start=piece.start[::2], shape=piece.shape[::2])
    if values.dim() != 2:
        raise ValueError(f"it has {values.dim()} axes")
    start, shape = (*piece.start, 0)[:2], (*piece.shape, 1)[:2]
    return replace(piece, values=values, start=start, shape=shape)


def _stacked(
    path: str, leaf: str, values: Tensor, start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[Piece]:
    """Yield the weights of experts that a trainer keeps in one parameter."""
    if values.dtype in _CODES:
        raise ValueError("stacked experts in 8 bits have no scales known here")
    parts = PACKED.get(leaf, (leaf.removesuffix("_weight"),))
    if shape[1] % len(parts) or (len(parts) > 1 and start[1:] != (0, 0)):
        raise ValueError(f"{list(shape)} is not divided into {' and '.join(parts)}")
    height = shape[1] // len(parts)
    for number, expert in enumerate(values, start[0]):
        for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
            name = f"{path}.{number}.{part}.weight"
            yield Piece(name, rows, (start[1], start[2]), (height, shape[2]))


def _parallel(
    path: str, owned: tuple[Any, Any], leaf: str, values: Tensor, kinds: set[str],
    packed: Mapping[str, Any],
) -> Iterator[Piece]:  # fmt: skip
    """Yield the parts of a linear layer or an embedding that is divided over ranks.

    owned  the module, and the one that it is in
    """
    module, owner = owned
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    if "ReplicatedLinear" in kinds:
        rank, size = 0, 1
    if "VocabParallelEmbedding" in kinds:
        indices = module.shard_indices
        first, last = indices.org_vocab_start_index, indices.org_vocab_end_index
        shape = (module.org_vocab_size, *values.shape[1:])
        start = (first, *(0 for _ in values.shape[1:]))
        scales = _scales_of(module, leaf, values)
        scales = None if scales is None else scales[: last - first]
        yield _flat(Piece(f"{path}.{leaf}", values[: last - first], start, shape, scales))
        return
    if "RowParallelLinear" in kinds:
        values = _upright(values, module.input_size // size, module.output_size)
        scales = _scales_of(module, leaf, values)
        start, shape = (0, 0), (values.shape[0], 1)
        if values.dim() == 2:
            start, shape = (0, rank * values.shape[1]), (values.shape[0], module.input_size)
        yield _flat(Piece(f"{path}.{leaf}", values, start, shape, scales))
        return
    parts = _output_parts(module, owner, kinds, rank, size)
    width = module.input_size
    if "conv" in path and values.dim() == 2:
        width = values.shape[1]
        if size > 1 and not getattr(module, "output_sizes", None):
            raise ValueError(f"which rows of a convolution one of {size} ranks has is not known")
    values = _upright(values, width, sum(height for height, _, _ in parts))
    scales = _scales_of(module, leaf, values, [height for height, _, _ in parts])
    parent, _, own = path.rpartition(".")
    names = tuple(packed.get(own, (own,))) if len(parts) > 1 else (own,)
    if len(names) > len(parts):
        raise ValueError(f"{own} has {len(parts)} parts and {len(names)} names")
    # The first name has the parts that are left: Qwen3.5's in_proj_qkv has three of four.
    several = len(parts) - len(names) + 1
    row = 0
    for name, group in zip(names, [parts[:several], *([x] for x in parts[several:])], strict=True):
        above, total = 0, sum(whole for _, _, whole in group)
        for height, first, whole in group:
            shape = (total, *values.shape[1:])
            start = (above + first, *(0 for _ in values.shape[1:]))
            rows = slice(row, row + height)
            own_scales = None if scales is None else scales[rows]
            at = f"{parent}.{name}.{leaf}".removeprefix(".")
            yield _flat(Piece(at, values[rows], start, shape, own_scales))
            row, above = row + height, above + whole


def _output_parts(
    module: Any, owner: Any, kinds: set[str], rank: int, size: int
) -> list[tuple[int, int, int]]:
    """Return rows here, first row in the checkpoint and rows there, of each fused part."""
    if "QKVParallelLinear" in kinds:
        heads, kv_heads, width = module.num_heads, module.num_kv_heads, module.head_size
        of_v = getattr(module, "v_head_size", width)
        replica = rank // module.num_kv_head_replicas
        total = module.total_num_kv_heads
        return [
            (heads * width, rank * heads * width, module.total_num_heads * width),
            (kv_heads * width, replica * kv_heads * width, total * width),
            (kv_heads * of_v, replica * kv_heads * of_v, total * of_v),
        ]
    sizes = getattr(module, "output_sizes", None) or [module.output_size]
    latent = getattr(owner, "q_lora_rank", None)
    if len(sizes) == 1 and "ReplicatedLinear" in kinds and latent:
        sizes = [latent, sizes[0] - latent]
    return [(whole // size, rank * (whole // size), whole) for whole in sizes]


def _upright(values: Tensor, width: int, height: int) -> Tensor:
    """Return rows of outputs; engines keep some weights of 8 bits the other way around."""
    if values.dim() == 1:
        return values
    is_turned = values.dtype in _CODES and values.stride(0) == 1 and values.stride(1) != 1
    values = values.t() if is_turned else values
    if tuple(values.shape) != (height, width):
        raise ValueError(f"its shape {list(values.shape)} is not {[height, width]}")
    return values


# Scales ------------------------------------------------------------------------------------------


def _scales_of(
    module: Any, leaf: str, values: Tensor, parts: list[int] | None = None
) -> Tensor | None:
    """Return the scale of each element of a weight in 8 bits, as rows and columns."""
    if values.dtype not in _CODES:
        return None
    for ending in ("_scale_inv", "_scale"):
        scale = getattr(module, f"{leaf}{ending}", None)
        if isinstance(scale, Tensor):
            return _spread(_decoded(scale), values, _block_of(module), parts)
    raise ValueError(f"{str(values.dtype)[6:]} without {leaf}_scale or {leaf}_scale_inv")


def _decoded(scale: Tensor) -> Tensor:
    """Return scales as numbers: some are exponents of two, and some are packed for one kernel."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.detach().float() - 127)
    if not scale.is_floating_point():
        raise ValueError(f"scales of {str(scale.dtype)[6:]} are packed for one kernel")
    return scale.detach().float()


def _block_of(module: Any) -> tuple[int, int]:
    method = getattr(module, "quant_method", None)
    config = getattr(method, "quant_config", None)
    for owner in (module, method, config):
        block = getattr(owner, "weight_block_size", None)
        if block is not None:
            return int(block[0]), int(block[1])
    return _BLOCK, _BLOCK


def _spread(
    scale: Tensor, values: Tensor, block: tuple[int, int], parts: list[int] | None
) -> Tensor:
    """Give each element of a weight its scale: per tensor, per fused part, per row or per block."""
    height, width = values.shape
    flat = scale.reshape(-1)
    if len(flat) == 1:
        return flat.reshape(1, 1).expand(height, width)
    if parts is not None and len(flat) == len(parts):
        counts = torch.tensor(parts, device=flat.device)
        return flat.repeat_interleave(counts)[:, None].expand(height, width)
    if len(flat) == height and scale.shape in ((height,), (height, 1)):
        return flat[:, None].expand(height, width)
    if scale.dim() == 2 and len(scale) == height and width % scale.shape[1] == 0:
        return scale.repeat_interleave(width // scale.shape[1], 1)
    tiles = (-(-height // block[0]), -(-width // block[1]))
    if scale.shape == tiles:
        rows = scale.repeat_interleave(block[0], 0)[:height]
        return rows.repeat_interleave(block[1], 1)[:, :width]
    raise ValueError(
        f"scales of shape {list(scale.shape)} for {[height, width]} are not known here"
    )


# Experts -----------------------------------------------------------------------------------------


def _expert_names(model: nn.Module) -> tuple[str, str, str]:
    """Return what the checkpoint calls the parts of an expert: gate, up and down."""
    mapping = getattr(model, "get_expert_mapping", None)
    parts = {row[3]: row[1].rstrip(".").rpartition(".")[2] for row in mapping()} if mapping else {}
    gate, up, down = EXPERT_PARTS
    return parts.get("w1", gate), parts.get("w3", up), parts.get("w2", down)


def _fused_experts(
    path: str, module: Any, leaf: str, values: Tensor, names: tuple[str, str, str]
) -> Iterator[Piece]:
    """Yield the weights of the experts on this rank, by their numbers in the whole model."""
    if leaf not in _STACKS or values.dim() != 3:
        raise ValueError(f"{leaf} of shape {list(values.shape)} is no layout known here")
    gate, up, down = (
        getattr(module, f"ckpt_{part}_proj_name", name)
        for part, name in zip(("gate", "up", "down"), names, strict=True)
    )
    is_down, order = leaf == _STACKS[1], -1 if _is_up_first(module) else 1
    parts = (down,) if is_down else (gate, up)[::order] if _is_gated(module) else (gate,)
    rank, size = (_number_of(module, f"tp_{key}", int(key == "size")) for key in ("rank", "size"))
    hidden = _number_of(module, "hidden_dim_unpadded", 0) or None
    inner = _number_of(module, "intermediate_size_per_partition_unpadded", 0) or None
    endings = (getattr(module, leaf + ending, None) for ending in ("_scale_inv", "_scale"))
    scale = next((x for x in endings if isinstance(x, Tensor)), None)
    if values.dtype in _CODES and scale is None:
        raise ValueError(f"{str(values.dtype)[6:]} without {leaf}_scale or {leaf}_scale_inv")
    for slot, home in enumerate(_homes_of_experts(path, module, len(values))):
        # Triton's own kernels read weights that stand the other way around.
        weight = values[slot].t() if getattr(module, "use_triton_kernels", False) else values[slot]
        height = len(weight) // len(parts)
        scales = None
        if values.dtype in _CODES and scale is not None:
            heights = [height] * len(parts)
            scales = _spread(_decoded(scale[slot]), weight, _block_of(module), heights)
        for at, part in enumerate(parts):
            # Some kernels read weights that are padded at their ends.
            ends = (hidden, inner) if is_down else (inner, hidden)
            own, factors = (
                x if x is None else x[at * height : (at + 1) * height][: ends[0], : ends[1]]
                for x in (weight, scales)
            )
            assert own is not None
            divided = int(is_down)
            start = tuple(rank * n if axis == divided else 0 for axis, n in enumerate(own.shape))
            shape = tuple(size * n if axis == divided else n for axis, n in enumerate(own.shape))
            yield Piece(f"{home}.{part}.weight", own, start, shape, factors)


def _number_of(module: Any, name: str, otherwise: int) -> int:
    """Return a number of experts from the module, or from the settings that it was made with."""
    config = getattr(module, "moe_config", None)
    for owner in (module, getattr(config, "moe_parallel_config", None), config):
        for key in (f"moe_{name}", name):
            if isinstance(number := getattr(owner, key, None), int):
                return number
    return otherwise


def _is_gated(module: Any) -> bool:
    for owner, name in (("moe_config", "is_act_and_mul"), ("moe_runner_config", "is_gated")):
        flag = getattr(getattr(module, owner, None), name, None)
        if flag is not None:
            return bool(flag)
    return True


def _is_up_first(module: Any) -> bool:
    """Tell if a kernel wants up above gate; refuse experts whose elements are in another order."""
    method = getattr(module, "quant_method", None)
    chosen = getattr(method, "__dict__", {}).items()
    names = [f"{name} {getattr(x, 'name', x)}" for name, x in chosen if name.endswith("_backend")]
    if getattr(module, "use_flashinfer_trtllm_moe", False):
        names.append("FLASHINFER_TRTLLM")
    if getattr(module.w13_weight, "is_shuffled", False):
        names.append("AITER")
    backend = " ".join(names).upper()
    if order := _OWN_ORDER.search(backend):
        raise ValueError(
            f"kernels of {order[0]} have the elements of experts in an order of their own: start "
            "the engine with Triton's"
        )
    is_swapped = "FLASHINFER" in backend and "CUTLASS" in backend
    return is_swapped or bool(getattr(method, "load_up_proj_weight_first", False))


def _homes_of_experts(path: str, module: Any, count: int) -> list[str]:
    """Return where the checkpoint has each expert on this rank; a shared one may stand behind."""
    home = path.removesuffix(".routed_experts")
    shared = getattr(module, "num_fused_shared_experts", None) or 0
    if shared > 1:
        raise ValueError(f"{shared} shared experts among those of a rank are not known here")
    homes = [f"{home}.{number}" for number in _logical(module, count - shared)]
    return homes + [re.sub(r"experts$", "shared_experts", home)] * shared


def _logical(module: Any, count: int) -> list[int]:
    """Return the numbers in the checkpoint of experts that balancing may have moved or doubled."""
    numbers = _expert_numbers(module, count)
    places = getattr(module, "logical_to_physical_map", None)
    if isinstance(places, Tensor):
        logical = {slot: n for n, row in enumerate(places.tolist()) for slot in row if slot >= 0}
        return [logical[number] for number in numbers]
    location: Any = sys.modules.get("sglang.srt.eplb.expert_location")
    metadata = location and location.get_global_expert_location_metadata()
    if metadata:
        own = metadata.physical_to_logical_map[module.layer_id].tolist()
        return [own[number] for number in numbers]
    config = getattr(module, "moe_config", None)
    physical, stored = (getattr(config, f"num_{kind}experts", None) for kind in ("", "logical_"))
    if physical != stored and stored is not None:
        raise ValueError("experts are doubled by EPLB, and which ones is not known here")
    return numbers


def _expert_numbers(module: Any, count: int) -> list[int]:
    """Return the number in the whole model of each place of an expert on this rank."""
    mapped = getattr(module, "_expert_map", None)
    mapped = getattr(module, "expert_map", None) if mapped is None else mapped
    if isinstance(mapped, Tensor):
        slots = {int(slot): number for number, slot in enumerate(mapped.tolist()) if slot >= 0}
        return [slots[slot] for slot in range(count)]
    first = _number_of(module, "ep_rank", 0) * count
    return list(range(first, first + count))


def _kv_scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name in ("k_scale", "v_scale"):
            scale = getattr(module, f"_{name}", getattr(module, name, None))
            if isinstance(scale, Tensor | float):
                yield f"{path}.{name}", torch.as_tensor(scale).detach().float().reshape(-1).cpu()


# Outputs -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def outputs(
    model: nn.Module,
    folder: str | Path,
    *,
    rank: int | None = None,
    names: Names = None,
    only: str = LAYERS,
    seed: int = 0,
) -> Iterator[None]:
    """Record the tokens that a model computes, outputs of its layers and log-probabilities.

    Let it compute one request. Code that is compiled or replayed from a graph calls no hooks:
    start vLLM with enforce_eager=True, and SGLang with --disable-cuda-graph.

    only  pattern of the modules whose outputs are sampled: those that each rank has as a whole
    """
    recorder = _Recorder(seed)
    names = names or checkpoint_names(model)
    handles = []
    for path, module in model.named_modules():
        name = rename(path, names)
        if _EMBEDDING.search(name):
            handles.append(module.register_forward_pre_hook(recorder.take_tokens, with_kwargs=True))
        if re.search(only, name):
            handles.append(module.register_forward_hook(recorder.taker(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    rank = _rank() if rank is None else rank
    path = Path(folder) / f"outputs-rank{rank:05d}.safetensors"
    about = {"rank": rank, "seed": seed, "modules": list(recorder.values)}
    _write(path, recorder.tensors(), about)


class _Recorder:
    """Sampled outputs of modules, call by call, and the tokens that they are of."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.values: dict[str, list[Tensor]] = {}

    def take_tokens(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        ids = next((x for x in inputs if not x.is_floating_point()), None)
        if ids is not None:
            self.tokens.append(ids.detach().long().cpu())

    def taker(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def take(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            values = _summed(output)
            if values is None:
                return
            rows = values.detach().reshape(-1, values.shape[-1])
            columns = sampled_places(rows.shape[1], COLUMNS, self.seed).to(rows.device)
            self.values.setdefault(name, []).append(rows[:, columns].float().cpu())
            if _HEAD.search(name) and self.tokens and self.tokens[-1].numel() == len(rows):
                self.logprobs.append(_token_logprobs(rows, self.tokens[-1]))

        return take

    def tensors(self) -> dict[str, Tensor]:
        if not (self.tokens and self.values):
            raise ValueError(
                "no call was recorded: compute a request inside of `with outputs(...)`, by code "
                "that is not compiled and no replayed graph."
            )
        parts = {f"output/{name}": torch.cat(calls) for name, calls in self.values.items()}
        parts["tokens"] = torch.cat([ids.reshape(-1) for ids in self.tokens])
        starts = [torch.arange(ids.numel()) % ids.shape[-1] == 0 for ids in self.tokens]
        parts["starts"] = torch.cat(starts).to(torch.uint8)
        if sum(map(len, self.logprobs)) == len(parts["tokens"]):
            parts["logprobs"] = torch.cat(self.logprobs)
        return parts


def _summed(output: Any) -> Tensor | None:
    """Return what a module adds up to: layers of engines return a part and the residual."""
    if isinstance(output, Tensor):
        return output
    parts = [x for x in output if isinstance(x, Tensor)] if isinstance(output, tuple | list) else []
    if len(parts) == 2 and parts[0].shape == parts[1].shape:
        return parts[0] + parts[1]
    return parts[0] if parts else getattr(output, "logits", None)


def _token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each token given those before it; NaN for first ones."""
    logs = torch.log_softmax(logits.float(), -1).cpu().reshape(*ids.shape, -1)
    result = torch.full(ids.shape, torch.nan)
    result[..., 1:] = logs[..., :-1, :].gather(-1, ids[..., 1:, None])[..., 0]
    return result.reshape(-1)


# Engines -----------------------------------------------------------------------------------------


class WorkerExtension:
    """Methods that vLLM's workers get by `worker_extension_cls`; called by `collective_rpc`."""

    model_runner: Any

    def qgate_snapshot(self, folder: str, step: int | None = None) -> str:
        """Write the weights that this worker holds."""
        return str(snapshot(self.model_runner.model, folder, step))

    def qgate_outputs_start(self, folder: str) -> None:
        """Record what the worker computes from now on."""
        self._qgate_outputs = outputs(self.model_runner.model, folder)
        self._qgate_outputs.__enter__()

    def qgate_outputs_stop(self) -> None:
        """Write what was recorded."""
        self._qgate_outputs.__exit__(None, None, None)


def sglang_snapshot(model: Any, named_tensors: Any) -> None:
    """Load weights, if SGLang is given any, and write what the model then holds.

    The folder is named by QGATE_PROBE, the step of the trainer by QGATE_PROBE_STEP.
    """
    if named_tensors := list(named_tensors):
        model.load_weights(named_tensors)
    _snapshot_by_environment(model)


def vllm_plugin() -> None:
    """Write what a worker of vLLM has loaded, where QGATE_PROBE names a folder.

    vLLM calls it in each of its processes: it is an entry point in `vllm.general_plugins`. Of a
    model and a drafter that one worker loads, the model is written, which is the first.
    """
    if not os.environ.get("QGATE_PROBE"):
        return
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader")
    plain = loaders.BaseModelLoader.load_model
    if getattr(plain, "is_probed", False):
        return

    @functools.wraps(plain)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = plain(self, *args, **kwargs)
        loaders.BaseModelLoader.load_model = plain
        _snapshot_by_environment(model)
        return model

    load_model.is_probed = True  # type: ignore[attr-defined]
    loaders.BaseModelLoader.load_model = load_model


def _snapshot_by_environment(model: Any) -> None:
    step = os.environ.get("QGATE_PROBE_STEP")
    folder = os.environ.get("QGATE_PROBE")
    if not folder:
        raise ValueError("set QGATE_PROBE to the folder that snapshots are written to.")
    snapshot(model, folder, None if step is None else int(step))


# Files -------------------------------------------------------------------------------------------


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> Path:
    """Write a safetensors file as a whole: it gets its name when it is complete."""
    note = json.dumps({"qgate": "probe", "version": VERSION, **about}).encode()
    parts = {"about": torch.tensor(list(note), dtype=torch.uint8), **tensors}
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in parts.items():
        end = offset + tensor.numel() * tensor.element_size()
        entry = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in parts.values():
            file.write(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data))
    unfinished.replace(path)
    return path
