"""Stand-ins for the modules of vLLM and SGLang: names, attributes and layouts of loaded weights.

They are written anew from a reading of both projects' linear layers, embeddings and fused experts,
and load tensors of a checkpoint as their loaders do: each rank takes its rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
Fp8 = Literal["", "block", "tensor", "channel"]
LARGEST = 448.0
BLOCK = 32


def _plain(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.clone(), requires_grad=False)


def quantized(weight: Tensor, kind: Fp8, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Return FP8 codes of a weight and its scales: one per block, per row, or for all of it."""
    wide = weight.float()
    if kind == "block":
        height, width = (-(-size // block) * block for size in weight.shape)
        padded = nn.functional.pad(wide, (0, width - weight.shape[1], 0, height - weight.shape[0]))
        tiles = padded.reshape(height // block, block, width // block, block)
        scales = tiles.abs().amax((1, 3)).clamp_min(1e-12) / torch.tensor(LARGEST)
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
    elif kind == "channel":
        scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / torch.tensor(LARGEST)
        spread = scales
    else:
        scales = (wide.abs().amax() / torch.tensor(LARGEST)).reshape(1)
        spread = scales
    return (wide / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


class LinearBase(nn.Module):
    """A linear layer that is divided over ranks."""

    def __init__(self, input_size: int, output_size: int, rank: int, size: int) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.tp_rank, self.tp_size = rank, size
        self.weight_block_size = [BLOCK, BLOCK]

    def hold(self, weight: Tensor, fp8: Fp8) -> None:
        """Keep a shard as the method of the layer does: FP8 per tensor is turned."""
        if not fp8:
            self.weight = _plain(weight)
            return
        codes, scales = quantized(weight, fp8)
        name = "weight_scale_inv" if fp8 == "block" else "weight_scale"
        self.weight = nn.Parameter(codes if fp8 == "block" else codes.t(), requires_grad=False)
        self.register_parameter(name, _plain(scales))


class ReplicatedLinear(LinearBase):
    """A linear layer that every rank has as a whole."""


class ColumnParallelLinear(LinearBase):
    """A linear layer whose outputs are divided."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several linear layers of one input, each divided and then joined."""

    def __init__(self, input_size: int, sizes: list[int], rank: int, size: int) -> None:
        super().__init__(input_size, sum(sizes), rank, size)
        self.output_sizes = sizes

    def load(self, weights: list[Tensor], fp8: Fp8) -> None:
        parts = [weight.chunk(self.tp_size)[self.tp_rank] for weight in weights]
        self.hold(torch.cat(parts), fp8)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value by heads; a key or value head may be on several ranks."""

    def __init__(
        self, hidden: int, head_size: int, heads: int, kv_heads: int, rank: int, size: int
    ) -> None:
        self.num_heads = heads // size
        self.num_kv_heads = max(1, kv_heads // size)
        self.num_kv_head_replicas = max(1, size // kv_heads)
        rows = (self.num_heads + 2 * self.num_kv_heads) * size * head_size
        super().__init__(hidden, rows, rank, size)
        self.head_size, self.hidden_size = head_size, hidden
        self.total_num_heads, self.total_num_kv_heads = heads, kv_heads

    def load(self, weights: list[Tensor], fp8: Fp8) -> None:
        parts = []
        for number, weight in enumerate(weights):
            heads = self.num_heads if number == 0 else self.num_kv_heads
            replicas = 1 if number == 0 else self.num_kv_head_replicas
            rows = heads * self.head_size
            parts.append(weight.narrow(0, self.tp_rank // replicas * rows, rows))
        joined = torch.cat(parts)
        if joined.dim() == 1:
            self.bias = _plain(joined)
        else:
            self.hold(joined, fp8)


class RowParallelLinear(LinearBase):
    """A linear layer whose inputs are divided."""

    def load(self, weight: Tensor, fp8: Fp8) -> None:
        self.hold(weight.chunk(self.tp_size, 1)[self.tp_rank], fp8)


class VocabParallelEmbedding(nn.Module):
    """An embedding whose entries are divided, and padded at the end of each rank."""

    def __init__(self, weight: Tensor, rank: int, size: int) -> None:
        super().__init__()
        self.org_vocab_size = len(weight)
        rows = -(-len(weight) // size)
        first, last = rank * rows, min((rank + 1) * rows, len(weight))
        self.shard_indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
        padding = torch.zeros(rows - (last - first) + 2, weight.shape[1], dtype=weight.dtype)
        self.weight = _plain(torch.cat([weight[first:last], padding]))


class ParallelLMHead(VocabParallelEmbedding):
    """The head, divided as the embedding is."""


class Experts(nn.Module):
    """Experts stacked: gate and up above each other, and down.

    numbers  of the experts on this rank
    share    which part of each expert the rank has, and of how many
    """

    def __init__(
        self, weights: State, numbers: list[int], fp8: Fp8, share: tuple[int, int] = (0, 1),
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight_block_size = [BLOCK, BLOCK]
        rank, size = share
        w13, w2 = [], []
        for expert in numbers:
            *above, down = (weights[f"{expert}.{name}.weight"] for name in names if name)
            w13.append(torch.cat([part.chunk(size)[rank] for part in above]))
            w2.append(down.chunk(size, 1)[rank])
        self._hold("w13_weight", w13, fp8)
        self._hold("w2_weight", w2, fp8)

    def _hold(self, name: str, weights: list[Tensor], fp8: Fp8) -> None:
        if not fp8:
            self.register_parameter(name, _plain(torch.stack(weights)))
            return
        codes, scales = zip(*(quantized(weight, fp8) for weight in weights), strict=True)
        ending = "_scale_inv" if fp8 == "block" else "_scale"
        joined = torch.stack([x.view(torch.uint8) for x in codes]).view(torch.float8_e4m3fn)
        self.register_parameter(name, nn.Parameter(joined, requires_grad=False))
        self.register_parameter(name + ending, _plain(torch.stack(scales)))


class RoutedExperts(Experts):
    """Those of vLLM: whole experts on ranks by a map, and settings for all else."""

    def __init__(
        self, weights: State, experts: int, rank: int, size: int, fp8: Fp8, **more: object
    ) -> None:
        numbers = [e for e in range(experts) if e % size == rank]
        super().__init__(weights, numbers, fp8)
        slots = [numbers.index(e) if e in numbers else -1 for e in range(experts)]
        self.register_buffer("_expert_map", torch.tensor(slots, dtype=torch.int32))
        # Kernels of AITER read a mask in the place of the map.
        self.expert_map = torch.tensor([int(slot >= 0) for slot in slots])
        ranks = SimpleNamespace(tp_rank=0, tp_size=1, ep_rank=rank, ep_size=size)
        settings = {"num_experts": experts, "num_logical_experts": experts, "is_act_and_mul": True}
        self.moe_config = SimpleNamespace(**settings | more, moe_parallel_config=ranks)
        self.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="TRITON"))
        for part in ("gate", "up", "down"):
            setattr(self, f"ckpt_{part}_proj_name", f"{part}_proj")


class FusedMoE(Experts):
    """Those of SGLang: a part of every expert on each rank, or some experts by rank."""

    def __init__(
        self, weights: State, experts: int, rank: int, size: int, fp8: Fp8, *, by_rank: bool = False
    ) -> None:
        count = experts // size if by_rank else experts
        numbers = list(range(rank * count, (rank + 1) * count)) if by_rank else list(range(experts))
        super().__init__(weights, numbers, fp8, (0, 1) if by_rank else (rank, size))
        self.moe_tp_rank, self.moe_tp_size = (0, 1) if by_rank else (rank, size)
        self.moe_ep_rank, self.moe_ep_size = (rank, size) if by_rank else (0, 1)
        self.num_fused_shared_experts, self.layer_id = 0, 0
        self.moe_runner_config = SimpleNamespace(is_gated=True)
        self.quant_method = SimpleNamespace(load_up_proj_weight_first=False)


class RMSNorm(nn.Module):
    """A norm's weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = _plain(weight)


class Attention(nn.Module):
    """The scales of a cache in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(0.5))
        self.register_buffer("_v_scale", torch.tensor(0.25))


class Block(nn.Module):
    """A layer of the engine."""

    def __init__(self, take: Callable[[str], Tensor], weights: State, make: Make) -> None:
        super().__init__()
        rank, size, fp8 = make.rank, make.size, make.fp8
        attention = nn.Module()
        qkv = [take(f"self_attn.{part}_proj.weight") for part in "qkv"]
        head = make.head_size
        heads, kv_heads = len(qkv[0]) // head, len(qkv[1]) // head
        hidden = qkv[0].shape[1]
        attention.qkv_proj = QKVParallelLinear(hidden, head, heads, kv_heads, rank, size)
        attention.qkv_proj.load(qkv, fp8)
        if make.bias:
            attention.qkv_proj.load([take(f"self_attn.{part}_proj.bias") for part in "qkv"], fp8)
        o_proj = take("self_attn.o_proj.weight")
        attention.o_proj = RowParallelLinear(o_proj.shape[1], hidden, rank, size)
        attention.o_proj.load(o_proj, fp8)
        attention.attn = Attention()
        self.self_attn = attention
        self.mlp = nn.Module()
        experts = {k.partition("experts.")[2]: v for k, v in weights.items() if "experts." in k}
        if experts:
            gate = take("mlp.gate.weight")
            self.mlp.gate = ReplicatedLinear(hidden, len(gate), rank, size)
            self.mlp.gate.hold(gate, "")
            parts = experts, len(gate), rank, size, fp8
            self.mlp.experts = nn.Module() if make.mapped else FusedMoE(*parts)
            if make.mapped:
                self.mlp.experts.routed_experts = RoutedExperts(*parts)
        else:
            parts = [take(f"mlp.{part}_proj.weight") for part in ("gate", "up")]
            sizes = [len(part) for part in parts]
            self.mlp.gate_up_proj = MergedColumnParallelLinear(hidden, sizes, rank, size)
            self.mlp.gate_up_proj.load(parts, fp8)
            self.mlp.down_proj = RowParallelLinear(sizes[0], hidden, rank, size)
            self.mlp.down_proj.load(take("mlp.down_proj.weight"), fp8)
        self.input_layernorm = RMSNorm(take("input_layernorm.weight"))
        self.post_attention_layernorm = RMSNorm(take("post_attention_layernorm.weight"))


class Make:
    """How an engine divides and keeps the weights."""

    def __init__(
        self, rank: int = 0, size: int = 1, fp8: Fp8 = "", head_size: int = 8,
        mapped: bool = True, bias: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.fp8, self.head_size = rank, size, fp8, head_size
        self.mapped, self.bias = mapped, bias


def engine(state: State, make: Make) -> nn.Module:
    """Load a checkpoint into the modules of one rank."""
    model = nn.Module()
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"],
    }  # fmt: skip
    inner = nn.Module()
    model.model = inner
    inner.embed_tokens = VocabParallelEmbedding(
        state["model.embed_tokens.weight"], make.rank, make.size
    )
    blocks = []
    count = 1 + max(int(name.split(".")[2]) for name in state if ".layers." in name)
    for number in range(count):
        prefix = f"model.layers.{number}."
        weights = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        blocks.append(Block(weights.__getitem__, weights, make))
    inner.layers = nn.ModuleList(blocks)
    inner.norm = RMSNorm(state["model.norm.weight"])
    if "lm_head.weight" in state:
        model.lm_head = ParallelLMHead(state["lm_head.weight"], make.rank, make.size)
    return model
