"""Attention that a mode can quantize: that of tiny-llama, and of transformers' Llama family."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.llama import Attention, rotary, rotate
from qgate.modes.attention.positions import NONE, speeds_of
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.models.model import Model

FAMILY = (
    "LlamaAttention", "MistralAttention", "MixtralAttention", "Qwen2Attention", "Qwen3Attention",
    "Qwen3MoeAttention", "GemmaAttention", "Gemma3Attention", "JambaAttention",
)  # fmt: skip
"""Classes of transformers that rotate all channels or, of Jamba, none.

Those of Qwen3 and Gemma 3 norm queries and keys before.
"""
_WITHOUT_POSITIONS, _NORMS_HEADS = ("JambaAttention",), ("Gemma3Attention",)


@dataclass(frozen=True)
class AttentionSource:
    """An attention with four projections, rotary positions, and queries that share keys.

    window   the number of tokens that a query sees, its own among them; 0 for all
    speeds   radians per token of each pair of channels; those of the base where there are none
    scaling  of scores; None for 1 over the root of the width
    """

    module: Any
    heads: int
    kv_heads: int
    width: int
    base: float
    window: int = 0
    speeds: tuple[float, ...] = ()
    scaling: float | None = None

    @property
    def norms_heads(self) -> bool:
        """Return True where norms of queries and keys see (batch, heads, tokens, width)."""
        return type(self.module).__name__ in _NORMS_HEADS

    def per_head(self, x: Tensor) -> Tensor:
        """View features of tokens, or what a norm gave, as (batch, heads, tokens, width)."""
        if x.dim() == 4:
            return x if self.norms_heads else x.transpose(1, 2)
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)  # type: ignore[no-any-return]

    def leaf(self, side: str) -> str:
        """Return the name of the module that gives q, k or v: a projection, or the norm behind."""
        norm = f"{side}_norm"
        return norm if getattr(self.module, norm, None) is not None else f"{side}_proj"

    def rope(self, x: Tensor, start: int) -> Tensor:
        """Rotate tokens by position, the first of which is at `start`."""
        cos, sin = rotary(start + x.shape[2], self.width, self.base, x.device, self.speeds)
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
    width = int(module.head_dim)  # type: ignore[arg-type]
    positions = _positions(module)
    speeds = speeds_of(positions, width)
    base = float(positions.get("rope_theta", 10000.0))
    heads = int(config.num_attention_heads)
    kv_heads = int(config.num_key_value_heads)
    if getattr(module, "attn_logit_softcapping", None) or not getattr(module, "is_causal", True):
        raise QgateError(
            "the attention of this model caps its scores or sees later tokens, which modes of the "
            "cache do not compute: choose another mode."
        )
    factor = float(getattr(module, "scaling", width**-0.5))
    scaling = None if math.isclose(factor, width**-0.5) else factor
    window = _window(module) or 0
    return AttentionSource(module, heads, kv_heads, width, base, window, speeds, scaling)


def _positions(module: nn.Module) -> Mapping[str, Any]:
    """Return the rotary positions of a layer; some models have others for each kind of layer."""
    if type(module).__name__ in _WITHOUT_POSITIONS:
        return {"rope_type": NONE}
    config: Any = module.config
    positions: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    of_layer = positions.get(getattr(module, "layer_type", None) or "")
    return of_layer if isinstance(of_layer, Mapping) else positions


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
