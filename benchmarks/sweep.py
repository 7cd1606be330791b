"""The scale sweep against a copy of the tensor, against direct evaluation, and as a command.

    python benchmarks/sweep.py [--parts a b c d memory command] [--rounds 5] [--largest 26]

a        a 21-level sweep, all metrics and overflow analysis, in copies of the tensor
b        against evaluating every level with float32 tensor operations
c        five formats against one
d        a block sweep in copies of the tensor
memory   peak memory above start-up for a memory-mapped file of 4 GB
command  `qgate sweep` of three 2^24 tensors without plots against importing torch and pandas
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _turns
import torch
from torch import Tensor

import qgate
from qgate.stats import block_counts, counts

FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1")


def activation(bits: int) -> Tensor:
    """Normal numbers, channels of log-normal scale, a few of them much larger."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.exp(torch.randn(2**10, generator=generator))
    channels[::200] *= 50
    x = torch.randn(2 ** (bits - 10), 2**10, generator=generator) * channels
    return x.bfloat16()


def direct(x: Tensor, exponents: list[float]) -> list[tuple[float, ...]]:
    """Each level on the whole tensor in float32, as a straightforward tool does it."""
    x = x.float()
    found = []
    for exponent in exponents:
        factor = 2.0**exponent
        scaled = (x / factor).clamp(-448.0, 448.0)
        quantum = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp_min(2.0**-6))) - 3)
        q = torch.round(scaled / quantum) * quantum * factor
        error = q - x
        mse = (error**2).mean()
        mae = error.abs().mean()
        cosine = torch.nn.functional.cosine_similarity(q.flatten(), x.flatten(), dim=0)
        psnr = 20 * torch.log10(x.abs().max() / mse.sqrt())
        relative = mae / x.abs().mean() * 100
        over = (x.abs() / factor > 448).sum()
        flush = ((q == 0) & (x != 0)).sum()
        worst = error.abs().max()
        found.append(
            tuple(float(v) for v in (mse, mae, cosine, psnr, relative, over, flush, worst))
        )
    return found


def part_a(largest: int, rounds: int) -> None:
    for bits in (20, 24, 26):
        if bits > largest:
            continue
        x = activation(bits)
        runs = {"copy": x.clone, "sweep": lambda x=x: qgate.sweep(x, "fp8_e4m3")}
        times = _turns.seconds(runs, rounds)
        ratio = _turns.median_ratio(times["sweep"], times["copy"])
        seconds = statistics.median(times["sweep"])
        print(f"(a) 2^{bits}: sweep {seconds * 1e3:.1f} ms, {ratio:.2f} copies")


def part_b(rounds: int) -> None:
    x = activation(24)
    exponents = [level["exponent"] for level in qgate.sweep(x, "fp8_e4m3").levels][:21]
    runs = {"direct": lambda: direct(x, exponents), "sweep": lambda: qgate.sweep(x, "fp8_e4m3")}
    times = _turns.seconds(runs, max(rounds // 2, 1))
    ratio = _turns.median_ratio(times["direct"], times["sweep"])
    seconds = statistics.median(times["direct"])
    print(f"(b) 2^24: 21 levels one by one take {seconds:.1f} s, {ratio:.0f} times the sweep")


def part_c(largest: int, rounds: int) -> None:
    x = activation(largest)

    def several(names: tuple[str, ...]) -> None:
        counted = counts(x)
        for name in names:
            qgate.sweep(counted, name)

    runs = {"one": lambda: several(FORMATS[:1]), "five": lambda: several(FORMATS)}
    times = _turns.seconds(runs, rounds)
    ratio = _turns.median_ratio(times["five"], times["one"])
    print(f"(c) 2^{largest}: five formats take {ratio:.2f} times one")


def part_d(largest: int, rounds: int) -> None:
    x = activation(largest)
    runs = {
        "copy": x.clone,
        "block": lambda: qgate.sweep(x, "mxfp8", granularity="block"),
        "count": lambda: block_counts(x),
    }
    times = _turns.seconds(runs, rounds)
    for name in ("count", "block"):
        ratio = _turns.median_ratio(times[name], times["copy"])
        print(f"(d) 2^{largest}: block {name} {ratio:.1f} copies")


_MEMORY = """
import resource, sys, torch, qgate
from qgate.dumps import read_tensors
qgate.sweep(torch.randn(2**12).bfloat16(), "fp8_e4m3")
qgate.sweep(torch.randn(2**12).bfloat16(), "mxfp8", granularity="block")

def private():
    fields = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
    return int(fields["RssAnon"].split()[0]) / 1024

import threading, time
start, peak, done = private(), 0.0, False

def watch():
    global peak
    while not done:
        peak = max(peak, private())
        time.sleep(0.01)

thread = threading.Thread(target=watch)
thread.start()
stored = next(read_tensors(sys.argv[1]))
qgate.sweep(stored.tensor, "fp8_e4m3")
tensor_peak = peak
qgate.sweep(stored.tensor, "mxfp8", granularity="block")
done = True
thread.join()
print(f"{tensor_peak - start:.0f} {peak - start:.0f}")
"""


def part_memory(gigabytes: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.safetensors"
        from safetensors.torch import save_file

        save_file({"x": torch.randn(int(gigabytes * 2**29)).bfloat16()}, path)
        out = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(path)], capture_output=True, text=True, check=True
        )
        tensor, block = out.stdout.split()
        print(
            f"memory: {gigabytes:g} GB file, {tensor} MB above start-up for the tensor sweep, "
            f"{block} MB with the block sweep"
        )


def part_command(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for i in range(3):
            path = Path(folder) / f"t{i}.pt"
            torch.save(activation(24), path)
            names.append(str(path))
        command = [sys.executable, "-m", "qgate", "sweep", *names, "--no-plots"]
        command += ["--output-dir", f"{folder}/out"]
        imports = [sys.executable, "-c", "import torch, pandas"]
        ratios = []
        for _ in range(rounds):
            seconds = []
            for argv in (command, imports):
                start = time.perf_counter()
                subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
                seconds.append(time.perf_counter() - start)
            ratios.append(seconds[0] / seconds[1])
        print(f"command: {seconds[0]:.1f} s, {statistics.median(ratios):.2f} times the imports")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ["a", "b", "c", "d", "memory", "command"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=26)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    calls = {
        "a": lambda: part_a(args.largest, args.rounds),
        "b": lambda: part_b(args.rounds),
        "c": lambda: part_c(args.largest, args.rounds),
        "d": lambda: part_d(args.largest, args.rounds),
        "memory": lambda: part_memory(args.gigabytes),
        "command": lambda: part_command(args.rounds),
    }
    for part in args.parts:
        calls[part]()


if __name__ == "__main__":
    main()
