"""Attention that a mode can quantize: that of tiny-llama, and of transformers' Llama family."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.llama import Attention, rotary, rotate
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.models.model import Model

FAMILY = (
    "LlamaAttention", "MistralAttention", "MixtralAttention", "Qwen2Attention", "Qwen3Attention",
    "Qwen3MoeAttention",
)  # fmt: skip
"""Classes of transformers that rotate all channels; those of Qwen3 norm queries and keys before."""


@dataclass(frozen=True)
class AttentionSource:
    """An attention with four projections, rotary positions, and queries that share keys.

    window  the number of tokens that a query sees, its own among them; 0 for all
    """

    module: Any
    heads: int
    kv_heads: int
    width: int
    base: float
    window: int = 0

    def per_head(self, x: Tensor) -> Tensor:
        """View (batch, tokens, features), or heads of tokens, as (batch, heads, tokens, width)."""
        heads = x if x.dim() == 4 else x.unflatten(-1, (-1, self.width))
        return heads.transpose(1, 2)

    def leaf(self, side: str) -> str:
        """Return the name of the module that gives q, k or v: a projection, or the norm behind."""
        norm = f"{side}_norm"
        return norm if getattr(self.module, norm, None) is not None else f"{side}_proj"

    def rope(self, x: Tensor, start: int) -> Tensor:
        """Rotate tokens by position, the first of which is at `start`."""
        cos, sin = rotary(start + x.shape[2], self.width, self.base, x.device)
        return rotate(x, cos[start:], sin[start:])


def source_of(module: nn.Module) -> AttentionSource | None:
    """Return a module as attention that can be quantized; None for other modules."""
    if isinstance(module, Attention):
        return AttentionSource(
            module, module.heads, module.kv_heads, module.width, float(module.base)
        )
    if type(module).__name__ not in FAMILY:
        return None
    config: Any = module.config
    positions = getattr(config, "rope_parameters", None) or {}
    width = int(module.head_dim)  # type: ignore[arg-type]
    problems = {
        f"rotary positions of type {positions.get('rope_type')!r}": (
            positions.get("rope_type", "default") != "default"
        ),
        "rotary positions of a part of the channels": (
            (positions.get("partial_rotary_factor") or 1.0) != 1.0
        ),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise QgateError(
                f"the attention of this model has {problem}, which modes of the cache do not "
                "compute: choose another mode."
            )
    base = float(positions.get("rope_theta", 10000.0))
    heads = int(config.num_attention_heads)
    kv_heads = int(config.num_key_value_heads)
    return AttentionSource(module, heads, kv_heads, width, base, _window(module) or 0)


def _window(module: nn.Module) -> int | None:
    """Return the sliding window of a layer; those in the config are for all layers."""
    in_config = ("MistralAttention", "MixtralAttention", "Qwen3MoeAttention")
    owner: Any = module.config if type(module).__name__ in in_config else module
    window: int | None = getattr(owner, "sliding_window", None)
    return window


def named_attentions(model: Model) -> list[tuple[str, AttentionSource]]:
    """List the attentions of a model that can be quantized, by name."""
    sources = ((name, source_of(module)) for name, module in model.module.named_modules())
    attentions = [(name, source) for name, source in sources if source is not None]
    unknown = sorted({type(m).__name__ for m in model.module.modules() if _keeps_unknown_cache(m)})
    if unknown or not attentions:
        caches = f", but caches of {listed(unknown, 4)}" if unknown else ""
        raise QgateError(
            f"{model.name} has no attention whose cache can be quantized{caches}: these modes are "
            f"for tiny-llama, and for {', '.join(FAMILY)} of transformers. Choose another mode."
        )
    return attentions


def _keeps_unknown_cache(module: nn.Module) -> bool:
    """Tell if a module writes keys and values of a layer, and is none that can be quantized."""
    if source_of(module) is not None or not hasattr(module, "layer_idx"):
        return False
    return "past_key_values" in inspect.signature(module.forward).parameters and (
        "attention" in type(module).__name__.lower()
    )
