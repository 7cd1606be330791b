"""A trainer of several steps and an engine that was given its weights, with faults of syncs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qgate import probe
from tests.engines.stand_ins import Make, State, engine

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCABULARY, EXPERTS = 64, 8, 8, 2, 96, 203, 4
UPDATE = 2e-5
Change = Callable[[State, State], State]


def state(layers: int = 3, experts: int = 0, seed: int = 0, bias: bool = False) -> State:
    """Draw the float32 master weights of a trainer, by the names of a checkpoint."""
    draw = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return 0.05 * torch.randn(*shape, generator=draw)

    tensors = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN)}
    for number in range(layers):
        prefix = f"model.layers.{number}."
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = weight(rows * HEAD, HIDDEN)
            if bias:
                tensors[f"{prefix}self_attn.{part}_proj.bias"] = weight(rows * HEAD)
        tensors[f"{prefix}self_attn.o_proj.weight"] = weight(HIDDEN, HEADS * HEAD)
        homes = [f"{prefix}mlp."]
        if experts:
            tensors[f"{prefix}mlp.gate.weight"] = weight(experts, HIDDEN)
            homes = [f"{prefix}mlp.experts.{expert}." for expert in range(experts)]
        for home in homes:
            tensors[f"{home}gate_proj.weight"] = weight(INNER, HIDDEN)
            tensors[f"{home}up_proj.weight"] = weight(INNER, HIDDEN)
            tensors[f"{home}down_proj.weight"] = weight(HIDDEN, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + weight(HIDDEN)
    tensors["model.norm.weight"] = 1 + weight(HIDDEN)
    tensors["lm_head.weight"] = weight(VOCABULARY, HIDDEN)
    return tensors


def updated(tensors: State, seed: int) -> State:
    """Return the master weights after a step of the optimizer."""
    draw = torch.Generator().manual_seed(seed)
    return {name: x + UPDATE * torch.randn(x.shape, generator=draw) for name, x in tensors.items()}


def halves(tensors: State) -> State:
    return {name: x.bfloat16() for name, x in tensors.items()}


def steps(
    layers: int = 3, experts: int = 0, count: int = 3, bias: bool = False
) -> dict[int, State]:
    """Return the weights of steps 40, 41 and so on."""
    states = {40: state(layers, experts, bias=bias)}
    for number in range(41, 40 + count):
        states[number] = updated(states[number - 1], number)
    return states


def write_trainer(folder: Path, states: dict[int, State]) -> str:
    """Write a checkpoint in bfloat16 per step."""
    for number, tensors in states.items():
        home = folder / f"step-{number}"
        home.mkdir(parents=True)
        save_file(halves(tensors), home / "model.safetensors")
    return str(folder)


def write_engine(
    folder: Path, tensors: State, size: int = 2, fp8: str = "", *, mapped: bool = True,
    bias: bool = False, of_rank: dict[int, State] | None = None, step: int | None = None,
) -> str:  # fmt: skip
    """Load weights into all ranks of an engine, some of other weights, and probe them."""
    for rank in range(size):
        own = halves((of_rank or {}).get(rank, tensors))
        make = Make(rank, size, fp8, HEAD, mapped, bias)  # type: ignore[arg-type]
        probe.snapshot(engine(own, make), folder, step, rank=rank)
    return str(folder)


def mixed(new: State, old: State, part: str) -> State:
    """Return new weights, but the old ones of the names with a part."""
    return {name: old[name] if part in name else x for name, x in new.items()}


class Trainer(nn.Module):
    """Modules that hold weights by the names of a checkpoint."""

    def __init__(self, tensors: State) -> None:
        super().__init__()
        for name, x in tensors.items():
            module: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(x.clone()))
