"""Run layer by layer: the weights of a block are on the device only while the block computes.

Modules outside the blocks (embeddings, the last norm, the head) stay on the device. Weights are
never copied back: the original tensors are put back, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.hooks.module_hooks import After, Before, ModuleHooks

Move = Callable[[Tensor], Tensor]
_Originals = dict[int, tuple[Tensor, Tensor]]
"""Parameters and buffers by id, with their original tensors."""


@contextlib.contextmanager
def layer_by_layer(
    root: nn.Module,
    blocks: Sequence[str],
    device: torch.device,
    move: Move | None = None,
    home: torch.device | None = None,
) -> Iterator[None]:
    """While open, run `root` on `device` with one of its blocks there at a time.

    Blocks wait on `home`, or where they are without it. `move` brings a tensor to the device.
    """
    if not blocks:
        raise QgateError("layer by layer needs the names of a model's blocks, and there are none.")
    bring = move or (lambda tensor: tensor.to(device, non_blocking=True))
    inside = [root.get_submodule(name) for name in blocks]
    of_blocks = {id(m) for block in inside for m in block.modules()}
    staying: _Originals = {}
    with ModuleHooks() as hooks:
        try:
            for block in inside if home is not None else ():
                block.to(home)
            for module in root.modules():
                if id(module) not in of_blocks:
                    _bring(module, bring, staying, ())
            for block in inside:
                hooks.add(block, *_block_hooks(bring, staying), first=True, always=True)
            yield
        finally:
            _take_back(staying)


def _bring(module: nn.Module, bring: Move, originals: _Originals, staying: Container[int]) -> None:
    """Bring the tensors of a module without its children and without tensors in `staying`."""
    for tensor in [*module._parameters.values(), *module._buffers.values()]:
        if tensor is not None and id(tensor) not in originals and id(tensor) not in staying:
            originals[id(tensor)] = (tensor, tensor.data)
            tensor.data = bring(tensor.data)


def _take_back(originals: _Originals) -> None:
    for tensor, data in originals.values():
        tensor.data = data
    originals.clear()


def _block_hooks(bring: Move, staying: _Originals) -> tuple[Before, After]:
    own: _Originals = {}

    def bring_block(block: nn.Module, _args: Any, _kwargs: Any) -> None:
        for module in block.modules():
            _bring(module, bring, own, staying)

    def take_back(_block: nn.Module, _args: Any, _result: Any) -> None:
        _take_back(own)

    return bring_block, take_back


_FULL = 0.8
"""Share of a device's free memory that all weights may take at once."""


def fits(module: nn.Module, device: torch.device) -> bool:
    """Tell whether a model's weights leave room on a device for its activations."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    meant = torch.empty(0, device=device).device  # `cuda` has no number of its own
    current = next((p.device for p in module.parameters()), meant)
    return current == meant or bytes_of(module) <= _FULL * free


def bytes_of(root: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in [*root.parameters(), *root.buffers()]}
    return sum(t.numel() * t.element_size() for t in tensors.values())
