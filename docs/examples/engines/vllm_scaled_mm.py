"""Check vLLM's scaled matrix product in FP8, with a stand-in for its kernel."""

import torch
from torch.nn.functional import linear

import qgate
from qgate.testing import CheckFailure, check_kernel

# from vllm import _custom_ops as ops


def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype):  # stand-in: ops.cutlass_scaled_mm
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


def pack_rows(encoded):
    """Return codes as torch's FP8 and the scale of each row."""
    return encoded.codes.view(torch.float8_e4m3fn), encoded.scales.float().reshape(-1, 1)


def scaled_mm(a, scale_a, w, scale_w):
    return cutlass_scaled_mm(a, w.t(), scale_a, scale_w.t(), torch.float32)


def without_the_scale_of_tokens(a, scale_a, w, scale_w):
    return scaled_mm(a, torch.ones_like(scale_a), w, scale_w)


torch.manual_seed(0)
x, w = (
    qgate.encode(tensor, "fp8_e4m3", granularity="channel", axis=0)
    for tensor in (torch.randn(24, 64), torch.randn(16, 64))
)
options = {"like": linear, "pack": {0: pack_rows, 1: pack_rows}}
print(check_kernel(scaled_mm, x, w, **options))
try:
    check_kernel(without_the_scale_of_tokens, x, w, **options)
except CheckFailure as failure:
    assert "without_the_scale_of_tokens is wrong" in failure.cause
