"""Fake quantization against torchao (and microxcaling if it can be imported), on the CPU or a GPU.

    python benchmarks/formats.py [--threads 1 2] [--rounds 5] [--size 4096] [--device cuda]

For each format and dtype one line: million elements per second, how many times the peer's, and how
many copies of the tensor (`x.clone()`) it takes. Everything in a line runs in turn in one process.
On a GPU the last column is the share of the device's copy bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import platform
import statistics
import warnings
from collections.abc import Callable

import _turns
import torch
from tabulate import tabulate
from torch import Tensor

import qgate

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
FORMATS = (
    "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4", "if4", "mixfp4", "nvfp4_4over6", "hif8", "int8", "nf4",
    "bnb_fp4", "lloyd4",
)  # fmt: skip


def torchao_peer(fmt: str) -> Callable[[Tensor], Tensor] | None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import quant_primitives as primitives
    from torchao.quantization.quant_primitives import MappingType

    def mx(element: object) -> Callable[[Tensor], Tensor]:
        return lambda x: MXTensor.to_mx(x, element, 32).dequantize(x.dtype)

    def nvfp4(x: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(x.abs().max().float())
        return NVFP4Tensor.to_nvfp4(x, 16, per_tensor_scale=scale).dequantize(x.dtype)

    def int8(x: Tensor) -> Tensor:
        scale, zero = primitives.choose_qparams_affine(
            x, MappingType.SYMMETRIC, tuple(x.shape), torch.int8, -127, 127
        )
        args = (tuple(x.shape), scale, zero, torch.int8)
        q = primitives.quantize_affine(x, *args, -127, 127)
        return primitives.dequantize_affine(q, *args, -127, 127, output_dtype=x.dtype)

    return {
        "mxfp8_e4m3": mx(torch.float8_e4m3fn),
        "mxfp4_e2m1": mx(torch.float4_e2m1fn_x2),
        "nvfp4": nvfp4,
        "int8": int8,
    }.get(fmt)


def microxcaling_peer(fmt: str) -> Callable[[Tensor], Tensor] | None:
    names = {"mxfp8_e4m3": "fp8_e4m3", "mxfp4_e2m1": "fp4_e2m1", "int8": None}
    try:
        from mx.mx_ops import quantize_mx_op
        from mx.specs import finalize_mx_specs
    except ImportError:
        return None
    if not names.get(fmt):
        return None
    specs = finalize_mx_specs({"block_size": 32, "scale_bits": 8, "custom_cuda": False})
    return lambda x: quantize_mx_op(x, specs, names[fmt], axes=[-1], round="even")


def en_dtypes_peer(fmt: str) -> Callable[[Tensor], Tensor] | None:
    if fmt != "hif8":
        return None
    import en_dtypes

    def cast(x: Tensor) -> Tensor:
        codes = x.float().numpy().astype(en_dtypes.hifloat8)
        return torch.from_numpy(codes.astype("float32")).to(x.dtype)

    return cast


def bitsandbytes_peer(fmt: str) -> Callable[[Tensor], Tensor] | None:
    kind = {"nf4": "nf4", "bnb_fp4": "fp4"}.get(fmt)
    if kind is None:
        return None
    from bitsandbytes import functional

    def cast(x: Tensor) -> Tensor:
        packed, state = functional.quantize_4bit(x, blocksize=64, quant_type=kind)
        return functional.dequantize_4bit(packed, state)

    return cast


PEERS = {
    "torchao": torchao_peer,
    "microxcaling": microxcaling_peer,
    "en_dtypes": en_dtypes_peer,
    "bitsandbytes": bitsandbytes_peer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    gpu = args.device != "cpu"
    sync = torch.cuda.synchronize if gpu else lambda: None
    name = torch.cuda.get_device_name(args.device) if gpu else f"{os.cpu_count()} cores"
    print(f"torch {torch.__version__}, {platform.machine()}, {name}, {args.size} x {args.size}")
    table = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(args.size, args.size, generator=torch.Generator().manual_seed(0))
            x = x.to(args.device, dtype)
            for fmt in FORMATS:
                q = qgate.Quantizer(fmt)
                runs = {"copy": x.clone, "qgate": functools.partial(q, x)}
                for peer, make in PEERS.items():
                    if (run := None if gpu and peer == "en_dtypes" else make(fmt)) is not None:
                        runs[peer] = functools.partial(run, x)
                timed = {k: (lambda work=work: (work(), sync())) for k, work in runs.items()}
                times = _turns.seconds(timed, args.rounds)
                mine = times["qgate"]
                speed = x.numel() / statistics.median(mine) / 1e6
                peers = [p for p in PEERS if p in times]
                ratio = ", ".join(f"{_turns.median_ratio(times[p], mine):.1f}x {p}" for p in peers)
                copies = _turns.median_ratio(mine, times["copy"])
                row = [threads, str(dtype)[6:], fmt, round(speed), ratio, f"{copies:.1f}"]
                table.append([*row, f"{1 / copies:.0%}"] if gpu else row)
    heads = ["threads", "dtype", "format", "M/s", "times the peer", "copies"]
    print(tabulate(table, headers=[*heads, "bandwidth"] if gpu else heads))


if __name__ == "__main__":
    main()
