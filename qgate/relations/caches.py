"""Caches of decoders: how a model is called with the tokens it has seen already.

Two ways are taken: a network with `new_cache()` whose `forward` takes `cache` and fills it, and one
that takes `past_key_values` and returns them, as those of transformers do; `cache_params`, if it
keeps recurrent states alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgate.hooks import ModuleHooks
from qgate.models import Model
from qgate.models.rows import MASK

NO_CACHE = "the model has no cache: no new_cache() beside forward(ids, cache), no past_key_values"
POSITIONS = "position_ids"
_PAST = ("past_key_values", "cache_params")


@dataclass(frozen=True)
class TextCalls:
    """Calls of a model that reads token ids: the names of what it takes beside them."""

    network: nn.Module
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: Model) -> TextCalls:
        """Read the signature of a model."""
        try:
            names = tuple(inspect.signature(model.module.forward).parameters)
        except (TypeError, ValueError):
            names = ()
        return cls(model.module, names)

    @property
    def has_mask(self) -> bool:
        """Tell if padding can be marked."""
        return MASK in self.names

    @property
    def keeps_cache(self) -> bool:
        """Tell if the model has a cache of one of the two ways."""
        return self._makes_cache or bool(self.past)

    @property
    def promises_order(self) -> bool:
        """Tell if the network says that no token depends on later ones, whatever it does."""
        return self._makes_cache or type(self.network).__name__.endswith("ForCausalLM")

    @property
    def past(self) -> str:
        """Return the name of the cache that a model of transformers takes; empty without one."""
        return next((name for name in _PAST if name in self.names), "")

    @property
    def _makes_cache(self) -> bool:
        return callable(getattr(self.network, "new_cache", None)) and "cache" in self.names

    def padded(self, ids: Tensor, mask: Tensor) -> Any:
        """Return a sample of rows with padding; positions count from the first real token."""
        if not self.has_mask:
            return ids
        sample: dict[str, Tensor] = {self.names[0]: ids, MASK: mask.long()}
        if POSITIONS in self.names:
            sample[POSITIONS] = (mask.long().cumsum(-1) - 1).clamp_min(0)
        return sample

    def start(self) -> Any:
        """Return an empty cache; None where the first call returns one."""
        return self.network.new_cache() if self._makes_cache else None  # type: ignore[operator]

    def next(self, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Any:
        """Return the sample of the tokens that follow those in a cache.

        A mask tells padding from tokens, those in the cache among them.
        """
        sample = {self.names[0]: ids, "cache": cache}
        if not self._makes_cache:
            sample = {self.names[0]: ids, self.past: cache, "use_cache": True}
        if mask is not None:
            # Recurrent states alone have no place for a token: only the new ones are masked.
            mask = mask[:, -ids.shape[1] :] if self.past == _PAST[1] else mask
            padded = self.padded(ids, mask)
            sample = padded | sample
            if POSITIONS in padded:
                sample[POSITIONS] = padded[POSITIONS][:, -ids.shape[1] :]
        return {name: value for name, value in sample.items() if name in self.names}


class CachedRequest:
    """A request in progress: its cache, kept up as calls return it."""

    def __init__(self, calls: TextCalls, cache: Any = None) -> None:
        self.calls = calls
        self.cache = calls.start() if cache is None else cache

    def sample(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        """Return the sample of the next tokens of all rows; a mask tells padding from tokens."""
        return self.calls.next(ids, self.cache, mask)

    def watch(self) -> ModuleHooks:
        """Take the cache that the next call returns."""
        hooks = ModuleHooks()

        def take(_module: nn.Module, _args: Any, result: Any) -> None:
            returned = getattr(result, self.calls.past, None)
            if returned is None and isinstance(result, Mapping):
                returned = result.get(self.calls.past)
            self.cache = self.cache if returned is None else returned

        hooks.add(self.calls.network, None, take)
        return hooks

    def fork(self) -> CachedRequest:
        """Return a request that goes on from the same tokens by itself."""
        with torch.no_grad():
            return CachedRequest(self.calls, copy.deepcopy(self.cache))
