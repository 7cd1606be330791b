"""Copies of networks around the same parameters."""

from __future__ import annotations

import copy

from torch import nn


def sharing_copy(module: nn.Module) -> nn.Module:
    """Copy the modules around the same parameters and buffers."""
    shared: dict[int, object] = {id(p): p for p in module.parameters()}
    shared |= {id(b): b for b in module.buffers()}
    return copy.deepcopy(module, shared)
