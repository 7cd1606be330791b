"""States along time, x_t = a_t x_(t-1) + b_t, in place; forward, and backward for gradients.

Step by step, a device would start two small kernels for each. Each operation is rounded by itself,
so one kernel for all steps gives the same bits.
"""

from __future__ import annotations

import importlib

import numpy as np
import torch
from torch import Tensor

from qgate.kernels import cases, proving
from qgate.kernels.launching import launch

_TILE = 128


def run(factors: Tensor, values: Tensor, start: Tensor, *, backward: bool = False) -> Tensor:
    """Replace values of (steps, ...) by the states after each step, and return the last one.

    Forward, a state is factor * state before + value. Backward it is value + carry, and the carry
    for the step before is factor * state; the last carry is returned.
    """
    device, way = values.device, ("recurrence", backward)
    if _is_served(factors, values, start) and proving.prove_once(
        way, device, "states along time", lambda: _wrong(device, backward)
    ):
        return run_by_kernel(factors, values, start, backward)
    if _is_in_memory(factors, values, start):
        return run_by_numpy(factors, values, start, backward)
    return run_by_torch(factors, values, start, backward)


def run_by_numpy(factors: Tensor, values: Tensor, start: Tensor, backward: bool) -> Tensor:
    """Compute as torch does, in a third of its time for small states, as a call costs less."""
    factor_steps, steps = factors.detach().numpy(), values.detach().numpy()
    state = np.array(start.detach().numpy())
    spare = np.empty_like(state)
    with np.errstate(all="ignore"):
        if backward:
            for value, factor in zip(steps[::-1], factor_steps[::-1], strict=True):
                np.add(value, state, value)
                np.multiply(factor, value, state)
            return torch.from_numpy(state)
        for value, factor in zip(steps, factor_steps, strict=True):
            np.multiply(factor, state, spare)
            state = np.add(value, spare, value)
    return torch.from_numpy(state.copy())


def run_by_kernel(factors: Tensor, values: Tensor, start: Tensor, backward: bool) -> Tensor:
    programs = importlib.import_module("qgate.kernels.programs.recurrences")
    last, size = torch.empty_like(start), start.numel()
    launch(
        programs.recur, -(-size // _TILE), factors, values, start, last, len(values), size,
        TILE=_TILE, BACKWARD=backward,
    )  # fmt: skip
    return last


def run_by_torch(factors: Tensor, values: Tensor, start: Tensor, backward: bool) -> Tensor:
    """Compute step after step, by the definition."""
    if backward:
        carry = start.clone()
        for value, factor in zip(values.unbind()[::-1], factors.unbind()[::-1], strict=True):
            value += carry
            carry = factor * value
        return carry
    state, spare = start, torch.empty_like(start)
    for value, factor in zip(values, factors, strict=True):
        torch.mul(factor, state, out=spare)
        state = value.add_(spare)
    return state.clone()


def _is_served(*tensors: Tensor) -> bool:
    return (
        proving.serves(tensors[0].device)
        and tensors[0].numel() > 0
        and all(t.dtype is torch.float32 and t.is_contiguous() for t in tensors)
    )


def _is_in_memory(*tensors: Tensor) -> bool:
    is_watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing()
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if is_watched or is_transformed or torch.compiler.is_compiling():
        return False
    return all(
        type(t) is Tensor and t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64)
        for t in tensors
    )


def _wrong(device: torch.device, backward: bool) -> str:
    """Compare with torch on the CPU, on numbers of all sizes; the last tile is not full."""
    steps, size = 6, 1000
    every = cases.numbers(torch.float32)
    wide, near = (
        every[: steps * size].view(steps, size),
        cases.bell_curve(torch.float32, count=6000),
    )
    start = every[-size:]
    for factors, others in ((wide, near), (near, wide), (near.sigmoid(), near)):
        a, b = (t.reshape(steps, size).clone() for t in (factors, others))
        x, y = (t.to(device, copy=True) for t in (a, b))
        last = run_by_kernel(x, y, start.to(device), backward)
        for one, other in ((last, run_by_torch(a, b, start, backward)), (y, b)):
            if problem := proving.first_difference(one, other):
                return problem
    return ""
