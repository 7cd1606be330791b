"""Time on a GPU of casts, counts, errors and a sweep: of the device alone, and of the host.

    python benchmarks/gpu.py [--quick] [--json FILE] [--only TEXT] [--seconds 110]

bf16 tensors of 2^10, 2^24 and 2^28 numbers (--quick: 2^24 and 2^28, fewer rounds, 40 s). Device
time is that of calls queued behind a sleep, each after a write that empties the L2 cache, so no
host time is in it; host time is what a call takes to return. Work that waits for the device (whose
result is on the host) has one time, that of the whole call. "bandwidth" is the share of the bytes
per second that the device's own copy (`y.copy_(x)`) moves, for the bytes that the work has to
move; "copy" is the copy's time over the work's.

A row that fails prints its error, and the others go on. Without a CUDA device it prints the bytes
and ends with status 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import qgate
from qgate.stats.error_stats import errors
from qgate.stats.value_counts import counts

Work = Callable[[], object]
SMALL, USUAL, LARGE = 10, 24, 28
HEADS = ("", "size", "device ms", "bandwidth", "copy", "goal", "host us")
COPY_BYTES = 4


@dataclass(frozen=True)
class Row:
    """Work on a matrix; `make` prepares it, which is not timed."""

    name: str
    moved: float
    """Bytes read and written per number, at best."""
    make: Callable[[Tensor], Work]
    goal: str = ""
    waits: bool = False
    sizes: tuple[int, ...] = (SMALL, USUAL, LARGE)


@dataclass(frozen=True)
class Figures:
    """Times of one row at one size, or the error that it ended with."""

    name: str
    log2: int
    device_ms: float = math.nan
    host_us: float = math.nan
    bandwidth: float = math.nan
    of_copy: float = math.nan
    goal: str = ""
    error: str = ""

    def cells(self) -> list[str]:
        if self.error:
            return [self.name, f"2^{self.log2}", "error"]
        host = "waits" if math.isnan(self.host_us) else f"{self.host_us:.0f}"
        shares = (f"{self.bandwidth:.0%}", f"{self.of_copy:.0%}")
        return [self.name, f"2^{self.log2}", f"{self.device_ms:.4g}", *shares, self.goal, host]


# Rows --------------------------------------------------------------------------------------------


def cast(fmt: str, **options: Any) -> Callable[[Tensor], Work]:
    quantizer = qgate.Quantizer(fmt, **options)
    return lambda x: functools.partial(quantizer, x)


def counting(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Work]:
    return lambda x: functools.partial(counts, change(x))


def uniform_bits(x: Tensor) -> Tensor:
    random = torch.Generator(x.device).manual_seed(1)
    bits = torch.randint(
        -(2**15), 2**15, x.shape, dtype=torch.int16, device=x.device, generator=random
    )
    return bits.view(x.dtype)


def compared(other: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Work]:
    return lambda x: functools.partial(errors, other(x), x)


def wide_errors(x: Tensor) -> Work:
    return functools.partial(errors, qgate.quantize(x, "mxfp8_e4m3").float(), x.float())


def compiled(function: Callable[[Tensor], object]) -> Callable[[Tensor], Work]:
    """Prepare a peer by torch.compile, which takes seconds."""

    def make(x: Tensor) -> Work:
        torch.compiler.reset()
        return functools.partial(torch.compile(function, dynamic=False), x)

    return make


def plain_fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def fp8_by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) * (1 / 448)
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def int8_by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) * (1 / 127)
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def torchao_mx(element: str, mode: str) -> Callable[[Tensor], Work]:
    def make(x: Tensor) -> Work:
        mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        rule = importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
        dtype = getattr(torch, element)
        return compiled(lambda y: mx.to_mx(y, dtype, 32, getattr(rule, mode)))(x)

    return make


BLOCKS = {
    "mxfp8_e4m3": (4, "95 % of a copy"), "mxfp4_e2m1": (4, "95 % of a copy"),
    "mxint8": (4, "92 % of a copy"), "nvfp4": (6, "60 % of a copy"), "hif4": (4, "65 % of a copy"),
}  # fmt: skip
OTHER_BLOCKS = ("mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3")
ELEMENTS = {"fp8_e4m3": "95 % of a copy", "fp4_e2m1": "95 % of a copy", "hif8": "85 % of a copy"}
SCALED = ("fp8_e4m3", "int8")
ALL, FROM_USUAL, ONLY_LARGE = (SMALL, USUAL, LARGE), (USUAL, LARGE), (LARGE,)


def rows() -> Iterator[Row]:
    """Yield all rows, what matters most first."""
    for fmt, (moved, goal) in BLOCKS.items():
        yield Row(fmt, moved, cast(fmt), goal)
    for fmt, goal in ELEMENTS.items():
        yield Row(fmt, 4, cast(fmt), goal)
    for fmt in SCALED:
        by_row = cast(fmt, granularity="channel", axis=0)
        yield Row(f"{fmt}, one scale", 6, cast(fmt, granularity="tensor"), "60 % of a copy")
        yield Row(f"{fmt}, by row", 4, by_row, "85 % of a copy")
    gaussian = counting(lambda x: x)
    yield Row("counts, Gaussian", 2, gaussian, "0.55 ms", True)
    for name, change in {
        "zeros": torch.zeros_like,
        "few values": lambda x: qgate.quantize(x, "mxfp4_e2m1"),
        "uniform bits": uniform_bits,
    }.items():
        yield Row(f"counts, {name}", 2, counting(change), "0.55 ms", True, ONLY_LARGE)
    quantized = compared(lambda x: qgate.quantize(x, "mxfp8_e4m3"))
    yield Row("errors", 4, quantized, "3 ms", True)
    yield Row("errors, equal", 4, compared(lambda x: x), "", True, ONLY_LARGE)
    yield Row("errors, fp32", 8, wide_errors, "", True, ONLY_LARGE)
    sweep = functools.partial(functools.partial, qgate.sweep, format="fp8_e4m3")
    yield Row("sweep, 21 levels", 2, sweep, "2 ms", True)
    for fmt, (moved, _) in BLOCKS.items():
        yield Row(f"{fmt}, axis 0", moved, cast(fmt, axis=0), "", False, FROM_USUAL)
    for fmt in SCALED:
        by_column = cast(fmt, granularity="channel", axis=1)
        yield Row(f"{fmt}, by column", 6, by_column, "", False, FROM_USUAL)
    yield from peers()
    for fmt in OTHER_BLOCKS:
        yield Row(fmt, 4, cast(fmt), "", False, ONLY_LARGE)


def peers() -> Iterator[Row]:
    """Yield what others take for the like, compiled; their codes are narrower than ours."""
    for name, moved, function in (
        ("torch fp8 cast", 3, plain_fp8), ("torch fp8 by row", 3, fp8_by_row),
        ("torch int8 by row", 3, int8_by_row),
    ):  # fmt: skip
        yield Row(f"{name}, compiled", moved, compiled(function), "", False, FROM_USUAL)
    for element, moved, mode in (
        ("float8_e4m3fn", 3.03, "FLOOR"), ("float8_e4m3fn", 3.03, "RCEIL"),
    ):  # fmt: skip
        make = torchao_mx(element, mode)
        yield Row(f"torchao {element} {mode}, compiled", moved, make, "", False, ONLY_LARGE)


# Time --------------------------------------------------------------------------------------------


class Clock:
    """Times work on one device; `emptied` is a buffer larger than its L2 cache."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26))
        self.emptied = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._cycles_per_ms = self._measure_sleep()

    def whole(self, work: Work) -> float:
        """Return the milliseconds of a call that waits for the device."""
        times = []
        for _ in range(self.rounds):
            self.emptied.zero_()
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            work()
            torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)

    def queued(self, work: Work) -> tuple[float, float]:
        """Return the device's milliseconds of a call, and the host's microseconds until it returns.

        A call that waits for the device after all has the time of the host in both.
        """
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        pause = min(self.rounds * (time.perf_counter() - begin) * 1e3 + 1, 50)
        spans, hosts = [], []
        torch.cuda._sleep(int(pause * self._cycles_per_ms))
        for _ in range(self.rounds):
            self.emptied.zero_()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            start = time.perf_counter()
            work()
            hosts.append((time.perf_counter() - start) * 1e6)
            last.record()
            spans.append((first, last))
        torch.cuda.synchronize(self.device)
        return statistics.median(a.elapsed_time(b) for a, b in spans), statistics.median(hosts)

    def _measure_sleep(self) -> float:
        cycles, times = 10_000_000, []
        for _ in range(2):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            torch.cuda._sleep(cycles)
            last.record()
            torch.cuda.synchronize(self.device)
            times.append(first.elapsed_time(last))
        return cycles / times[-1]


def matrix(log2: int, device: torch.device) -> Tensor:
    columns = 2 ** min(12, log2 // 2)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2**log2, generator=generator, device=device, dtype=torch.bfloat16)
    return x.view(-1, columns)


def measure(row: Row, x: Tensor, copy_ms: float, clock: Clock) -> Figures:
    log2 = x.numel().bit_length() - 1
    try:
        work = row.make(x)
        for _ in range(2):  # the proof, compilation, allocation
            work()
        device_ms, host_us = (clock.whole(work), math.nan) if row.waits else clock.queued(work)
    except Exception as error:
        torch.cuda.empty_cache()
        lines = str(error).strip().splitlines() or [""]
        return Figures(row.name, log2, error=f"{type(error).__name__}: {lines[0][:120]}")
    of_copy = copy_ms / device_ms
    bandwidth = of_copy * row.moved / COPY_BYTES
    goal = row.goal if log2 == LARGE else ""
    return Figures(row.name, log2, device_ms, host_us, bandwidth, of_copy, goal)


def run(chosen: list[Row], sizes: tuple[int, ...], clock: Clock, deadline: float) -> list[Figures]:
    """Measure all rows at the largest size first, until the time is over."""
    results = []
    for log2 in sorted(sizes, reverse=True):
        x = matrix(log2, clock.device)
        y = torch.empty_like(x)
        copy_ms, host_us = clock.queued(functools.partial(y.copy_, x))
        del y
        results.append(Figures("copy", log2, copy_ms, host_us, 1.0, 1.0))
        print(f"copy of 2^{log2}: {copy_ms:.4g} ms", file=sys.stderr)
        for row in chosen:
            if log2 not in row.sizes:
                continue
            if time.monotonic() > deadline:
                results.append(Figures(row.name, log2, error="not run: the time is over"))
                continue
            results.append(measure(row, x, copy_ms, clock))
            print(*results[-1].cells(), results[-1].error, sep="  ", file=sys.stderr)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, 40 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their name")
    parser.add_argument("--seconds", type=float, help="start no row after so long")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    chosen = [row for row in rows() if args.only in row.name]
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured. What each has to move, bf16:")
        bounds = [[row.name, row.moved, f"{COPY_BYTES / row.moved:.1f}x"] for row in chosen]
        print(tabulate(bounds, headers=["", "bytes/number", "copies per time, at best"]))
        return 1
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device)
    print(f"torch {torch.__version__}, {name}, bf16")
    seconds = args.seconds or (40 if args.quick else 110)
    deadline = time.monotonic() + seconds
    clock = Clock(device, rounds=5 if args.quick else 11)
    results = run(chosen, FROM_USUAL if args.quick else ALL, clock, deadline)
    print(tabulate([each.cells() for each in results], headers=HEADS))
    for each in results:
        if each.error:
            print(f"{each.name}, 2^{each.log2}: {each.error}")
    if args.json:
        meta = {"torch": torch.__version__, "device": name, "quick": args.quick}
        figures = [
            {key: None if value != value else value for key, value in asdict(each).items()}
            for each in results
        ]
        args.json.write_text(json.dumps({**meta, "figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
