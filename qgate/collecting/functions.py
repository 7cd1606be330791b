"""Attention that is a function and no module: seen wherever a module of the model calls it.

The functions are replaced by ones that look on, in every module of Python that holds them under
some name, and put back afterwards. A mode of torch functions would see them too, but while one is
active some modules take another, slower path with other last bits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = (
    ("torch.nn.functional", "scaled_dot_product_attention"),
    ("flash_attn", "flash_attn_func"),
    ("torch_npu", "npu_fusion_attention"),
)
"""Where an attention function lives, and its name; the first three arguments are q, k and v."""

_ROLES = (("query", "query", "q"), ("key", "key", "k"), ("value", "value", "v"))
_TOLD = ("dropout_p", "is_causal", "causal", "scale", "softmax_scale", "enable_gqa", "head_num")
_ORDER = {
    "scaled_dot_product_attention": (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ),
    "flash_attn_func": ("q", "k", "v", "dropout_p", "softmax_scale", "causal"),
    "npu_fusion_attention": ("query", "key", "value", "head_num", "input_layout"),
}  # fmt: skip

Before = Callable[[str, dict[str, Tensor], dict[str, Any]], Any]
After = Callable[[Any, Any], None]


class AttentionFunctions:
    """`before(function, tensors, arguments)` and `after(what before returned, result)` around each
    call; `function` is its name."""

    def __init__(self, before: Before, after: After) -> None:
        self._listeners: tuple[Before, After] | None = (before, after)
        self._watched: list[tuple[Any, Any]] = []

    def install(self) -> None:
        for home, name in FUNCTIONS:
            original = vars(sys.modules[home]).get(name) if home in sys.modules else None
            if original is not None:
                self._watched.append((original, self._watch(name, original)))
        _replace(self._watched)

    def remove(self) -> None:
        """Modules that were imported meanwhile are put right, too."""
        _replace([(watched, original) for original, watched in self._watched])
        self._watched, self._listeners = [], None

    def _watch(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._listeners is None or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            before, after = self._listeners
            told = dict(zip(_ORDER[name], args, strict=False)) | kwargs
            taken = before(name, _tensors(args, kwargs), told)
            result = original(*args, **kwargs)
            after(taken, result)
            return result

        return watched


def _replace(pairs: list[tuple[Any, Any]]) -> None:
    """In all modules, whatever name it has there; but not where torch itself keeps its own."""
    new = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if pairs and isinstance(module, ModuleType) and not name.startswith("torch._"):
            for known, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, known, new[id(value)])


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for place, (role, *names) in enumerate(_ROLES):
        given = args[place] if place < len(args) else None
        for name in names:
            given = kwargs.get(name, given)
        if isinstance(given, Tensor):
            found[role] = given
    return found


def told_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a record says of a call besides its tensors."""
    told = {name: arguments[name] for name in _TOLD if arguments.get(name)}
    mask = arguments.get("attn_mask")
    return told | ({"attn_mask_shape": list(mask.shape)} if isinstance(mask, Tensor) else {})


def attention_weights(
    function: str, tensors: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> Tensor:
    """The weights, computed anew: a fused attention never holds them. Without dropout."""
    query, key = tensors["query"].detach().float(), tensors["key"].detach().float()
    if function == "flash_attn_func":
        return _flash_weights(query, key, arguments).to(tensors["query"].dtype)
    if function != "scaled_dot_product_attention":
        raise TypeError(f"{function} does not say how its weights are made: none are kept")
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        if arguments.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        scale = arguments.get("scale") or query.shape[-1] ** -0.5
        scores = query @ key.transpose(-2, -1) * scale
        mask = arguments.get("attn_mask")
        if arguments.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if isinstance(mask, Tensor):
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, float("-inf"))
            else:
                scores = scores + mask.detach().float()
        weights: Tensor = scores.softmax(-1).to(tensors["query"].dtype)
        return weights


def _flash_weights(query: Tensor, key: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Here heads come after tokens, and a causal mask ends with the last key."""
    window = tuple(arguments.get("window_size", (-1, -1)))
    slopes = arguments.get("alibi_slopes")
    if window != (-1, -1) or arguments.get("softcap") or slopes is not None:
        raise TypeError("flash_attn_func with a window, soft cap or slopes: no weights are kept")
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scale = arguments.get("softmax_scale") or query.shape[-1] ** -0.5
        scores = query @ key.transpose(-2, -1) * scale
        if arguments.get("causal"):
            there = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(~there.tril(key.shape[-2] - query.shape[-2]), float("-inf"))
        weights: Tensor = scores.softmax(-1)
        return weights
