"""Right kernels by seed: other code for casts, other orders of sums, other dtypes.

python -m tests.kernel_checks.right_kernels [COUNT]    checks so many of them, and prints those red
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.quantization.quant_primitives import (
    _choose_qparams_affine,
    _dequantize_affine,
    _quantize_affine,
)

import qgate
from qgate.expected.derived import RELATIONS
from qgate.testing import check_kernel, tiles

Cast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RightKernel:
    """A kernel without a fault, and how it is checked."""

    name: str
    kernel: Callable[..., Tensor]
    arguments: tuple[Tensor, ...]
    like: Callable[..., Tensor]
    inputs: dict[int, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> Any:
        """Check the kernel, which must pass."""
        return check_kernel(
            self.kernel, *self.arguments, like=self.like, inputs=self.inputs, **self.options
        )


# Casts ------------------------------------------------------------------------------------------


def _own(fmt: Any, **options: Any) -> Cast:
    return lambda x: qgate.quantize(x, fmt, dtype=torch.float32, **options)


def _scaled(x: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    amax = x.float().abs().amax(-1, keepdim=True) if x.numel() else x.float()
    return x.float(), torch.where(amax == 0, 1.0, amax / divisor)


def _torch_fp8(x: Tensor) -> Tensor:
    values, scale = _scaled(x, 448.0)
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _torch_fp8_reciprocal(x: Tensor) -> Tensor:
    values, scale = _scaled(x, 448.0)
    return (values * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _torch_fp8_power_of_two(x: Tensor) -> Tensor:
    values, scale = _scaled(x, 448.0)
    fraction, exponent = torch.frexp(scale)
    power = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
    scale = torch.where(scale.isfinite(), power, scale)
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def _numpy_fp8(x: Tensor) -> Tensor:
    values, scale = _scaled(x, 448.0)
    codes = (values / scale).clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.astype(np.float32)) * scale


def _int8(divisor: float, low: int) -> Cast:
    def cast(x: Tensor) -> Tensor:
        values, scale = _scaled(x, divisor)
        return (values / scale).round().clamp(low, 127) * scale

    return cast


def torchao_int8(x: Tensor) -> Tensor:
    if not x.numel():
        return x.float()
    block = [1] * (x.dim() - 1) + [x.shape[-1]]
    scale, zero = _choose_qparams_affine(x.float(), "SYMMETRIC", block, torch.int8, eps=1e-12)
    codes = _quantize_affine(x.float(), block, scale, zero, torch.int8)
    return _dequantize_affine(codes, block, scale, zero, torch.int8)


def _torchao_mx(x: Tensor) -> Tensor:
    if not x.numel():
        return x.float()
    scale, codes = to_mx(x.float().contiguous(), torch.float8_e4m3fn, 32)
    return to_dtype(codes, scale, torch.float8_e4m3fn, 32, torch.float32)


def _tiled(x: Tensor) -> Tensor:
    rows, columns = x.shape
    y = torch.empty(x.shape)
    for top in range(0, rows, 16):
        for start in range(0, columns, 16):
            part = (slice(top, top + 16), slice(start, start + 16))
            scale = x[part].float().abs().amax() / 448
            scale = torch.where(scale == 0, 1.0, scale)
            y[part] = (x[part].float() / scale).to(torch.float8_e4m3fn).float() * scale
    return y


BY_ROW = {fmt: qgate.Quantizer(fmt, granularity="channel", axis=0) for fmt in ("int8", "fp8_e4m3")}
CASTS: dict[str, tuple[Any, Cast]] = {
    **{fmt: (fmt, _own(fmt)) for fmt in (
        "mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "hif8",
        "hif4", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "bf16",
    )},
    "mxfp8 by rceil": ("mxfp8", _own("mxfp8", scale_rule="rceil")),
    "mxfp4 by even": ("mxfp4", _own("mxfp4", scale_rule="even")),
    "int8 blocks": (qgate.Quantizer("int8", granularity="block", block=32),
                    _own("int8", granularity="block", block=32)),
    "int4 channels": (qgate.Quantizer("int4", granularity="channel", axis=0),
                      _own("int4", granularity="channel", axis=0)),
    "fp8 of torch": (BY_ROW["fp8_e4m3"], _torch_fp8),
    "fp8 by reciprocals": (BY_ROW["fp8_e4m3"], _torch_fp8_reciprocal),
    "fp8 by powers of two": (BY_ROW["fp8_e4m3"], _torch_fp8_power_of_two),
    "fp8 of ml_dtypes": (BY_ROW["fp8_e4m3"], _numpy_fp8),
    "fp8 tiles": (tiles("fp8_e4m3", 16, 16), _tiled),
    "int8 amax/127": (BY_ROW["int8"], _int8(127.0, -127)),
    "int8 amax/127.5": (BY_ROW["int8"], _int8(127.5, -128)),
    "int8 amax/128": (BY_ROW["int8"], _int8(128.0, -128)),
    "int8 of torchao": (BY_ROW["int8"], torchao_int8),
    "mxfp8 of torchao": ("mxfp8", _torchao_mx),
}  # fmt: skip


def searched(x: Tensor, fmt: str) -> Tensor:
    """Quantize each row with the best of thirty scales."""
    largest = qgate.formats.get(fmt).max
    best, error = x, torch.full((len(x), 1), torch.inf)
    for share in torch.linspace(0.5, 1.05, 30):
        scale = x.abs().amax(-1, keepdim=True) * share / largest
        y = qgate.quantize(x / scale, fmt, **({"scale": 1.0} if fmt == "int4" else {})) * scale
        mine = (y - x).square().sum(-1, keepdim=True)
        best, error = torch.where(mine < error, y, best), torch.minimum(mine, error)
    return best


# Sums -------------------------------------------------------------------------------------------


def _split(parts: int) -> Callable[[Tensor, Tensor], Tensor]:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        pieces = zip(x.chunk(parts, -1), w.chunk(parts, -1), strict=True)
        return torch.stack([linear(x_part, right) for x_part, right in pieces]).sum(0)

    return kernel


def _reversed(x: Tensor, w: Tensor) -> Tensor:
    return linear(x.flip(-1), w.flip(-1))


def _one_by_one(x: Tensor, w: Tensor) -> Tensor:
    """Add one term after another, the worst order there is."""
    total = torch.zeros(*x.shape[:-1], len(w))
    for term in range(x.shape[-1]):
        total += x[..., term : term + 1] * w[:, term]
    return total


def _by_rows(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([w @ row for row in x]) if len(x) else linear(x, w)


def added_in(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a product whose terms are rounded to a dtype, and added in it one after another."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:-1], len(w), dtype=dtype)
        for term in range(x.shape[-1]):
            total += x[..., term : term + 1].to(dtype) * w[:, term].to(dtype)
        return total.float()

    return kernel


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": linear,
    "split in 2": _split(2),
    "split in 7": _split(7),
    "reversed": _reversed,
    "one by one": _one_by_one,
    "row by row": _by_rows,
    "float64": lambda x, w: linear(x.double(), w.double()).float(),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def right_kernel(seed: int) -> RightKernel:
    """Draw a kernel: mostly products, some of other kinds."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = draw.choice((5, 16, 33)), draw.choice((8, 24, 37))
    terms = draw.choice((32, 64, 96, 160))
    source, result = draw.choice(DTYPES), draw.choice(DTYPES)
    spread = 2.0 ** draw.randint(-3, 2)

    def tensor(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(source)

    name = draw.choice(list(CASTS))
    declared, cast = CASTS[name]
    kind = draw.choice(("product",) * 6 + ("norm", "gelu", "cast", "attention"))
    title = f"{seed}: {kind} {name} {source} {result}"
    if kind == "product":
        order = draw.choice(list(SUMS))
        return RightKernel(
            f"{title} {order}",
            lambda x, w: SUMS[order](cast(x), cast(w)).to(result),
            (tensor(rows, terms), tensor(columns, terms)),
            linear,
            {0: declared, 1: declared},
        )
    x = tensor(rows, terms)
    if kind == "cast":
        return RightKernel(title, cast, (x,), lambda x: x, {}, {"output": declared})
    if kind == "attention":
        heads = tuple(tensor(2, 3, 10, 16) for _ in range(3))
        return RightKernel(
            f"{seed}: attention fp8",
            lambda q, k, v: scaled_dot_product_attention(
                q.float(), _own("fp8_e4m3")(k), _own("fp8_e4m3")(v)
            ).to(result),
            heads,
            scaled_dot_product_attention,
            {1: "fp8_e4m3", 2: "fp8_e4m3"},
            # torch's attention on CPU makes numbers of a query that is NaN.
            {"relations": [relation for relation in RELATIONS if relation != "nan"]},
        )
    like = {"norm": lambda x: layer_norm(x, (x.shape[-1],), eps=1e-5), "gelu": gelu}[kind]
    return RightKernel(title, lambda x: like(cast(x)).to(result), (x,), like, {0: declared})


def main(count: int) -> int:
    """Check kernels one after another; return the number of red ones."""
    red = 0
    for seed in range(count):
        kernel = right_kernel(seed)
        try:
            kernel.check()
        except (AssertionError, ValueError) as error:
            red += 1
            print(f"{kernel.name}: {error}", flush=True)
    print(f"{count - red} of {count} right kernels are green")
    return red


if __name__ == "__main__":
    raise SystemExit(min(main(int((sys.argv[1:] or ["200"])[0])), 1))
