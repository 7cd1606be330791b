"""Recorded results of a device as kernels, each with its arguments and its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.arithmetics.recordings import Calls, calls_of

FILES = ("fp8", "16bit", "float32", "int8", "attention", "chains")
CALLS: Calls = {
    name: call
    for file in FILES
    for name, call in calls_of(file).items()
    if name != "sdpa_backward/bf16/flash"
}
BACKWARD = calls_of("attention")["sdpa_backward/bf16/flash"]
GRADIENTS = ("dq", "dk", "dv")
NAMES = (*CALLS, *(f"sdpa_backward/bf16/flash/{name}" for name in GRADIENTS))


@dataclass(frozen=True)
class RecordedKernel:
    """What a device returned for stated inputs, and the function that it computes."""

    arguments: tuple[Any, ...]
    result: Tensor
    like: Callable[..., Tensor]
    unpack: Callable[[Tensor], Tensor] | None = None
    output: Any = None

    @property
    def options(self) -> dict[str, Any]:
        return {"like": self.like, "unpack": self.unpack, "output": self.output, "relations": []}


def recorded_kernel(name: str) -> RecordedKernel:
    """Return the recorded call of a name as a kernel."""
    kind = name.split("/")[0]
    if kind == "sdpa_backward":
        return _gradient(name.rpartition("/")[2])
    call = CALLS[name]
    if kind == "sdpa":
        return _attention(call, is_causal="causal" in name)
    if kind in ("eager", "compiled"):
        return _chain(call, name.rpartition("/")[2])
    if kind == "conv2d":
        return RecordedKernel(
            (call["x"], call["w"]), call["y"], lambda x, w: F.conv2d(x, w, padding=1)
        )
    if kind == "int_mm":  # unpack makes values of the integers, which float64 holds
        return RecordedKernel((call["a"], call["b"]), call["y"], _integers, Tensor.double)
    if "scale_a" in call:
        sides = call["a"], call["b"], call["scale_a"], call["scale_b"]
        return RecordedKernel(sides, call["y"], scaled_linear)
    return RecordedKernel((call["a"], call["b"]), call["y"], F.linear)


def scaled_linear(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return F.linear(a, b) * (scale_a * scale_b.mT if scale_b.dim() else scale_a * scale_b)


def _integers(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double().mT


def _attention(call: dict[str, Tensor], is_causal: bool) -> RecordedKernel:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return RecordedKernel((call["q"], call["k"], call["v"]), call["y"], attention)


def _gradient(name: str) -> RecordedKernel:
    position = GRADIENTS.index(name)

    def gradient(q: Tensor, k: Tensor, v: Tensor, go: Tensor) -> Tensor:
        sides = [side.detach().requires_grad_() for side in (q, k, v)]
        with torch.enable_grad():
            result = F.scaled_dot_product_attention(*sides)
            return torch.autograd.grad(result, sides, go)[position]

    sides = (BACKWARD["q"], BACKWARD["k"], BACKWARD["v"], BACKWARD["go"])
    return RecordedKernel(sides, BACKWARD[name], gradient)


CHAINS: dict[str, Callable[..., Tensor]] = {
    "linear_gelu": lambda x, w: F.gelu(F.linear(x, w)),
    "rms_norm": lambda x, w: F.rms_norm(x, (512,), w, 1e-6),
    "layer_norm": lambda x, w: F.layer_norm(x, (512,), w),
    "softmax": lambda x: F.softmax(x, -1),
    "swiglu": lambda x: F.silu(x[:, :256]) * x[:, 256:],
    "rms_fp8": lambda x, w: (F.rms_norm(x, (512,), w, 1e-6) / 0.02).clamp(-448, 448),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(len(x)), reduction="none"),
}


def _chain(call: dict[str, Tensor], name: str) -> RecordedKernel:
    arguments = tuple(call[key] for key in ("x0", "x1") if key in call)
    return RecordedKernel(arguments, call["y"], CHAINS[name])
