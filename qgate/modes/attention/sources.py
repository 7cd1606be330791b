"""Attention that a mode can quantize: that of tiny-llama, and of decoders of transformers."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.llama import Attention
from qgate.modes.attention.positions import NONE, RotaryPositions, positions_of
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.models.model import Model

FAMILY = (
    "ArceeAttention", "BambaAttention", "CohereAttention", "Cohere2Attention", "CwmAttention",
    "Dots1Attention", "Ernie4_5Attention", "Ernie4_5_MoeAttention", "Exaone4Attention",
    "ApertusAttention", "FalconH1Attention", "FlexOlmoAttention", "GemmaAttention",
    "Gemma2Attention", "Gemma3Attention", "GlmAttention", "Glm4Attention", "Glm4MoeAttention",
    "GraniteAttention", "GraniteMoeAttention", "GraniteMoeHybridAttention",
    "GraniteMoeSharedAttention", "HeliumAttention", "JambaAttention", "Lfm2Attention",
    "Lfm2MoeAttention", "LlamaAttention", "MiniMaxM2Attention", "MinistralAttention",
    "MistralAttention", "MixtralAttention", "NemotronAttention", "NemotronHAttention",
    "Olmo2Attention", "Olmo3Attention", "OlmoHybridAttention", "PhimoeAttention",
    "Qwen2Attention", "Qwen2MoeAttention", "Qwen3Attention", "Qwen3MoeAttention",
    "Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention", "SeedOssAttention",
    "SmolLM3Attention", "Starcoder2Attention", "Zamba2Attention",
)  # fmt: skip
"""Classes of transformers with a projection each for queries, keys and values.

Some norm queries and keys before they turn: see `AttentionSource.norms`.
"""
LATENT_FAMILY = (
    "DeepseekV2Attention", "DeepseekV3Attention", "YoutuAttention", "Glm4MoeLiteAttention",
    "MiniCPM3Attention", "KimiLinearAttention",
)  # fmt: skip
"""Classes of transformers whose cache has one latent for all heads, and a part of the keys."""
_WITHOUT_POSITIONS = ("JambaAttention", "NemotronHAttention", "KimiLinearAttention")
_NORMS_HEADS = ("Gemma3Attention", "Exaone4Attention", "ApertusAttention")
_NORMS_ALL = (
    "FlexOlmoAttention", "MiniMaxM2Attention", "Olmo2Attention", "Olmo3Attention",
    "OlmoHybridAttention",
)  # fmt: skip
_GATED = ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention")
_IN_PAIRS = (
    "CohereAttention", "Cohere2Attention", "DeepseekV2Attention", "Ernie4_5Attention",
    "Ernie4_5_MoeAttention", "GlmAttention", "Glm4Attention", "HeliumAttention",
)  # fmt: skip
"""Classes that turn channels which are neighbors, where others turn those half a head apart."""
_WINDOW_IN_CONFIG = (
    "MistralAttention", "MixtralAttention", "PhimoeAttention", "Qwen3MoeAttention",
    "Starcoder2Attention",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionSource:
    """An attention with four projections, rotary positions, and queries that share keys.

    window   the number of tokens that a query sees, its own among them; 0 for all
    scaling  of scores; None for 1 over the root of the width
    cap      the bound that scores approach, by a tanh; 0 for none
    adapter  the number of this layer's adapters, whose outputs are added; None for none
    """

    module: Any
    heads: int
    kv_heads: int
    width: int
    positions: RotaryPositions
    window: int = 0
    scaling: float | None = None
    cap: float = 0.0
    adapter: int | None = None

    parts: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "o_proj",
        "out_proj", *(f"linear_{side}_adapter_list" for side in "qkv"),
    )  # fmt: skip

    @property
    def last(self) -> str:
        """Return the name of the projection of the context."""
        return "o_proj" if hasattr(self.module, "o_proj") else "out_proj"

    @property
    def norms(self) -> Literal["tokens", "heads", "all"]:
        """Return what norms of queries and keys see.

        tokens  (batch, tokens, heads, width)
        heads   (batch, heads, tokens, width)
        all     all heads of a token as one
        """
        name = type(self.module).__name__
        return "heads" if name in _NORMS_HEADS else "all" if name in _NORMS_ALL else "tokens"

    @property
    def is_gated(self) -> bool:
        """Return True where the projection of queries gives a gate of the context as well."""
        return type(self.module).__name__ in _GATED

    def shape_of(self, side: str) -> tuple[int, int]:
        """Return the heads and the width of a tensor of attention."""
        return self.heads if side in ("queries", "output") else self.kv_heads, self.width

    def per_head(self, x: Tensor) -> Tensor:
        """View features of tokens, or what a norm gave, as (batch, heads, tokens, width)."""
        if x.dim() == 4:
            return x if self.norms == "heads" else x.transpose(1, 2)
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)  # type: ignore[no-any-return]

    def side_of(self, side: str, x: Tensor) -> Tensor:
        """Return q, k or v of all heads, of what the module gave that `leaf` names."""
        factor = getattr(self.module, "key_multiplier", 1.0) if side == "k" else 1.0
        return self.per_head(x) if factor == 1 else self.per_head(x) * factor

    def leaf(self, side: str) -> str:
        """Return the name of the module that gives q, k or v: a projection, or the norm behind."""
        names = (f"{side}_norm", f"{side}_layernorm", f"{side}_proj")
        return next(name for name in names if getattr(self.module, name, None) is not None)

    def leaves(self, side: str) -> tuple[str, ...]:
        """Return the names of the modules whose outputs add up to q, k or v."""
        if self.adapter is None:
            return (self.leaf(side),)
        return self.leaf(side), f"linear_{side}_adapter_list.{self.adapter}.1"

    def gate(self, projected: Tensor) -> Tensor:
        """Return the factors of the context, (batch, heads, tokens, width)."""
        heads = projected.unflatten(-1, (-1, 2 * self.width)).transpose(1, 2)
        return heads[..., self.width :].sigmoid()  # type: ignore[no-any-return]

    def projections(self, hidden: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return q, k and v of all heads, without positions, and the gate that comes with q."""
        sides: list[Tensor] = []
        gate = None
        for side in "qkv":
            x = self.module.get_submodule(f"{side}_proj")(hidden)
            if self.adapter is not None:
                adapters = self.module.get_submodule(f"linear_{side}_adapter_list")
                x = x + adapters[self.adapter](hidden)
            if side == "q" and self.is_gated:
                gate = self.gate(x)
                x = x.unflatten(-1, (-1, 2 * self.width))[..., : self.width].flatten(2)
            if not self.leaf(side).endswith("_proj"):
                if self.norms != "all":
                    x = x.unflatten(-1, (-1, self.width))
                    x = x.transpose(1, 2) if self.norms == "heads" else x
                x = self.module.get_submodule(self.leaf(side))(x)
            sides.append(self.side_of(side, x))
        return sides, gate


@dataclass(frozen=True)
class LatentSource(AttentionSource):
    """An attention whose cache has a latent of all heads ("values") and RoPE parts ("keys").

    Queries stand as (RoPE part, the other channels); pairs that turn are half a part apart.

    rank      channels of the latent
    in_pairs  True where projections give the channels that turn in pairs of neighbors
    """

    rank: int = 0
    in_pairs: bool = False

    parts: ClassVar[tuple[str, ...]] = (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm",
        "kv_b_proj", "o_proj",
    )  # fmt: skip

    @property
    def rope_width(self) -> int:
        return int(self.module.qk_rope_head_dim)

    def shape_of(self, side: str) -> tuple[int, int]:
        shapes = {"keys": (1, self.rope_width), "values": (1, self.rank)}
        return shapes.get(side, (self.heads, self.width))

    def leaf(self, side: str) -> str:
        queries = "q_proj" if self.module.q_lora_rank is None else "q_b_proj"
        return {"q": queries, "k": "kv_a_proj_with_mqa", "v": "kv_a_layernorm"}[side]

    def side_of(self, side: str, x: Tensor) -> Tensor:
        """Return the queries, the RoPE part of the keys, or the latent; or the context."""
        if side == "q":
            heads = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            plain = heads.shape[-1] - self.rope_width
            return torch.cat([self._halves(heads[..., plain:]), heads[..., :plain]], -1)
        if side == "k":
            return self._halves(x[..., self.rank :]).unsqueeze(1)
        return x.unsqueeze(1) if side == "v" else x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _halves(self, x: Tensor) -> Tensor:
        """Put the first channels of all pairs before the second ones."""
        return torch.cat([x[..., ::2], x[..., 1::2]], -1) if self.in_pairs else x

    def projections(self, hidden: Tensor) -> tuple[list[Tensor], Tensor | None]:
        module = self.module
        if module.q_lora_rank is None:
            queries = module.q_proj(hidden)
        else:
            queries = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
        compressed = module.kv_a_proj_with_mqa(hidden)
        sides = {
            "q": queries,
            "k": compressed,
            "v": module.kv_a_layernorm(compressed[..., : self.rank]),
        }
        return [self.side_of(side, x) for side, x in sides.items()], None

    def ups(self) -> tuple[Tensor, Tensor]:
        """Return what makes keys and values of a latent, (heads, channels, rank) each."""
        weight: Tensor = self.module.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        plain = int(self.module.qk_nope_head_dim)
        return weight[:, :plain], weight[:, plain:]


def source_of(module: nn.Module, at: str = "") -> AttentionSource | None:
    """Return a module as attention that can be quantized; None for other modules.

    at  its name in the model, which has the number of the layer
    """
    name = type(module).__name__
    if isinstance(module, Attention):
        positions = RotaryPositions(module.width, float(module.base))
        return AttentionSource(module, module.heads, module.kv_heads, module.width, positions)
    if name not in (*FAMILY, *LATENT_FAMILY):
        return None
    config: Any = module.config
    if not getattr(module, "is_causal", True):
        raise QgateError(
            "the attention of this model sees later tokens, which modes of the cache do not "
            "compute: choose another mode."
        )
    is_latent = name in LATENT_FAMILY
    width = int(module.qk_rope_head_dim if is_latent else module.head_dim)  # type: ignore[arg-type]
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    in_pairs = name in _IN_PAIRS and not is_latent
    positions = positions_of(_positions(module), width, longest, in_pairs=in_pairs)
    heads = int(config.num_attention_heads)
    if is_latent:
        in_pairs = name in _IN_PAIRS or bool(getattr(config, "rope_interleave", False))
        return LatentSource(
            module, heads, 1, int(module.qk_head_dim), positions,  # type: ignore[arg-type]
            scaling=float(module.scaling), rank=int(module.kv_lora_rank), in_pairs=in_pairs,  # type: ignore[arg-type]
        )  # fmt: skip
    factor = float(getattr(module, "scaling", width**-0.5))
    return AttentionSource(
        module,
        heads,
        int(config.num_key_value_heads),
        width,
        positions,
        _window(module) or 0,
        None if math.isclose(factor, width**-0.5) else factor,
        float(getattr(module, "attn_logit_softcapping", None) or 0),
        _adapter(module, at),
    )


def layer_of(module: nn.Module, at: str) -> int:
    """Return the layer of an attention; Zamba2's, whose weights are shared, have it in the name."""
    own: Any = getattr(module, "layer_idx", -1)
    if own is not None and own >= 0:
        return int(own)
    return next((int(part) for part in reversed(at.split(".")) if part.isdigit()), -1)


def sum_of(addends: Iterable[Tensor]) -> Tensor:
    """Add what the modules gave that `AttentionSource.leaves` names."""
    return functools.reduce(operator.add, addends)


def _adapter(module: Any, at: str) -> int | None:
    if not getattr(module.config, "use_shared_attention_adapter", False):
        return None
    number: int | None = module.layer_dic.get(layer_of(module, at))
    return number


def _positions(module: nn.Module) -> Mapping[str, Any]:
    """Return the rotary positions of a layer; some models have others for each kind of layer."""
    config: Any = module.config
    # Granite's hybrids say in their config if they have positions.
    embedding = getattr(config, "position_embedding_type", "rope")
    if type(module).__name__ in _WITHOUT_POSITIONS or embedding != "rope" or not _turns(module):
        return {"rope_type": NONE}
    positions: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = getattr(module, "layer_type", None) or getattr(module, "attention_type", "")
    of_layer = positions.get(kind or "")
    return of_layer if isinstance(of_layer, Mapping) else positions


def _turns(module: Any) -> bool:
    """Tell if the keys of this layer turn: in some models those of layers with a window alone."""
    name = type(module).__name__
    if name == "SmolLM3Attention":
        return bool(module.use_rope)
    if name == "Cohere2Attention":
        return module.sliding_window is not None
    if name == "Exaone4Attention":
        return module.sliding_window is None or bool(module.is_sliding)
    if name == "Zamba2Attention":
        return bool(module.config.use_mem_rope)
    return name != "OlmoHybridAttention" or module.config.rope_parameters is not None


def _window(module: Any) -> int | None:
    """Return the sliding window of a layer; those in the config are for all layers."""
    if not getattr(module, "is_sliding", True):
        return None
    owner = module.config if type(module).__name__ in _WINDOW_IN_CONFIG else module
    window: int | None = getattr(owner, "sliding_window", None)
    return window


def named_attentions(model: Model) -> list[tuple[str, AttentionSource]]:
    """List the attentions of a model that can be quantized, by name."""
    modules = model.module.named_modules()
    sources = ((name, source_of(module, name)) for name, module in modules)
    attentions = [(name, source) for name, source in sources if source is not None]
    unknown = sorted({type(m).__name__ for m in model.module.modules() if _keeps_unknown_cache(m)})
    if unknown or not attentions:
        caches = f", but caches of {listed(unknown, 4)}" if unknown else ""
        raise QgateError(
            f"{model.name} has no attention whose cache can be quantized{caches}: these modes are "
            f"for tiny-llama, and for {len(FAMILY) + len(LATENT_FAMILY)} classes of transformers, "
            "from LlamaAttention to DeepseekV3Attention (docs/modes.md lists them). Choose another "
            "mode."
        )
    return attentions


def _keeps_unknown_cache(module: nn.Module) -> bool:
    """Tell if a module writes keys and values of a layer, and is none that can be quantized."""
    if source_of(module) is not None or not hasattr(module, "layer_idx"):
        return False
    return "past_key_values" in inspect.signature(module.forward).parameters and (
        "attention" in type(module).__name__.lower()
    )
