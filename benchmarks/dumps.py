"""What it costs to compare two dumps and to draw one.

    python benchmarks/dumps.py compare [--gigabytes 4.5] [--dtype bfloat16] [--folder DIR]
    python benchmarks/dumps.py draw [--tensors 1000] [--elements 1048576] [--jobs 2]
    python benchmarks/dumps.py memory [--tensors 20000] [--ranks 20] [--jobs 2]

`compare` writes two dumps of that size and compares them with the page cache warm, once with equal
content and once with every tensor different, each in turn with reading both dumps. `draw` runs the
command in a process of its own and says how long it took and how much memory its largest process
used. `memory` draws (without pictures) and compares dumps of small tensors, of a fifth of the ranks
and of all of them, and says what the process that drives the others used at most.
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

from qgate.comparing.dump_comparison import compare_dumps
from qgate.dumps import Dump, DumpWriter, Record

_NAMES = ("input", "weight", "output", "grad_output", "grad_input")


def write(
    folder: Path,
    tensors: int,
    elements: int,
    dtype: torch.dtype,
    noise: float = 0,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Path:
    """A rank of a model's shape: layers of activations, weights and gradients."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(elements // 1024, 1024, generator=generator)
    apart = noise * torch.randn(base.shape, generator=generator)
    header = {"model": "benchmark"}
    with DumpWriter(folder, header=header, rank=rank, world_size=world_size) as writer:
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
                rank=rank,
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
    command = [sys.executable, "-m", "qgate", "dumps", "draw", str(home / "dump")]
    command += ["--output-dir", str(home / "draw"), "--jobs", str(args.jobs)]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    took = time.perf_counter() - start
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(
        f"{args.tensors} tensors of {args.elements} {args.dtype}, {args.jobs} processes: ", end=""
    )
    print(f"{took:.1f} s, at most {most:.0f} MB in one process")


def memory(args: argparse.Namespace, home: Path) -> None:
    each = args.tensors // args.ranks
    rows = []
    for ranks in (args.ranks // 5, args.ranks):
        folders = [home / f"{ranks}-{side}" for side in "ab"]
        for noise, folder in zip((0, 0.01), folders, strict=True):
            for rank in range(ranks):
                write(folder, each, 1024, torch.bfloat16, noise, rank=rank, world_size=ranks)
        output, jobs = ["--output-dir", str(home / f"draw{ranks}")], str(args.jobs)
        commands = {
            "draw, no pictures": ["dumps", "draw", str(folders[0]), "--no-plots", *output],
            "compare": ["dumps", "compare", *map(str, folders)],
        }
        for name, command in commands.items():
            whole = [sys.executable, "-c", _DRIVER, *command, "--jobs", jobs]
            start = time.perf_counter()
            found = subprocess.run(whole, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(
                [name, ranks, ranks * each, float(found.split()[-1]), time.perf_counter() - start]
            )
    heads = ["", "ranks", "tensors", "driver's peak (MB)", "seconds"]
    print(tabulate(sorted(rows), headers=heads, floatfmt=".0f"))


_DRIVER = """
import resource, sys
if __name__ == "__main__":
    from qgate.cli import main
    main(sys.argv[1:])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compare", "draw", "memory"))
    parser.add_argument("--gigabytes", type=float, default=4.5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tensors", type=int, default=None, help="1000; 20000 for memory")
    parser.add_argument("--ranks", type=int, default=20, help="of all tensors, for memory")
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where there is room (default: temporary)")
    args = parser.parse_args()
    args.tensors = args.tensors or (20_000 if args.what == "memory" else 1000)
    with tempfile.TemporaryDirectory(dir=args.folder) as home:
        {"compare": compare, "draw": draw, "memory": memory}[args.what](args, Path(home))


if __name__ == "__main__":
    main()
