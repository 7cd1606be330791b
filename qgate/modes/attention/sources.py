"""Attention that a mode can quantize: that of tiny-llama, and of transformers' Llama family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.llama import Attention, rotary, rotate

if TYPE_CHECKING:
    from qgate.models.model import Model

FAMILY = ("LlamaAttention", "MistralAttention", "Qwen2Attention")
"""Classes of transformers that rotate all channels, and have no norms of queries and keys."""


@dataclass(frozen=True)
class AttentionSource:
    """An attention with four projections, rotary positions, and queries that share keys."""

    module: Any
    heads: int
    kv_heads: int
    width: int
    base: float

    def per_head(self, x: Tensor) -> Tensor:
        """View (batch, tokens, features) as (batch, heads, tokens, width)."""
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)  # type: ignore[no-any-return]

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
        "a sliding window": _window(module) is not None,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise QgateError(
                f"the attention of this model has {problem}, which modes of the cache do not "
                "compute: choose another mode."
            )
    base = float(positions.get("rope_theta", 10000.0))
    heads = int(config.num_attention_heads)
    return AttentionSource(module, heads, int(config.num_key_value_heads), width, base)


def _window(module: nn.Module) -> int | None:
    """Return the sliding window of a layer; Mistral's is in the config, for all layers."""
    owner: Any = module.config if type(module).__name__ == "MistralAttention" else module
    window: int | None = getattr(owner, "sliding_window", None)
    return window


def named_attentions(model: Model) -> list[tuple[str, AttentionSource]]:
    """List the attentions of a model that can be quantized, by name."""
    listed = ((name, source_of(module)) for name, module in model.module.named_modules())
    attentions = [(name, source) for name, source in listed if source is not None]
    if not attentions:
        raise QgateError(
            f"{model.name} has no attention whose cache can be quantized: these modes are for "
            f"tiny-llama, and for {', '.join(FAMILY)} of transformers. Choose another mode."
        )
    return attentions
