"""Layer by layer: the weights of a block are on the device while the block computes, and only then.

What lies outside the blocks (embeddings, the last norm, the head) stays on the device. Weights that
wait are never copied back: the tensors they were are put in their places again, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError

Move = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def layer_by_layer(
    root: nn.Module,
    blocks: Sequence[str],
    device: torch.device,
    move: Move | None = None,
    home: torch.device | None = None,
) -> Iterator[None]:
    """While open, `root` runs on `device` with one of its blocks there at a time; between, blocks
    are at `home`, where they are if it is not given. `move` brings a tensor to the device."""
    if not blocks:
        raise QgateError("layer by layer needs the names of a model's blocks, and there are none.")
    bring = move or (lambda tensor: tensor.to(device, non_blocking=True))
    inside = [root.get_submodule(name) for name in blocks]
    of_blocks = {id(m) for block in inside for m in block.modules()}
    outside = [m for m in root.modules() if id(m) not in of_blocks]
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    handles: list[Any] = []
    try:
        if home is not None:
            for block in inside:
                block.to(home)
        for module in outside:
            _bring(module, bring, kept)
        for block in inside:
            own: dict[int, tuple[Tensor, Tensor]] = {}
            handles += [
                block.register_forward_pre_hook(_arrives(bring, own, kept), prepend=True),
                block.register_forward_hook(_leaves(own), always_call=True),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()
        _take_back(kept)


def _bring(module: nn.Module, bring: Move, kept: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Also buffers; those of a module alone, its children come by themselves."""
    for tensor in [*module._parameters.values(), *module._buffers.values()]:
        if tensor is not None and id(tensor) not in kept:
            kept[id(tensor)] = (tensor, tensor.data)
            tensor.data = bring(tensor.data)


def _take_back(kept: dict[int, tuple[Tensor, Tensor]]) -> None:
    for tensor, data in kept.values():
        tensor.data = data
    kept.clear()


def _arrives(
    bring: Move, own: dict[int, tuple[Tensor, Tensor]], outside: dict[int, tuple[Tensor, Tensor]]
) -> Callable[..., None]:
    def hook(block: nn.Module, _args: Any) -> None:
        for module in block.modules():
            for tensor in [*module._parameters.values(), *module._buffers.values()]:
                # Shared with what stays: there already.
                if tensor is not None and id(tensor) not in own and id(tensor) not in outside:
                    own[id(tensor)] = (tensor, tensor.data)
                    tensor.data = bring(tensor.data)

    return hook


def _leaves(own: dict[int, tuple[Tensor, Tensor]]) -> Callable[..., None]:
    def hook(_block: nn.Module, _args: Any, _result: Any) -> None:
        _take_back(own)

    return hook


_FULL = 0.8
"""The part of a device's free memory that weights may take before layers come one by one."""


def fits(module: nn.Module, device: torch.device) -> bool:
    """If a model's weights leave room on a device for what it computes."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    there = next((p.device for p in module.parameters()), device)
    return there == device or bytes_of(module) <= _FULL * free


def bytes_of(root: nn.Module) -> int:
    """Of parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in [*root.parameters(), *root.buffers()]}
    return sum(t.numel() * t.element_size() for t in tensors.values())
