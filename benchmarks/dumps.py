"""What it costs to compare two dumps and to draw one.

    python benchmarks/dumps.py compare [--gigabytes 4.5] [--dtype bfloat16] [--folder DIR]
    python benchmarks/dumps.py draw [--tensors 1000] [--elements 1048576] [--jobs 2]

`compare` writes two dumps of that size and compares them with the page cache warm, once with equal
content and once with every tensor different, each in turn with reading both dumps. `draw` runs the
command in a process of its own and says how long it took and how much memory its largest process
used.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _turns import seconds
from tabulate import tabulate

from qgate.dumps import Dump, DumpWriter, Record
from qgate.pipeline.dumps.comparisons import compare_dumps

_NAMES = ("input", "weight", "output", "grad_output", "grad_input")


def write(folder: Path, tensors: int, elements: int, dtype: torch.dtype, noise: float = 0) -> Path:
    """A dump of a model's shape: layers of activations, weights and gradients."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(elements // 1024, 1024, generator=generator)
    apart = noise * torch.randn(base.shape, generator=generator)
    with DumpWriter(folder, header={"model": "benchmark"}) as writer:
        for order in range(tensors):
            name = _NAMES[order % 5]
            values = base * (1 + order / tensors) * (1e-4 if name.startswith("grad") else 1)
            record = Record(
                order=order,
                layer_type="linear",
                operation="backward" if name.startswith("grad") else "forward",
                phase="post" if name in ("output", "grad_input") else "pre",
                component="linear",
                name=name,
                module=f"layers.{order // 10}.fc{order % 10 // 5}",
                layer=order // 10,
                quant_type="bf16",
            )
            writer.add(record, (values + apart * values.abs().mean()).to(dtype))
    return folder


def _read(path: Path) -> None:
    buffer = bytearray(1 << 22)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def compare(args: argparse.Namespace, home: Path) -> None:
    dtype = getattr(torch, args.dtype)
    elements = 2**24
    tensors = max(1, round(args.gigabytes * 1e9 / elements / dtype.itemsize))
    a = write(home / "a", tensors, elements, dtype)
    other = write(home / "other", tensors, elements, dtype, noise=0.01)
    work = {
        "reading both": lambda: [_read(path) for d in (a, other) for path in d.rglob("*.saf*")],
        "equal content": lambda: compare_dumps(Dump.open(a), Dump.open(a)),
        "all different": lambda: compare_dumps(Dump.open(a), Dump.open(other)),
    }
    times = seconds(work, args.rounds)
    size = tensors * elements * dtype.itemsize / 1e9
    rows = [[name, statistics.median(t), size / statistics.median(t)] for name, t in times.items()]
    print(f"{tensors} tensors, {size:.2f} GB each dump, {args.dtype}, ", end="")
    print(f"{torch.get_num_threads()} threads")
    print(tabulate(rows, headers=["", "seconds", "GB of one dump per second"], floatfmt=".2f"))


def draw(args: argparse.Namespace, home: Path) -> None:
    write(home / "dump", args.tensors, args.elements, getattr(torch, args.dtype))
    command = [sys.executable, "-m", "qgate", "draw", str(home / "dump")]
    command += ["--output-dir", str(home / "draw"), "--jobs", str(args.jobs)]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    took = time.perf_counter() - start
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(
        f"{args.tensors} tensors of {args.elements} {args.dtype}, {args.jobs} processes: ", end=""
    )
    print(f"{took:.1f} s, at most {most:.0f} MB in one process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compare", "draw"))
    parser.add_argument("--gigabytes", type=float, default=4.5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where there is room (default: temporary)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as home:
        {"compare": compare, "draw": draw}[args.what](args, Path(home))


if __name__ == "__main__":
    main()
