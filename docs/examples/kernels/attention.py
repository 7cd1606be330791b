"""Check attention over a quantized cache."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import qgate
from qgate.testing import CheckFailure, check_kernel

fp8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")


def causal(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(q, k, v, diagonal=0):
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal)
    return scaled_dot_product_attention(q, fp8(k), fp8(v), mask)


q, k, v = (torch.randn(1, 2, 12, 16) for _ in range(3))
options = {"like": causal, "inputs": {1: fp8, 2: fp8}, "relations": ["permuted", "prefix"]}
check_kernel(attention, q, k, v, **options)
try:
    check_kernel(lambda q, k, v: attention(q, k, v, 1), q, k, v, **options)
except CheckFailure as failure:
    assert "the mask shows one key more" in failure.cause
