"""Right kernels of torch and of packages that are installed, as `check_kernel` judges them.

A red verdict is noted, not counted as a failure: it is about the check.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import qgate
from qgate.testing import CheckFailure, check_kernel
from tests.devices.cases import Case, Cases, Setting
from tests.devices.record import Row

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_E4M3 = qgate.Quantizer("fp8_e4m3", granularity="tensor")


@dataclass(frozen=True)
class Other:
    """A right kernel: `make` returns it, as its package may be missing; shapes of its arguments."""

    make: Callable[[], Callable[..., Any]]
    like: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = BF16
    options: dict[str, Any] = field(default_factory=dict)
    package: str = "torch"
    capability: tuple[int, int] = (0, 0)


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return functional.rms_norm(x, w.shape, w, 1e-6)


def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    return functional.silu(a) * b


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def _attention_32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1) @ v


def _scaled_mm(x: Tensor, w: Tensor) -> Tensor:
    def cast(t: Tensor) -> tuple[Tensor, Tensor]:
        scale = t.abs().amax().float() / torch.tensor(448.0, device=t.device)
        return (t.float() / scale).to(torch.float8_e4m3fn), scale

    (a, of_a), (b, of_b) = cast(x), cast(w)
    return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=BF16)


def _gelu(x: Tensor, w: Tensor) -> Tensor:
    return functional.gelu(functional.linear(x, w))


def _same(kernel: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> Other:
    return Other(lambda: kernel, kernel, shapes, dtype)


def _liger(name: str) -> Callable[[], Callable[..., Any]]:
    def make() -> Callable[..., Any]:
        from liger_kernel.transformers import functional as liger

        kernel = getattr(liger, name)
        return (lambda x, w: kernel(x, w, 1e-6)) if name == "liger_rms_norm" else kernel

    return make


def _conch_rms() -> Callable[..., Any]:
    from conch.ops.normalization.rms_norm import rms_norm

    return lambda x, w: rms_norm(x, w, 1e-6)


def _sage() -> Callable[..., Any]:
    from sageattention import sageattn

    return lambda q, k, v: sageattn(q, k, v)


def _torchao(config: str) -> Callable[[], Callable[..., Any]]:
    def make() -> Callable[..., Any]:
        from torchao import quantization

        def kernel(x: Tensor, w: Tensor) -> Tensor:
            module = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device)
            module.weight.data = w.clone()
            network = torch.nn.Sequential(module)
            quantization.quantize_(network, getattr(quantization, config)())
            with torch.no_grad():
                return network(x)

        return kernel

    return make


_BY_ROW = qgate.Quantizer("int8", granularity="channel", axis=0)
_PRODUCT, _HEADS = ((48, 256), (128, 256)), ((2, 4, 48, 64),) * 3
OTHERS: dict[str, Other] = {
    "linear fp32": _same(functional.linear, *_PRODUCT, dtype=FP32),
    "linear bf16": _same(functional.linear, *_PRODUCT),
    "linear bf16 with a bias": _same(functional.linear, *_PRODUCT, (128,)),
    "linear fp16, K = 8192": _same(functional.linear, (48, 8192), (128, 8192), dtype=FP16),
    "linear and gelu bf16": _same(_gelu, *_PRODUCT),
    "linear and gelu bf16, compiled": Other(lambda: torch.compile(_gelu), _gelu, _PRODUCT),
    "attention bf16": Other(lambda: _attention, _attention_32, _HEADS),
    "attention fp16": Other(lambda: _attention, _attention_32, _HEADS, FP16),
    "rms_norm bf16": _same(_rms, (48, 256), (256,)),
    "softmax bf16": _same(lambda x: x.softmax(-1), (48, 256)),
    "logsumexp bf16": _same(lambda x: x.logsumexp(-1), (48, 256)),
    "swiglu bf16": _same(_swiglu, (48, 256), (48, 256)),
    "conv1d bf16": _same(functional.conv1d, (2, 64, 96), (64, 64, 4)),
    "_scaled_mm": Other(
        lambda: _scaled_mm, functional.linear, _PRODUCT, BF16, {"inputs": {0: _E4M3, 1: _E4M3}},
        capability=(8, 9),
    ),
    "liger rms_norm": Other(_liger("liger_rms_norm"), _rms, ((48, 256), (256,)), package="liger_kernel"),
    "liger swiglu": Other(
        _liger("liger_swiglu"), _swiglu, ((48, 256), (48, 256)), package="liger_kernel"
    ),
    "conch rms_norm": Other(_conch_rms, _rms, ((48, 256), (256,)), package="conch"),
    "sageattention": Other(_sage, _attention_32, _HEADS, FP16, package="sageattention"),
    "torchao int8": Other(
        _torchao("Int8DynamicActivationInt8WeightConfig"), functional.linear, _PRODUCT, BF16,
        {"inputs": {0: _BY_ROW, 1: _BY_ROW}}, "torchao",
    ),
    "torchao int8 weights": Other(
        _torchao("Int8WeightOnlyConfig"), functional.linear, _PRODUCT, BF16,
        {"inputs": {1: _BY_ROW}}, "torchao",
    ),
}  # fmt: skip


def _case(name: str, other: Other) -> Case:
    def run(setting: Setting) -> Row:
        torch.manual_seed(0)
        arguments = [torch.randn(shape) for shape in other.shapes]
        try:
            report = check_kernel(
                other.make(), *arguments, like=other.like, dtype=other.dtype,
                device=setting.torch_device, **other.options,
            )  # fmt: skip
        except CheckFailure as failure:
            return Row(
                name, "noted", f"red: {str(failure).splitlines()[0]}", figures={"green": False}
            )
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            first = (str(error).splitlines() or [""])[0]
            return Row(name, "noted", f"no verdict: {type(error).__name__}: {first}")
        return Row(name, "noted", f"green: {len(report.held)} inputs", figures={"green": True})

    return run


def cases(setting: Setting) -> Cases:
    device = setting.torch_device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return {
        name: _case(name, other)
        for name, other in OTHERS.items()
        if importlib.util.find_spec(other.package) and other.capability <= capability
    }
