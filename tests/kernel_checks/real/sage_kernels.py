"""Attention of sageattention 1, in Triton's interpreter.

`sageattn` itself asserts that its arguments are on a GPU; these are the two calls it makes then.
"""

from __future__ import annotations

from sageattention import attn_qk_int8_per_block, attn_qk_int8_per_block_causal
from sageattention.quant_per_block import per_block_int8
from torch import Tensor

from qgate.testing import tiles
from tests.kernel_checks.real.interpreter import prepare
from tests.kernel_checks.real.kernel import FP16, Fault, Function, RealKernel, about, normal, times
from tests.kernel_checks.real.torch_attention import attention, causal

prepare("sageattention")

DECLARED = {0: tiles("int8", 128, 64), 1: tiles("int8", 64, 64)}
SAME_LENGTHS = {"relations": ["permuted"]}


def sage(scale: float = 1.0, is_causal: bool = False, keys: float = 1.0) -> Function:
    """Return the attention without smoothing of K, and with a factor on the scale of the softmax."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module = attn_qk_int8_per_block_causal if is_causal else attn_qk_int8_per_block
        codes_q, scale_q, codes_k, scale_k = per_block_int8(
            q, k, sm_scale=q.shape[-1] ** -0.5 * scale
        )
        scale_k = scale_k * keys
        return module.forward(codes_q, codes_k, v, scale_q, scale_k, output_dtype=q.dtype)

    return kernel


WHOLE, PARTIAL = (normal(101, *[(1, 1, length, 64)] * 3, dtype=FP16) for length in (64, 40))
LONG = normal(102, *[(1, 2, 128, 64)] * 3, dtype=FP16)
right = sage()

KERNELS = [
    RealKernel("attention, 40 keys, fp16", "sageattention", right, (*PARTIAL,), attention, DECLARED, SAME_LENGTHS, bug="the padding of the last tile of 64 keys is counted in the softmax", words=r"pad|tile|depends on|mask|factor|times|too little"),
    RealKernel("attention, 64 keys, fp16", "sageattention", right, (*WHOLE,), attention, DECLARED, SAME_LENGTHS, faults=(
        Fault("softmax scale +1 %", sage(1.01), f"softmax|{about(1.01)}"),
        Fault("scales of K 1 % too high", sage(keys=1.01), f"softmax|argument [01]|{about(1.01)}"),
        times(right, 1.005),
    )),
    RealKernel("attention, causal, 64 keys, fp16", "sageattention", sage(is_causal=True), (*WHOLE,), causal, DECLARED, SAME_LENGTHS),
    RealKernel("attention, 128 keys, fp16", "sageattention", right, (*LONG,), attention, DECLARED, SAME_LENGTHS, faults=(
        Fault("softmax scale +0.5 %", sage(1.005), f"softmax|{about(1.005)}"),
        times(right, 1.003),
    )),
]  # fmt: skip
