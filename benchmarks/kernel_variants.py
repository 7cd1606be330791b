"""The device time of each cast with other tiles and warps than those of `TILINGS`.

    python benchmarks/kernel_variants.py [--log2 28] [--seconds 55] [NAME ...]

Calls are queued behind a sleep, so that no host time is in it, and a write of 256 MiB before each
empties the caches. The first variant of each is the one in use; the bits of the others are compared
with its.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import qgate
from qgate.formats.engine import on_device
from qgate.formats.engine.job import layout_of
from qgate.kernels.shapes import TILINGS, Tiling

CAST: list[tuple[int, ...]] = [(2048, 2), (4096, 4), (1024, 2), (4096, 8)]
LARGEST: list[tuple[int, ...]] = [(4096, 4, 8), (4096, 4, 4), (4096, 8, 16), (8192, 8, 4)]
TALL: list[tuple[int, ...]] = [
    (4096, 4, 8),
    (2048, 4, 8),
    (2048, 2, 16),
    (4096, 4, 2),
    (4096, 8, 8),
]
TENSOR: dict[str, Any] = {"granularity": "tensor"}
ROWS: dict[str, Any] = {"granularity": "channel", "axis": 0}
COLUMNS: dict[str, Any] = {"granularity": "channel", "axis": 1}
# Format, options, what of TILINGS varies, and the variants.
WORK: dict[str, tuple[str, dict[str, Any], str, list[tuple[int, ...]]]] = {
    "nvfp4": ("nvfp4", {}, "nvfp4", [(1024, 2), (4096, 8), (2048, 4), (1024, 1), (512, 1)]),
    "hif4": ("hif4", {}, "hif4", [(4096, 4), (1024, 2), (2048, 4)]),
    "int8 by row": ("int8", ROWS, "rows", [(4096, 4), (4096, 8), (4096, 2), (4096, 1)]),
    "fp8 by row": ("fp8_e4m3", ROWS, "rows", [(4096, 4), (4096, 8), (4096, 2), (4096, 1)]),
    "int8 one scale": ("int8", TENSOR, "long rows", [(2048, 2), (4096, 4), (2048, 4), (1024, 2)]),
    "fp8 one scale": ("fp8_e4m3", TENSOR, "long rows", [(2048, 2), (4096, 4), (1024, 2)]),
    "int8 one scale, largest": ("int8", TENSOR, "largest", LARGEST),
    "fp8 by column": ("fp8_e4m3", COLUMNS, "columns", TALL),
    "fp8 by column, largest": ("fp8_e4m3", COLUMNS, "largest", LARGEST),
    "mxint8": ("mxint8", {}, "mx", [(2048, 4), (2048, 2), (1024, 2)]),
    "mxfp8": ("mxfp8_e4m3", {}, "mx", [(2048, 4), (2048, 2), (1024, 2)]),
    "mxfp4": ("mxfp4_e2m1", {}, "mx", [(2048, 4), (2048, 2), (1024, 2)]),
    "fp8 cast": ("fp8_e4m3", {}, "flat", CAST),
    "hif8 cast": ("hif8", {}, "flat", CAST),
    "nvfp4, largest": ("nvfp4", {}, "largest", LARGEST),
}  # fmt: skip


def microseconds(work: Callable[[], object], flushed: Tensor, rounds: int = 5) -> float:
    """The median device time of calls that wait for each other behind a sleep."""
    pairs = []
    torch.cuda._sleep(2_000_000)
    for _ in range(rounds):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1000 * start.elapsed_time(end) for start, end in pairs)


def prepared(x: Tensor, out: Tensor, fmt: str, options: dict[str, Any]) -> Callable[[], None]:
    q = qgate.Quantizer(fmt, **options)
    layout = layout_of(x, q)
    data = layout.arrange(x)
    cast = on_device.cast_for(x, q, layout)
    assert cast is not None, f"no kernel for {fmt}"
    run = cast.prepare(on_device.memory_of(layout), x.dtype, out.dtype)
    return lambda: run(data, out, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(WORK))
    parser.add_argument("--log2", type=int, default=28)
    parser.add_argument("--seconds", type=float, default=55.0)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured.")
        return 1
    begin = time.monotonic()
    x = torch.randn(2**args.log2 // 4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    flushed = torch.empty(2**26, dtype=torch.int32, device="cuda")
    copy = microseconds(lambda: out.copy_(x), flushed, 9)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}: a copy takes {copy:.1f} us")
    for name in args.names:
        fmt, options, key, variants = WORK[name]
        kept, first = TILINGS[key], None
        for variant in variants:
            label = f"{name:24} {'x'.join(map(str, variant)):12}"
            if time.monotonic() - begin > args.seconds:
                print(f"{label} not tried: the time is over")
                continue
            try:
                TILINGS[key] = Tiling(*variant)
                work = prepared(x, out, fmt, options)
                work()
                took = microseconds(work, flushed)
                bits = out.view(torch.int16)
                first = bits.clone() if first is None else first
                apart = int((bits != first).sum())
                note = f"  {apart} OTHER BITS" if apart else ""
                print(f"{label} {took:9.1f} us {copy / took:7.1%}{note}", flush=True)
            except Exception as error:
                print(f"{label} {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            finally:
                TILINGS[key] = kept
    return 0


if __name__ == "__main__":
    sys.exit(main())
