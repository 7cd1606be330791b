"""Attention of 16-bit tensors with the roundings of fused kernels, forward and backward.

`qgate.arithmetics.attention` has the steps; the products here are torch's. On the way back
FlashAttention and CPUs round the gradients of the scores before they multiply by the scale; cuDNN
and the memory-efficient kernel of CUDA round them after it. In float16 these gradients are often
subnormal, and the scale makes them smaller: on an H200 the gradients of q_proj and k_proj had 5 to
16 times the error accepted on a CPU, though the code was right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from qgate.arithmetics.attention import BackwardRounding, FusedSteps
from qgate.expected.known_attention import AttentionSides

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
# Scores that are computed at once: 64 MB.
_SCORES = 1 << 24


class FusedAttention(TorchFunctionMode):
    """Count calls of 16-bit attention inside; compute them by definition if a rounding is chosen.

    rounds_scaled   True: gradients of scores are rounded after the scale, as by cuDNN; False:
                    before it, as by FlashAttention and CPUs; None: torch computes
    """

    def __init__(self, rounds_scaled: bool | None = None) -> None:
        super().__init__()
        self.rounds_scaled = rounds_scaled
        self.calls = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention and args[0].dtype in _SIXTEEN_BITS:
            self.calls += 1
            if self.rounds_scaled is not None:
                return _attention(self.rounds_scaled, *args, **kwargs)
        return function(*args, **kwargs)


def _attention(
    rounds_scaled: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute `scaled_dot_product_attention`; with dropout torch does."""
    if dropout_p:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    sides = AttentionSides.of(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return _Rounded.apply(  # type: ignore[no-untyped-call]
        sides.query, sides.key, sides.value, sides.mask, sides.scale, rounds_scaled
    )


class _Rounded(torch.autograd.Function):
    """One attention; rows of queries are computed in parts, so that memory stays bounded."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float,
        rounds_scaled: bool,
    ) -> Tensor:  # fmt: skip
        dtype = query.dtype
        results, sums = [], []
        for rows in _parts(query, key):
            result, log_sums = _STEPS.attended(
                query[..., rows, :], key, value, factor, _part(mask, rows), dtype, [slice(None)]
            )
            results.append(result.to(dtype))
            sums.append(log_sums)
        output = torch.cat(results, -2)
        ctx.save_for_backward(query, key, value, mask, output, torch.cat(sums, -2))
        ctx.factor = factor
        # cuDNN's way, or FlashAttention's.
        ctx.rounding = BackwardRounding(after_scale=rounds_scaled, base_e=rounds_scaled)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, log_sums = ctx.saved_tensors
        dtype = query.dtype
        of_query = []
        of_key, of_value = (torch.zeros_like(side, dtype=torch.float32) for side in (key, value))
        for rows in _parts(query, key):
            parts = _STEPS.gradients(
                query[..., rows, :], key, value, grads[0][..., rows, :], output[..., rows, :],
                log_sums[..., rows, :], ctx.factor, _part(mask, rows), dtype, ctx.rounding,
            )  # fmt: skip
            of_query.append(parts[0].to(dtype))
            of_key += parts[1]
            of_value += parts[2]
        return torch.cat(of_query, -2), of_key.to(dtype), of_value.to(dtype), None, None, None


def _product(a: Tensor, b: Tensor, start: Tensor | None) -> Tensor:
    sums = a.float() @ b.float().mT
    return sums if start is None else sums + start


_STEPS = FusedSteps(_product, wide=False)


def _parts(query: Tensor, key: Tensor) -> Iterator[slice]:
    per_row = max(query[..., 0, 0].numel() * key.shape[-2], 1)
    step = max(_SCORES // per_row, 1)
    for start in range(0, query.shape[-2], step):
        yield slice(start, start + step)


def _part(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
