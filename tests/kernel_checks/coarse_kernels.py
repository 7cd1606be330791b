"""Right kernels with coarse sums by seed: products, norms, attention, MLP.

python -m tests.kernel_checks.coarse_kernels [COUNT]    checks so many of them, and prints those red
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

import qgate
from qgate.testing import CheckFailure
from tests.kernel_checks.right_kernels import RightKernel, added_in

BF16, FP16 = torch.bfloat16, torch.float16
Rounding = Callable[[Tensor], Tensor]


def tf32(x: Tensor) -> Tensor:
    """Round to 11 bits, as a tensor core takes its operands."""
    fractions, exponents = torch.frexp(x.float())
    return torch.ldexp((fractions * 2**11).round() / 2**11, exponents)


def in_tiles(dtype: torch.dtype, tile: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a product that adds tiles in float32, and the sums of tiles in a dtype."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:-1], len(w), dtype=dtype)
        for start in range(0, x.shape[-1], tile):
            part = slice(start, start + tile)
            total += linear(x[..., part].to(dtype).float(), w[:, part].to(dtype).float()).to(dtype)
        return total.float()

    return kernel


def coarse_kernel(seed: int) -> RightKernel:
    """Draw a right kernel with coarse sums, beside the arithmetic that is declared."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    arithmetic = draw.choice(("bfloat16", "float16", "tf32"))
    dtype = FP16 if arithmetic == "float16" else BF16
    round_: Rounding = tf32 if arithmetic == "tf32" else lambda x: x.to(dtype).float()
    rows, columns = draw.choice((16, 33, 48)), draw.choice((24, 37, 64))
    terms, spread = draw.choice((32, 96, 256, 512)), 2.0 ** draw.randint(-3, 1)
    options: dict[str, Any] = {
        "arithmetic": arithmetic, "inconclusive": "pass", "relations": ["permuted"]
    }  # fmt: skip
    offset = draw.choice((0.0, 0.0, 0.5))

    def tensor(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) + offset) * spread

    kind = draw.choice(("product",) * 4 + ("norm", "attention", "mlp"))
    title = f"{seed}: {kind} in {arithmetic}"
    if kind == "product":
        sums: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "operands": lambda x, w: linear(round_(x), round_(w)),
            "result": lambda x, w: round_(linear(round_(x), round_(w))),
        }
        if arithmetic != "tf32":
            sums |= {"chain": added_in(dtype), "tiles": in_tiles(dtype, 32)}
        order = draw.choice(list(sums))
        declared = draw.choice((None, "int8", "mxfp8"))
        cast = (lambda x: qgate.quantize(x, declared)) if declared else (lambda x: x)
        return RightKernel(
            f"{title}, {order}, {declared}, {terms} terms",
            lambda x, w: sums[order](cast(x), cast(w)),
            (tensor(rows, terms), tensor(columns, terms)),
            linear,
            {0: declared, 1: declared} if declared else {},
            options,
        )
    if kind == "norm":

        def normed(x: Tensor) -> Tensor:
            centered = round_(x) - round_(x.mean(-1, keepdim=True))
            scale = round_((centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
            return round_(round_(centered) * scale)

        like = lambda x: layer_norm(x, (x.shape[-1],), eps=1e-5)  # noqa: E731
        return RightKernel(title, normed, (tensor(rows, terms),), like, {}, options)
    if kind == "attention":

        def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = round_(round_(q) @ round_(k).transpose(-1, -2)) * q.shape[-1] ** -0.5
            return round_(round_(scores.softmax(-1)) @ round_(v))

        def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v

        spread = min(spread, 1.0)
        heads = tensor(2, rows, 32), tensor(2, columns, 32), tensor(2, columns, 32)
        return RightKernel(title, attended, heads, exact, {}, options)

    def mlp(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return silu(linear(x, gate)) * linear(x, up)

    def coarse_mlp(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        gated = round_(silu(round_(linear(round_(x), round_(gate)))))
        return round_(gated * round_(linear(round_(x), round_(up))))

    tensors = tensor(rows, 64), tensor(columns, 64), tensor(columns, 64)
    return RightKernel(title, coarse_mlp, tensors, mlp, {}, options)


def main(count: int, start: int = 0) -> int:
    """Check kernels one after another; return the number of red ones."""
    red: list[str] = []
    conclusive = Counter[str]()
    for seed in range(start, start + count):
        kernel = coarse_kernel(seed)
        try:
            report = kernel.check()
        except CheckFailure as failure:
            red.append(kernel.name)
            print(f"{kernel.name}: {failure}", flush=True)
        else:
            conclusive["conclusive" if not report.notes else "inconclusive"] += 1
    print(f"{count - len(red)} of {count} right kernels are green, {dict(conclusive)}")
    return len(red)


if __name__ == "__main__":
    raise SystemExit(min(main(*map(int, sys.argv[1:] or ["200"])), 1))
