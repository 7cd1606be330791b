"""Check INT8 attention with SageAttention's scales by thread, and its smoothing of K."""

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from qgate.formats.groups import key_threads
from qgate.testing import CheckFailure, check_kernel, quantized


def reference(q, k, v):
    smooth = k - k.mean(-2, keepdim=True)
    return scaled_dot_product_attention(
        q, quantized("k", smooth, "int8", groups=key_threads(64)), v
    )


def attention(q, k, v, smooth=True, by_warp=False):  # your kernel
    k = k - k.mean(-2, keepdim=True) if smooth else k
    tokens = k.unflatten(-2, (-1, 8, 4, 2))  # a warp has 64 keys, a thread 2 of every 8
    scale = tokens.abs().amax((-4, -2, -1), keepdim=True) / 127
    if by_warp:
        scale = scale.amax(-3, keepdim=True)
    return scaled_dot_product_attention(q, ((tokens / scale).round() * scale).reshape(k.shape), v)


q, k, v = (torch.randn(1, 64, 8) for _ in range(3))
k += 3 * torch.randn(8)
options = {"like": reference, "relations": ["one"]}
check_kernel(attention, q, k, v, **options)
for wrong, words in (
    ({"smooth": False}, "the mean over dimension 1 before stage k is left out"),
    (
        {"by_warp": True},
        "stage k has one scale per 64 tokens, not one per two of every eight tokens",
    ),
):
    try:
        check_kernel(partial(attention, **wrong), q, k, v, **options)
    except CheckFailure as failure:
        assert words in failure.cause
