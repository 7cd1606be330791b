"""Faults inside of LSTM, GRU and RNN layers, which hand over no tensor but their output.

A fault is named if the layer, computed with it, gives what the run gave: other weights, gates in
another order, a bias left out, or a state that begins anew.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from qgate.gate.modules.holding import other_weights
from qgate.gate.segments.segments import Worst

_ROOM = 1e-4
"""Share of the largest value that the run may be off where a fault explains it."""
_LEFT = 0.05
"""Share of the error that may be left beside it, in 16 bits above all."""
_GATES = {nn.LSTM: ("input", "forget", "cell", "output"), nn.GRU: ("reset", "update", "new")}


def recurrent_fault(layer: nn.RNNBase, own: nn.Module, worst: Worst) -> str:
    """Say what a recurrent layer of the run does otherwise than `layer`; empty if unknown."""
    if worst.inputs is None or worst.actual is None or worst.expected is None:
        return ""
    if worst.inputs.dim() != 3 or not layer.batch_first or layer.proj_size:
        return ""
    words = other_weights(layer, own)
    if words:
        return words
    exact = copy.deepcopy(layer).double()
    x, actual = worst.inputs.double(), worst.actual.double()
    error = float((actual - worst.expected.double()).square().sum())
    room = (_ROOM * float(actual.abs().max())) ** 2

    def explains(result: Tensor) -> bool:
        left = (actual - result).square()
        return float(left.max()) <= room or float(left.sum()) <= _LEFT**2 * error

    with torch.no_grad():
        for name, compute in _faults(exact, actual, worst.expected.double()):
            if explains(compute(x)):
                return name
    return ""


def _faults(
    layer: nn.RNNBase, actual: Tensor, expected: Tensor
) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """List faults with the layer as it computes with them."""
    off = ((actual - expected).abs().amax((0, 2)) > _ROOM * expected.abs().max()).nonzero()
    if len(off) and not layer.bidirectional and (at := int(off[0])):

        def anew(x: Tensor) -> Tensor:
            return torch.cat([layer(x[:, :at])[0], layer(x[:, at:])[0]], 1)

        def again(x: Tensor) -> Tensor:
            return torch.cat([layer(part)[0] for part in x.split(at, 1)], 1)

        yield f"its state begins anew at token {at}", anew
        yield f"its state begins anew every {at} tokens", again
    for name, parameter in layer.named_parameters():
        if name.startswith("bias"):
            yield f"its {name} is left out", _with(layer, {name: torch.zeros_like(parameter)})
            yield f"its {name} is added twice", _with(layer, {name: 2 * parameter})
    gates = next((names for kind, names in _GATES.items() if isinstance(layer, kind)), ())
    for order in itertools.permutations(range(len(gates))):
        if order == tuple(range(len(gates))):
            continue
        parameters = {
            name: torch.cat([parameter.chunk(len(gates))[k] for k in order])
            for name, parameter in layer.named_parameters()
        }
        read = ", ".join(gates[k] for k in order)
        yield f"its gates are read in the order {read}", _with(layer, parameters)


def _with(layer: nn.RNNBase, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        other = copy.deepcopy(layer)
        for name, value in parameters.items():
            getattr(other, name).data = value.detach()
        result: Tensor = other(x)[0]
        return result

    return compute
