"""The blocks of a model: the modules that are gated one by one, as layers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import groupby

from torch import Tensor, nn

from qgate.models.sites import kind_of

_LEAVES = ("linear", "conv", "recurrent", "attention")
_FEW = 3
"""A list of mixed modules is one of blocks from this many of one class on."""


def blocks_of(root: nn.Module, inside: re.Pattern[str]) -> tuple[str, ...]:
    """Return the modules of the lists that repeat one class, in the order of registration.

    A list inside a block is part of it, unless it is the longer one, as stages hold blocks.
    """
    return tuple(_blocks(root, "", inside))


def leaves_of(root: nn.Module, inside: re.Pattern[str]) -> tuple[str, ...]:
    """Return the layers of a model without blocks: its smallest modules that multiply."""
    names: list[str] = []
    for name, module in root.named_modules():
        is_part = any(name.startswith(f"{outer}.") for outer in names[-1:])
        if name and not is_part and kind_of(module) in _LEAVES and inside.search(name):
            names.append(name)
    return tuple(names)


def _blocks(module: nn.Module, name: str, inside: re.Pattern[str]) -> list[str]:
    children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
    inner = [_blocks(child, child_name, inside) for child_name, child in children]
    own = [child for child in _listed(module, name) if inside.search(child)]
    if own and max(map(_longest, inner), default=0) <= len(own):
        return own
    return [block for blocks in inner for block in blocks]


def _longest(blocks: list[str]) -> int:
    """Return the length of the longest list among blocks."""
    return max((len(list(of)) for _, of in groupby(blocks, lambda n: n.rpartition(".")[0])),
               default=0)  # fmt: skip


def _listed(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the blocks of a list; a list of plain layers is part of one block, as experts are."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or name.endswith("experts"):
        return
    children = {
        key: child
        for key, child in module.named_children()
        if any(True for _ in child.parameters())
    }
    kinds = [type(child) for child in children.values()]
    most = max((kinds.count(kind) for kind in kinds), default=0)
    if not kinds or (most < len(kinds) and (most < _FEW or 3 * most < 2 * len(kinds))):
        return
    has_code = [
        (kind_of(child) == "other" or any(True for _ in child.children()))
        and not isinstance(child, nn.EmbeddingBag)
        for child in children.values()
    ]
    if all(has_code):
        yield from (f"{name}.{key}".lstrip(".") for key in children)


def whole_copy(module: nn.Module) -> nn.Module:
    """Copy modules; a weight that a hook computes at each call is a plain tensor in the copy."""
    return copy.deepcopy(module, _computed(module))


def _computed(module: nn.Module) -> dict[int, object]:
    """Return what modules hold beside parameters and is no leaf, by id: torch copies none of it."""
    attributes = [value for of in module.modules() for value in vars(of).values()]
    tensors = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    return {id(tensor): tensor.detach().clone() for tensor in tensors}


def sharing_copy(module: nn.Module) -> nn.Module:
    """Copy the modules around the same parameters and buffers."""
    shared: dict[int, object] = {id(p): p for p in module.parameters()}
    shared |= {id(b): b for b in module.buffers()}
    return copy.deepcopy(module, shared | _computed(module))
