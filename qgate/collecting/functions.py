"""Attention functions, observed wherever a module of the model calls them.

Wrappers replace the functions in every Python module that has them under some name, until they are
put back. A torch function mode would see the calls too, but under one some modules take another,
slower path with other last bits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = (
    ("torch.nn.functional", "scaled_dot_product_attention"),
    ("flash_attn", "flash_attn_func"),
    ("torch_npu", "npu_fusion_attention"),
)
"""Module and name of attention functions, whose first three arguments are q, k and v."""

_ROLES = ("query", "key", "value")  # or their first letters
_DETAILS = ("dropout_p", "is_causal", "causal", "scale", "softmax_scale", "enable_gqa", "head_num")
_ORDER = {
    "scaled_dot_product_attention": (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ),
    "flash_attn_func": ("q", "k", "v", "dropout_p", "softmax_scale", "causal"),
    "npu_fusion_attention": ("query", "key", "value", "head_num", "input_layout"),
}  # fmt: skip

Before = Callable[[str, dict[str, Tensor], dict[str, object]], Any]
After = Callable[[Any, Any], None]


class AttentionFunctions:
    """Calls `before(name, tensors, arguments)` and `after(token, result)` around each function.

    The token is the value that `before` returned.
    """

    def __init__(self, before: Before, after: After) -> None:
        self._listeners: tuple[Before, After] | None = (before, after)
        self._replaced: list[tuple[Any, Any]] = []

    def install(self) -> None:
        for home, name in FUNCTIONS:
            original = vars(sys.modules[home]).get(name) if home in sys.modules else None
            if original is not None:
                self._replaced.append((original, self._watch(name, original)))
        replace_everywhere(self._replaced)

    def remove(self) -> None:
        """Put the functions back, also in modules that were imported meanwhile."""
        replace_everywhere([(wrapper, original) for original, wrapper in self._replaced])
        self._replaced, self._listeners = [], None

    def _watch(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._listeners is None or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            before, after = self._listeners
            arguments = dict(zip(_ORDER[name], args, strict=False)) | kwargs
            token = before(name, _tensors(arguments), arguments)
            result = original(*args, **kwargs)
            after(token, result)
            return result

        return wrapper


class ScriptFunctions:
    """Compiles modules to TorchScript without the hooks that `hidden` takes off them."""

    def __init__(self, hidden: Callable[[], AbstractContextManager[None]]) -> None:
        self._hidden = hidden
        self._replaced: list[tuple[Any, Any]] = []

    def install(self) -> None:
        originals = (torch.jit.script, torch.jit.trace, torch.jit.trace_module)
        self._replaced = [(original, self._without_hooks(original)) for original in originals]
        replace_everywhere(self._replaced)

    def remove(self) -> None:
        replace_everywhere([(wrapper, original) for original, wrapper in self._replaced])
        self._replaced = []

    def _without_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        names_frames = original is torch.jit.script

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if names_frames and len(args) < 3:  # it looks names up where it was called
                kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
            with self._hidden():
                return original(*args, **kwargs)

        return wrapper


def replace_everywhere(pairs: list[tuple[Any, Any]]) -> None:
    """Replace objects in all modules, under any name, except in those of torch itself."""
    new = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if pairs and isinstance(module, ModuleType) and not name.startswith("torch._"):
            for attribute, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, attribute, new[id(value)])


def _tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    by_role = {role: arguments.get(role, arguments.get(role[0])) for role in _ROLES}
    return {role: value for role, value in by_role.items() if isinstance(value, Tensor)}


def details_of(arguments: Mapping[str, Any]) -> dict[str, object]:
    """Return the arguments of a call that a record keeps."""
    details = {name: arguments[name] for name in _DETAILS if arguments.get(name)}
    mask = arguments.get("attn_mask")
    return details | ({"attn_mask_shape": list(mask.shape)} if isinstance(mask, Tensor) else {})


def attention_weights(
    function: str, tensors: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> Tensor:
    """Compute the weights again, without dropout, as a fused attention never stores them."""
    is_flash = function == "flash_attn_func"
    if not is_flash and function != "scaled_dot_product_attention":
        raise TypeError(f"{function} does not say how its weights are made: none are kept")
    window, slopes = tuple(arguments.get("window_size", (-1, -1))), arguments.get("alibi_slopes")
    if is_flash and (window != (-1, -1) or arguments.get("softcap") or slopes is not None):
        raise TypeError("flash_attn_func with a window, soft cap or slopes: no weights are kept")
    query, key = tensors["query"].detach().float(), tensors["key"].detach().float()
    mask, offset = arguments.get("attn_mask"), 0
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        if is_flash:  # heads come after tokens, and a causal mask ends with the last key
            query, key = query.transpose(1, 2), key.transpose(1, 2)
            mask, offset = None, key.shape[-2] - query.shape[-2]
        if (is_flash or arguments.get("enable_gqa")) and key.shape[-3] != query.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        scale = arguments.get("softmax_scale" if is_flash else "scale") or query.shape[-1] ** -0.5
        scores = query @ key.transpose(-2, -1) * scale
        if arguments.get("causal" if is_flash else "is_causal"):
            whole = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            mask = whole.tril(offset)
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif isinstance(mask, Tensor):
            scores = scores + mask.detach().float()
        weights: Tensor = scores.softmax(-1).to(tensors["query"].dtype)
        return weights
