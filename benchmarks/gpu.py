"""What a GPU takes for each format, for counting, errors and a sweep, as shares of its bandwidth.

    python benchmarks/gpu.py [--log2 28] [--rounds 5] [--device cuda]

One bf16 tensor. The yardstick is the device's own copy (`y.copy_(x)`, read and written bytes over
time). The share counts the bytes that the work has to move; "torch" is the same work without the
kernels. Without a CUDA device it prints those bytes and ends with status 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor

import qgate
from qgate.kernels import proving
from qgate.stats.error_stats import errors
from qgate.stats.value_counts import counts

# Bytes read and written per bf16 element; a copy moves 4.
CASTS: dict[str, int] = {
    "mxfp8_e4m3": 4, "mxfp8_e5m2": 4, "mxfp6_e3m2": 4, "mxfp6_e2m3": 4, "mxfp4_e2m1": 4,
    "mxint8": 4,
    "nvfp4": 6, "hif4": 4, "hif8": 4, "fp8_e4m3": 4, "fp8_e5m2": 4, "fp6_e3m2": 4, "fp6_e2m3": 4,
    "fp4_e2m1": 4, "int8": 6, "int4": 6,
}  # fmt: skip
# "errors, none" are those of equal tensors: no key is added to a table.
OTHERS = {"count": 2, "errors": 4, "errors, none": 4, "errors, fp32": 8, "sweep, 21 levels": 2}
GOALS = {**dict.fromkeys(CASTS, 0.8), "count": 0.5}


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """The median by the device's clock, after two runs that do not count (proof, allocation)."""
    found = []
    for turn in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if turn > 1:
            found.append(start.elapsed_time(end))
    return statistics.median(found)


def works(x: Tensor) -> dict[str, Callable[[], object]]:
    quantizers = {name: qgate.Quantizer(name) for name in CASTS}
    y = qgate.quantize(x, "mxfp8_e4m3")
    found: dict[str, Callable[[], object]] = {
        name: lambda q=q: q(x) for name, q in quantizers.items()
    }
    found["count"] = lambda: counts(x)
    wide_x, wide_y = x.float(), y.float()
    found["errors"] = lambda: errors(y, x)
    found["errors, none"] = lambda: errors(x, x)
    found["errors, fp32"] = lambda: errors(wide_y, wide_x)
    found["sweep, 21 levels"] = lambda: qgate.sweep(x, "fp8_e4m3")
    return found


def copy_time(x: Tensor, rounds: int) -> float:
    y = torch.empty_like(x)
    return milliseconds(lambda: y.copy_(x), rounds)


def measure(x: Tensor, rounds: int) -> list[list[object]]:
    copy = copy_time(x, rounds)
    bandwidth = 4 * x.numel() / copy
    print(f"copy: {copy:.3f} ms, {bandwidth / 1e6:.0f} GB/s")
    table: list[list[object]] = []
    for name, work in works(x).items():
        mine = milliseconds(work, rounds)
        with mock.patch.object(proving, "serves", return_value=False):
            torch_alone = milliseconds(work, 1)
        share = (CASTS | OTHERS)[name] * x.numel() / mine / bandwidth
        goal = f"{GOALS[name]:.0%}" if name in GOALS else ""
        row = [name, f"{mine:.2f}", f"{share:.0%}", goal, f"{copy / mine:.0%}"]
        table.append([*row, f"{torch_alone:.1f}", f"{torch_alone / mine:.1f}x"])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log2", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured. What each has to move, bf16:")
        rows = [[name, moved, f"{4 / moved:.1f}x"] for name, moved in (CASTS | OTHERS).items()]
        print(tabulate(rows, headers=["", "bytes/element", "copies per time, at best"]))
        return 1
    device = torch.device(args.device)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}, 2^{args.log2} bf16")
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2**args.log2, generator=generator, device=device, dtype=torch.bfloat16)
    heads = ["", "ms", "of bandwidth", "aim", "of a copy's speed", "torch ms", "kernel gains"]
    print(tabulate(measure(x, args.rounds), headers=heads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
