"""GPTQ, AWQ and rotations by their definitions: slow, and easy to compare with the papers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class IntegerWeight:
    """Codes of outputs x inputs, and the scale and zero point of every output and group.

    groups  the group of every input
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    def values(self) -> Tensor:
        groups = self.groups.long()
        return (self.codes - self.zeros[:, groups]) * self.scales[:, groups]


def activations(columns: int, count: int = 2048, seed: int = 0) -> Tensor:
    """Draw inputs of a layer as networks have them: a mean, a few strong directions, noise."""
    generator = torch.Generator().manual_seed(1000 + seed)
    strong = torch.randn(count, 8, generator=generator) @ torch.randn(
        8, columns, generator=generator
    )
    mean = torch.randn(columns, generator=generator)
    channels = torch.exp(0.7 * torch.randn(columns, generator=generator))
    return (torch.randn(count, columns, generator=generator) + strong + mean) * channels


def grid(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of each row of a group."""
    top = 2**bits - 1
    if symmetric:
        scales = weight.abs().amax(1) * 2 / top
        return scales, torch.full_like(scales, (top + 1) / 2)
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    scales = (high - low) / top
    return scales, (-low / scales).round()


def nearest(
    weight: Tensor, bits: int = 4, group: int = 32, symmetric: bool = False
) -> IntegerWeight:
    """Round every weight to the nearest code."""
    parts = [grid(part, bits, symmetric) for part in weight.split(group, 1)]
    scales, zeros = (torch.stack(part, 1) for part in zip(*parts, strict=True))
    groups = torch.arange(weight.shape[1]) // group
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    return IntegerWeight(codes, scales, zeros, groups, bits)


def gptq(
    weight: Tensor,
    inputs: Tensor,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    by_activation: bool = False,
    damping: float = 0.01,
) -> IntegerWeight:
    """Round column after column, and correct the columns that follow for the error so far."""
    hessian = (inputs.T @ inputs).double() / len(inputs)
    columns = weight.shape[1]
    order = torch.arange(columns)
    if by_activation:
        order = hessian.diagonal().argsort(descending=True)
    hessian = hessian[order][:, order] + damping * hessian.diagonal().mean() * torch.eye(columns)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian)).T
    unrounded = weight[:, order].double()
    codes = torch.zeros_like(unrounded)
    scales, zeros = [], []
    for column in range(columns):
        if column % group == 0:
            scale, zero = grid(unrounded[:, column : column + group], bits, symmetric)
            scales.append(scale)
            zeros.append(zero)
        code = (unrounded[:, column] / scales[-1] + zeros[-1]).round().clamp(0, 2**bits - 1)
        codes[:, column] = code
        error = (unrounded[:, column] - (code - zeros[-1]) * scales[-1]) / factor[column, column]
        unrounded[:, column:] -= error[:, None] * factor[column, column:]
    back = order.argsort()
    groups = (torch.arange(columns) // group)[back]
    return IntegerWeight(
        codes[:, back].float(),
        torch.stack(scales, 1).float(),
        torch.stack(zeros, 1).float(),
        groups,
        bits,
    )


def awq_scales(
    weights: list[Tensor], inputs: Tensor, bits: int = 4, group: int = 32, points: int = 20
) -> Tensor:
    """Search the power of the activations' size with the least error of the layers' outputs."""
    size = inputs.abs().mean(0)
    best, least = torch.ones_like(size), float("inf")
    for point in range(points):
        scales = size.clamp(min=1e-4) ** (point / points)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(
            float(
                (inputs @ (nearest(w * scales, bits, group).values() / scales - w).T)
                .square()
                .mean()
            )
            for w in weights
        )
        if error < least:
            best, least = scales, error
    return best


def hadamard(size: int, seed: int | None = None) -> Tensor:
    """Return an orthogonal Hadamard matrix, with random signs where a seed is given."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix / size**0.5
    if seed is None:
        return matrix
    generator = torch.Generator().manual_seed(seed)
    return matrix * (torch.randint(0, 2, (size, 1), generator=generator) * 2 - 1)


# Packed as the libraries store them ---------------------------------------------------------------


def packed_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis into words of 32 bits, the lowest bits first, bit by bit."""
    lines = codes.reshape(-1, codes.shape[-1]).long()
    spread = (lines[:, :, None] >> torch.arange(bits)) & 1
    words = spread.reshape(len(lines), -1, 32) << torch.arange(32)
    total = words.sum(-1)
    total = torch.where(total >= 1 << 31, total - (1 << 32), total)
    return total.int().reshape(*codes.shape[:-1], -1)


def gptq_parts(weight: IntegerWeight, stored_less: int = 1) -> dict[str, Tensor]:
    """Pack as GPTQ: words along the inputs, zero points less one (as they are in version 2)."""
    mask = 2**weight.bits - 1
    return {
        "qweight": packed_bits(weight.codes, weight.bits).T.contiguous(),
        "qzeros": packed_bits((weight.zeros.T.long() - stored_less) & mask, weight.bits),
        "scales": weight.scales.T.contiguous().half(),
        "g_idx": weight.groups.int(),
    }


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that stands at each place of a word."""


def awq_parts(weight: IntegerWeight) -> dict[str, Tensor]:
    """Pack as AWQ: eight outputs in a word, in its order."""

    def packed(codes: Tensor) -> Tensor:
        return packed_bits(codes.reshape(len(codes), -1, 8)[..., AWQ_ORDER].flatten(1), 4)

    return {
        "qweight": packed(weight.codes.T),
        "qzeros": packed(weight.zeros.T),
        "scales": weight.scales.T.contiguous().half(),
    }


def with_stored_scales(weight: IntegerWeight) -> IntegerWeight:
    """Round scales as a file stores them."""
    return replace(weight, scales=weight.scales.half().float())
