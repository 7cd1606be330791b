"""What the largest inputs cost: processor time and memory of one command each.

    python benchmarks/large.py sweep-file      a sparse file of 20 GB (--gigabytes), bf16
    python benchmarks/large.py sweep-fp32      a tensor of 512 MB (--megabytes), fp32
    python benchmarks/large.py report          the records of 50,000 distinct gates (--gates)
    python benchmarks/large.py names           300,000 tensors (--tensors) of a file, listed

Seconds are those of the processor, with all threads, beside what a command without work takes; MB
are the most anonymous memory that the process had. Wall time depends on who else computes.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from qgate.storage.safetensors_heads import write_head  # noqa: E402

_QGATE = [sys.executable, "-m", "qgate"]


def measured(command: list[str], folder: Path) -> tuple[float, float, float]:
    """Return seconds of the processor and of the wall, and the most anonymous MB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun, most = time.perf_counter(), 0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, _anonymous_kb(process.pid))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, time.perf_counter() - begun, most / 1000


def _anonymous_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def write_sparse(path: Path, gigabytes: int) -> None:
    """Write a file of bf16 zeros that takes no space, but for a few numbers at its start."""
    rows = gigabytes * 2**30 // 2 // 4096
    size = rows * 4096 * 2
    head = write_head({"x": {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, size]}})
    with path.open("wb") as file:
        file.write(head)
        file.write(np.arange(0x3F80, 0x4080, dtype="<u2").tobytes())
        file.truncate(len(head) + size)


def sweep_file(folder: Path, args: argparse.Namespace) -> list[str]:
    write_sparse(folder / "x.safetensors", args.gigabytes)
    return [*_QGATE, "sweep", "x.safetensors", "--no-plots", "--quiet", "--granularity", "tensor"]


def sweep_fp32(folder: Path, args: argparse.Namespace) -> list[str]:
    draw = np.random.default_rng(0)
    np.save(
        folder / "x.npy", draw.standard_normal((args.megabytes * 2**18 // 4096, 4096), np.float32)
    )
    return [*_QGATE, "sweep", "x.npy", "--no-plots", "--quiet", "--granularity", "tensor"]


def report(folder: Path, args: argparse.Namespace) -> list[str]:
    from tests.page.gate_records import write_results

    write_results(folder / "r.jsonl", args.gates, failing=60, layers=args.gates // 8)
    return [*_QGATE, "report", "r.jsonl", "--output", "r.html", "--output", "r.csv"]


def names(folder: Path, args: argparse.Namespace) -> list[str]:
    entries = {
        f"model.layers.{n}.mlp.weight": {
            "dtype": "BF16",
            "shape": [2],
            "data_offsets": [4 * n, 4 * n + 4],
        }
        for n in range(args.tensors)
    }
    with (folder / "x.safetensors").open("wb") as file:
        file.write(write_head(entries))
        file.write(bytes(4 * args.tensors))
    code = "from qgate.dumps import floats_in; print(len(floats_in('x.safetensors')))"
    return [sys.executable, "-c", code]


CASES: dict[str, Callable[[Path, argparse.Namespace], list[str]]] = {
    "sweep-file": sweep_file, "sweep-fp32": sweep_fp32, "report": report, "names": names,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    for name, usual in (
        ("gigabytes", 20),
        ("megabytes", 512),
        ("gates", 50_000),
        ("tensors", 300_000),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        seconds, wall, megabytes = measured(CASES[args.case](folder, args), folder)
        empty, _, _ = measured([sys.executable, "-c", "import torch"], folder)
        written = {path.name: path.stat().st_size / 1e6 for path in folder.glob("r.*")}
    print(f"{args.case}: {seconds:.1f} s of the processor ({empty:.1f} s to import torch), "
          f"{wall:.1f} s, {megabytes:.0f} MB anonymous")  # fmt: skip
    for name, size in sorted(written.items()):
        print(f"  {name}: {size:.1f} MB")


if __name__ == "__main__":
    main()
