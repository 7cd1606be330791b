"""Training of the tiny models on the training part of the built-in language."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from qgate.hooks.module_hooks import ModuleHooks
from qgate.models.experts import FusedExperts
from qgate.models.llama import Llama
from qgate.models.mamba.network import Mamba
from qgate.models.moe import Mixture, Moe
from qgate.models.text import byte_ids

BATCH, TOKENS = 8, 512
_WARM_UP = 0.04
_BALANCE = 0.02
"""Weight of the loss that spreads tokens over experts."""


@dataclass
class TrainingCurve:
    """Bits per byte of the training batches, and of the held-out text now and then."""

    trained: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)


def fit(
    network: nn.Module,
    text: str,
    held_out: str,
    *,
    steps: int,
    rate: float,
    seed: int,
    on_step: Callable[[int, TrainingCurve], None],
) -> TrainingCurve:
    """Train in place and call `on_step` after every step."""
    initialize(network, seed)
    ids = byte_ids(text)
    draw = torch.Generator().manual_seed(seed)
    fused = {p for m in network.modules() if isinstance(m, FusedExperts) for p in m.parameters()}
    decayed = [p for p in network.parameters() if p.dim() == 2 or p in fused]
    not_decayed = [p for p in network.parameters() if p.dim() != 2 and p not in fused]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": not_decayed, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.95),
    )
    curve = TrainingCurve()
    network.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * _schedule(step / steps)
        starts = torch.randint(len(ids) - TOKENS - 1, (BATCH,), generator=draw).tolist()
        batch = torch.stack([ids[start : start + TOKENS + 1] for start in starts])
        with _RoutedTokens(network) as routed:
            loss = nats(network, batch) + routed.imbalance()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        curve.trained.append(loss.item() / math.log(2))
        if step == steps or step % 100 == 0:
            curve.held_out[step] = bits_per_byte(network, held_out)
        on_step(step, curve)
    network.eval()
    return curve


class _RoutedTokens:
    """The logits of all routers of one pass, and how far their tokens are from evenly spread."""

    def __init__(self, network: nn.Module) -> None:
        self._mixtures = [m for m in network.modules() if isinstance(m, Mixture)]
        self._logits: list[Tensor] = []
        self._hooks = ModuleHooks()

    def __enter__(self) -> _RoutedTokens:
        for mixture in self._mixtures:
            self._hooks.add(
                mixture.router, after=lambda _m, _a, logits: self._logits.append(logits)
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def imbalance(self) -> Tensor | float:
        """Return the load balancing loss of the Switch Transformer, mean over the routers."""
        losses = []
        for mixture, logits in zip(self._mixtures, self._logits, strict=True):
            shares = torch.softmax(logits.flatten(0, -2), -1)
            _, chosen = shares.topk(mixture.top_k, -1)
            counts = torch.bincount(chosen.flatten(), minlength=shares.shape[-1])
            load = counts / counts.sum()
            losses.append(shares.shape[-1] * (load * shares.mean(0)).sum())
        return _BALANCE * sum(losses) / len(losses) if losses else 0.0


def _schedule(done: float) -> float:
    if done < _WARM_UP:
        return done / _WARM_UP
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


def nats(network: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy of every token given those before it in its row."""
    logits = network(batch[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def bits_per_byte(network: nn.Module, text: str, tokens: int = TOKENS) -> float:
    """Measure the whole text, cut into rows of `tokens` + 1."""
    ids = byte_ids(text)
    rows = ids[: len(ids) // (tokens + 1) * (tokens + 1)].view(-1, tokens + 1)
    with torch.no_grad():
        parts = [nats(network, part).item() * len(part) for part in rows.split(BATCH)]
    return sum(parts) / len(rows) / math.log(2)


def initialize(network: nn.Module, seed: int) -> None:
    """Draw small normal weights, smaller where a layer writes to the residual stream."""
    draw = torch.Generator().manual_seed(seed)
    layers = sum(1 for name, _ in network.named_modules() if name.rsplit(".", 1)[-1].isdigit())
    with torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes = name.endswith(("out_proj", "o_proj", "down_proj"))
                std = 0.02 if isinstance(module, nn.Embedding) else module.in_features**-0.5 / 2
                module.weight.normal_(
                    0, std / math.sqrt(2 * layers) if writes else std, generator=draw
                )
            if name.endswith("dt_proj") and isinstance(module, nn.Linear):
                step = torch.empty_like(module.bias).uniform_(
                    math.log(1e-3), math.log(0.1), generator=draw
                )
                module.bias.copy_(torch.log(torch.expm1(step.exp())))
            if isinstance(module, FusedExperts):
                for weight, writes in ((module.gate_up_proj, False), (module.down_proj, True)):
                    std = weight.shape[-1] ** -0.5 / 2
                    weight.normal_(
                        0, std / math.sqrt(2 * layers) if writes else std, generator=draw
                    )


def strengthen_outliers(network: nn.Module, factor: float = 16.0) -> None:
    """Make a few channels large where they are read, and the weights that read them small.

    Large channels are what makes a real model hard to quantize and what training at this size
    hardly produces. Factors are powers of two, so the network computes the very same function.
    """
    pairs: list[tuple[str, str]] = []
    if isinstance(network, Mamba):
        pairs = [("norm", "mixer.in_proj")]
    elif isinstance(network, Moe):
        pairs = [("input_layernorm", "self_attn.q_proj self_attn.k_proj self_attn.v_proj")]
        pairs += [("post_attention_layernorm", "mlp.router mlp.experts.gate_up_proj")]
    elif isinstance(network, Llama):
        attention = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
        pairs = [("input_layernorm", attention)]
        pairs += [("post_attention_layernorm", "mlp.gate_proj mlp.up_proj")]
        pairs += [("mlp.up_proj", "mlp.down_proj")]
    blocks = [m for name, m in network.named_modules() if name.rpartition(".")[2].isdigit()]
    with torch.no_grad():
        for block in blocks:
            for written, read in pairs:
                weights = [_weight_of(block, name) for name in read.split()]
                _rescale(_weight_of(block, written), weights, factor)
        for fused in (m for m in network.modules() if isinstance(m, FusedExperts)):
            for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
                _rescale(gate_up.chunk(2)[1], [down], factor)


def _weight_of(block: nn.Module, name: str) -> nn.Parameter:
    """Return the weight of a layer, or a fused weight itself."""
    is_fused = isinstance(block.get_submodule(name.rpartition(".")[0]), FusedExperts)
    return block.get_parameter(name if is_fused else f"{name}.weight")


def _rescale(written: Tensor, read: Sequence[Tensor], factor: float, channels: int = 2) -> None:
    """Enlarge the largest channels: they are rows of `written`, columns of `read`."""
    size = written.abs() if written.dim() == 1 else written.square().sum(1)
    for channel in size.topk(channels).indices.tolist():
        written[channel] *= factor
        for weight in read:
            weight[..., channel] /= factor


def unigram_bits(train: bytes, text: bytes) -> float:
    """Return bits per byte of `text` under the byte frequencies of `train`, plus one each."""
    counts = np.bincount(np.frombuffer(train, np.uint8), minlength=256) + 1.0
    return float(-np.log2(counts / counts.sum())[np.frombuffer(text, np.uint8)][1:].mean())


def bigram_bits(train: bytes, text: bytes) -> float:
    """Return the same for each byte given the one before, backed by the byte frequencies."""
    train_ids = np.frombuffer(train, np.uint8).astype(np.int64)
    single = np.bincount(train_ids, minlength=256) + 1.0
    pairs = np.bincount(train_ids[:-1] * 256 + train_ids[1:], minlength=65536).reshape(256, 256)
    backed = pairs + single / single.sum()
    bits = -np.log2(backed / backed.sum(1, keepdims=True))
    text_ids = np.frombuffer(text, np.uint8)
    return float(bits[text_ids[:-1], text_ids[1:]].mean())
