"""The fused attention of torch on x86, whose exponential is right to 13 bits.

Fitted to torch 2.13 on a CPU with AVX2; other products of bf16, as by AMX, were not looked at. The
exponential is `fexp_u20` of torch 2.8 and later: the bits of a float32 are a linear function of
the exponent but for a polynomial of the third degree (Malossi, Ineichen, Bekas and Curioni, "Fast
Exponential Computation on SIMD Architectures").
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.arithmetics.attention import LOG2_E, BackwardRounding, KnownAttention
from qgate.arithmetics.float32 import fma
from qgate.arithmetics.mkl_float32 import mkl_product

_POLYNOMIAL = (
    -0.079204240219773236, -0.22433836478672356, 0.30354260500649682, 0.00010703434948458272,
)  # fmt: skip
_ONE = float(1 << 23)
"""Float32 bits of one step of the exponent."""
_LEAST = -87.3365478515625


def fast_exponential(x: Tensor) -> Tensor:
    """Return e to float32 powers of at most 0, as torch approximates it on x86."""
    powers = x.clamp_min(_LEAST) * LOG2_E
    fractions = powers - powers.floor()
    correction = fractions.new_full((), _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        correction = fma(fractions, correction, fractions.new_full((), coefficient))
    bits = fma(powers - correction, powers.new_full((), _ONE), powers.new_full((), 127 * _ONE))
    return bits.int().view(torch.float32).masked_fill(x < _LEAST, 0.0)


class CPUFlashAttention(KnownAttention):
    """Attention whose products are MKL's, and whose gradients add up in 16 bits."""

    def multiply(self, dtype: torch.dtype, a: Tensor, b: Tensor, start: Tensor | None) -> Tensor:
        del dtype
        return mkl_product(a, b, start)

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, scale: float,
        mask: Tensor | None, dtype: torch.dtype, tile: int = 0, descending: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return gradients; those of key and value are rounded after each block of queries."""
        result, log_sums = self._attended(query, key, value, scale, mask, dtype, tile, descending)
        steps, output = self._steps(dtype), result.to(dtype)
        of_query = []
        of_key, of_value = (torch.zeros_like(side, dtype=torch.float32) for side in (key, value))
        queries = query.shape[-2]
        block = 256 if queries >= 768 else 64 if queries >= 192 else 32
        for start in range(0, queries, block):
            rows = slice(start, start + block)
            part = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
            parts = steps.gradients(
                query[..., rows, :], key, value, grad[..., rows, :], output[..., rows, :],
                log_sums[..., rows, :], scale, part, dtype, self.backward,
            )  # fmt: skip
            of_query.append(parts[0])
            of_key = (of_key + parts[1]).to(dtype).float()
            of_value = (of_value + parts[2]).to(dtype).float()
        return torch.cat(of_query, -2), of_key, of_value


KNOWN = (
    CPUFlashAttention(
        "cpu-flash", "torch's fused attention on a CPU", (torch.bfloat16, torch.float16),
        (512, 0), scaled_first=True, exponential=fast_exponential,
        backward=BackwardRounding(base_e=True),
    ),
)  # fmt: skip
