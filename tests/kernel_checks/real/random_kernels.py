"""Right half-precision kernels by seed, and the same with one fault each.

python -m tests.kernel_checks.real.random_kernels 1000            prints those that are red
python -m tests.kernel_checks.real.random_kernels 1000 --faults   prints faults that are green
python -m tests.kernel_checks.real.random_kernels --seed 17       one of them

A kernel rounds to the dtype of its arguments where real ones do: attention its probabilities, tile
by tile, and divides last; an MLP every result, or only some of them; a norm before its weight or
not; LoRA and rotary embedding every result; a product its decoded weights.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

import qgate
from tests.kernel_checks.real.kernel import BF16, FP16, Fault, Function, RealKernel
from tests.kernel_checks.real.torch_attention import attention
from tests.kernel_checks.real.torch_others import rms_by_hand, rope, rotate_half
from tests.kernel_checks.real.torch_products import lora, mlp

PACKAGE = "random"
TILES = (16, 32, 64, 128)
ROW_INT8 = qgate.Quantizer("int8", granularity="channel", axis=0)
E4M3 = qgate.Quantizer("fp8_e4m3", granularity="tensor")
Rounding = Callable[[Tensor], Tensor]


class Draw:
    """Random choices and tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.is_fp8 = self.choices.random() < 0.25
        self.dtype = BF16 if self.is_fp8 else self.choices.choice((BF16, FP16))

    def one_of(self, *values: int) -> int:
        return self.choices.choice(values)

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def rounding(self) -> Rounding:
        """Return what one intermediate result goes through: its dtype, or float32."""
        if self.choices.random() < 0.6:
            return lambda x: x.to(self.dtype).float()
        return lambda x: x

    def cast(self, x: Tensor) -> Tensor:
        """Quantize an argument where the kernel takes FP8, and widen it."""
        x = x.float()
        return qgate.quantize(x, E4M3) if self.is_fp8 and x.numel() else x

    def declared(self, count: int) -> dict[int, object]:
        """Return the formats of that many arguments."""
        return dict.fromkeys(range(count), E4M3) if self.is_fp8 else {}


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, tile: int, dtype: torch.dtype, scale: float) -> Tensor:  # fmt: skip
    """Attend as flash attention does: unnormalized P is rounded, and the sum divides last."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 * scale)
    top = torch.full_like(scores[..., :1], float("-inf"))
    total, sums = torch.zeros_like(top), torch.zeros_like(q @ v.transpose(-1, -2) @ v)
    for start in range(0, k.shape[-2], tile):
        part = scores[..., start : start + tile]
        larger = torch.maximum(top, part.amax(-1, keepdim=True))
        shrink, p = (top - larger).exp(), (part - larger).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        sums = sums * shrink + p.to(dtype).float() @ v[..., start : start + tile, :]
        top = larger
    return sums / total


def _attention(draw: Draw) -> RealKernel:
    tile, rows, keys = draw.one_of(*TILES), draw.one_of(24, 40, 64), draw.one_of(48, 80, 144)
    width, heads, dtype = draw.one_of(32, 64), draw.one_of(2, 4), draw.dtype

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
        return _in_tiles(*map(draw.cast, (q, k, v)), tile, dtype, scale).to(dtype)

    def lost(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[-2] < 8:
            return kernel(q, k, v)
        return kernel(
            q,
            torch.cat([k[..., :5, :], k[..., 6:, :]], -2),
            torch.cat([v[..., :5, :], v[..., 6:, :]], -2),
        )

    return RealKernel(
        f"attention, tile {tile}, {keys} keys", PACKAGE, kernel,
        (draw.tensor(1, heads, rows, width), draw.tensor(1, heads, keys, width), draw.tensor(1, heads, keys, width)),
        attention, draw.declared(3),
        faults=(
            Fault("softmax scale 0.5 % off", lambda q, k, v: kernel(q, k, v, 1.005)),
            Fault("one key lost", lost),
        ),
    )  # fmt: skip


def _mlp(draw: Draw) -> RealKernel:
    rows, width, hidden = draw.one_of(16, 33, 48), draw.one_of(64, 128), draw.one_of(48, 96)
    roundings, dtype = [draw.rounding() for _ in range(4)], draw.dtype

    def kernel(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, lost: int = -1) -> Tensor:
        x, gate, up, down = map(draw.cast, (x, gate, up, down))
        activated = roundings[0](silu(roundings[1](linear(x, gate))))
        inner = roundings[2](activated * roundings[3](linear(x, up)))
        if lost >= 0:
            inner[..., lost : lost + 1] = 0
        return linear(inner, down).to(dtype)

    return RealKernel(
        "MLP", PACKAGE, kernel,
        (draw.tensor(rows, width), *(draw.tensor(hidden, width, scale=width**-0.5) for _ in range(2)), draw.tensor(width, hidden, scale=hidden**-0.5)),
        mlp, draw.declared(4),
        faults=(
            Fault("one hidden value lost", lambda x, gate, up, down: kernel(x, gate, up, down, 3)),
            Fault("gate 1 % too high", lambda x, gate, up, down: kernel(x, (draw.cast(gate) * 1.01), up, down)),
        ),
    )  # fmt: skip


def _norm(draw: Draw) -> RealKernel:
    rows, width, rounding = draw.one_of(16, 33, 48), draw.one_of(96, 128, 256), draw.rounding()
    dtype = draw.dtype

    def kernel(x: Tensor, w: Tensor, eps: float = 1e-6, less: int = 0) -> Tensor:
        x = x.float()
        squares = x.square().sum(-1, keepdim=True) / max(x.shape[-1] - less, 1)
        return (rounding(x * torch.rsqrt(squares + eps)) * w.float()).to(dtype)

    return RealKernel(
        "norm", PACKAGE, kernel, (draw.tensor(rows, width), draw.tensor(width)), rms_by_hand,
        faults=(
            Fault("eps 1e-2", lambda x, w: kernel(x, w, 1e-2)),
            Fault("n - 1", lambda x, w: kernel(x, w, less=1)),
        ),
    )  # fmt: skip


def _rotary(draw: Draw) -> RealKernel:
    length, width, roundings = draw.one_of(24, 40), draw.one_of(32, 64), [draw.rounding() for _ in range(2)]  # fmt: skip
    dtype = draw.dtype

    def kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, cos, sin = (t.float() for t in (x, cos, sin))
        return (roundings[0](x * cos) + roundings[1](rotate_half(x) * sin)).to(dtype)

    angles = torch.arange(length)[:, None] * 1000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.cat([angles, angles], -1)
    return RealKernel(
        "rotary embedding", PACKAGE, kernel,
        (draw.tensor(2, 3, length, width), angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)),
        rope,
        faults=(
            Fault("sign of the sine", lambda x, cos, sin: kernel(x, cos, -sin)),
            Fault("sine 1 % too high", lambda x, cos, sin: kernel(x, cos, sin.float() * 1.01)),
        ),
    )  # fmt: skip


def _lora(draw: Draw) -> RealKernel:
    rows, width, columns, rank = draw.one_of(16, 33), draw.one_of(64, 160), draw.one_of(48, 96), draw.one_of(8, 16)  # fmt: skip
    roundings, dtype = [draw.rounding() for _ in range(3)], draw.dtype

    def kernel(x: Tensor, w: Tensor, a: Tensor, b: Tensor, scale: float = 2.0) -> Tensor:
        x, w, a, b = map(draw.cast, (x, w, a, b))
        added = roundings[0](linear(roundings[1](linear(x, a)), b))
        return (roundings[2](linear(x, w)) + added * scale).to(dtype)

    return RealKernel(
        "LoRA", PACKAGE, kernel,
        (draw.tensor(rows, width), draw.tensor(columns, width, scale=width**-0.5), draw.tensor(rank, width, scale=width**-0.5), draw.tensor(columns, rank, scale=rank**-0.5)),
        lora, draw.declared(4),
        faults=(
            Fault("scale of the adapter 2 % off", lambda x, w, a, b: kernel(x, w, a, b, 2.04)),
            Fault("adapter left out", lambda x, w, a, b: kernel(x, w, a, b, 0.0)),
        ),
    )  # fmt: skip


def _weights(draw: Draw) -> RealKernel:
    """Draw a product of weights, in int8 by row or FP8 by tensor, that are decoded to the dtype."""
    rows, width, columns = draw.one_of(16, 33, 48), draw.one_of(64, 160, 256), draw.one_of(48, 128)
    declared, dtype = E4M3 if draw.is_fp8 else ROW_INT8, draw.dtype

    def decoded(w: Tensor) -> Tensor:
        return qgate.quantize(w, declared) if w.numel() else w

    def kernel(x: Tensor, w: Tensor, change: Function = lambda w: w) -> Tensor:
        return linear(x.float(), change(decoded(w)).to(dtype).float()).to(dtype)

    def one_row(w: Tensor) -> Tensor:
        w = w.clone()
        w[3:4] *= 1.02
        return w

    def lost(w: Tensor) -> Tensor:
        w = w.clone()
        w[:, 9:10] = 0
        return w

    return RealKernel(
        f"{'FP8' if draw.is_fp8 else 'int8'} weights", PACKAGE, kernel,
        (draw.tensor(rows, width), draw.tensor(columns, width, scale=width**-0.5)), linear, {1: declared},
        faults=(
            Fault("scale of one row 2 % off", lambda x, w: kernel(x, w, one_row)),
            Fault("one term lost", lambda x, w: kernel(x, w, lost)),
        ),
    )  # fmt: skip


KINDS = (_attention, _mlp, _norm, _rotary, _lora, _weights)


def _general_faults(kernel: Function) -> Iterator[Fault]:
    """Yield faults of the result that every kernel can have."""

    def changed(change: Callable[[Tensor], object]) -> Function:
        def faulty(*arguments: Tensor) -> Tensor:
            y = kernel(*arguments)
            wide = y.float()
            change(wide)
            return wide.to(y.dtype)

        return faulty

    yield Fault("result 1 % too high", changed(lambda y: y.mul_(1.01)))
    yield Fault("result 0.3 % too low", changed(lambda y: y.mul_(0.997)))
    yield Fault("last column 2 % too high", changed(lambda y: y[..., -1:].mul_(1.02)))
    yield Fault("last row zero", changed(lambda y: y[..., -1:, :].zero_()))


def random_kernel(seed: int) -> RealKernel:
    """Draw a right kernel, and one fault of it."""
    draw = Draw(seed)
    kind = KINDS[seed % len(KINDS)]
    kernel = kind(draw)
    fault = draw.choices.choice([*kernel.faults, *_general_faults(kernel.kernel)])
    dtype = "fp8" if draw.is_fp8 and kernel.inputs else str(draw.dtype).removeprefix("torch.")
    return replace(
        kernel,
        name=f"{seed}: {kernel.name}, {dtype}",
        options={"relations": ["one", "odd", "permuted", "zero rows"]},
        faults=(fault,),
    )


def random_fault(seed: int) -> tuple[RealKernel, Fault]:
    """Draw the kernel of a seed with its fault."""
    kernel = random_kernel(seed)
    return kernel, kernel.faults[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", action="store_true", help="plant the fault of each")
    parser.add_argument("--seed", type=int, help="check the kernel of one seed alone")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.count) if args.seed is None else [args.seed]
    torch.set_num_threads(1)
    unwanted = 0
    for seed in seeds:
        kernel, fault = random_fault(seed)
        try:
            kernel.check(fault if args.faults else None)
            line = ""
        except AssertionError as failure:
            line = str(failure).splitlines()[0]
        if bool(line) != args.faults:
            unwanted += 1
            print(f"{kernel.name}: {fault.name if args.faults else line}", flush=True)
    subject = ("faults", "red") if args.faults else ("right kernels", "green")
    print(f"{len(seeds) - unwanted} of {len(seeds)} {subject[0]} are {subject[1]}")
    return int(unwanted > 0)


if __name__ == "__main__":
    raise SystemExit(main())
