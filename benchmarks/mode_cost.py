"""What a mode costs: processor seconds and memory of its gates, on generated language models.

    python benchmarks/mode_cost.py [--modes int8 mxfp8 nvfp4] [--layers 2 8] [--width 1024]

For each model and mode the accepted errors are recorded, and then `pytest suites` runs with the
suites of layers, outputs and the task in a process with one thread. Seconds are of its processor
time, and memory is the most that it had. What a billion parameters cost more is the difference
between the two models.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

SUITES = Path(__file__).resolve().parents[1] / "suites"
NAMES = ("layer_outputs", "outputs", "task")
MODEL = """
import torch, qgate
from transformers import LlamaConfig, LlamaForCausalLM

def build(samples, seqlen, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size={width}, intermediate_size={width} * 11 // 4,
        num_hidden_layers={layers}, num_attention_heads={width} // 64,
        num_key_value_heads={width} // 64, max_position_embeddings=1024,
    )
    module = LlamaForCausalLM(config).eval()
    inputs = [torch.randint(512, (1, seqlen)) for _ in range(samples)]
    return qgate.Model(module, inputs, name="generated")
"""


@dataclass(frozen=True)
class Usage:
    """Processor seconds of a process, and its memory in gigabytes at most."""

    seconds: float
    gigabytes: float


def run(folder: Path, *options: str) -> Usage:
    """Run pytest in a folder, and measure what it used."""
    words = [sys.executable, "-m", "pytest", "suites", "-q", "-p", "no:cacheprovider"]
    words += ["--no-report", "--model", "generated.py:build", *options]
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "printed").open("wb") as file:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit((folder / "printed").read_text())
    return Usage(used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20)


def parameters(layers: int, width: int) -> int:
    """Count the weights of the linear layers in the blocks."""
    return layers * (4 * width**2 + 3 * width * (width * 11 // 4))


def measure(layers: int, width: int, modes: list[str], sampling: list[str]) -> dict[str, Usage]:
    """Record and then gate each mode of one model."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "suites").mkdir()
        for name in NAMES:
            shutil.copy(SUITES / f"test_{name}.py", folder / "suites")
        (folder / "generated.py").write_text(MODEL.format(layers=layers, width=width))
        usages = {}
        for mode in modes:
            run(folder, *sampling, "--mode", mode, "--update-baselines")
            usages[mode] = run(folder, *sampling, "--mode", mode)
        return usages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=["int8", "mxfp8", "nvfp4"])
    parser.add_argument("--layers", nargs=2, type=int, default=[2, 8], metavar=("FEW", "MANY"))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=128)
    args = parser.parse_args()
    sampling = ["--samples", str(args.samples), "--seqlen", str(args.seqlen)]
    sizes = [parameters(layers, args.width) for layers in args.layers]
    few, many = (measure(layers, args.width, args.modes, sampling) for layers in args.layers)
    rows = []
    for mode in args.modes:
        billions = (sizes[1] - sizes[0]) / 1e9
        more = (many[mode].seconds - few[mode].seconds) / billions
        memory = (many[mode].gigabytes - few[mode].gigabytes) / billions
        rows.append(
            [mode, few[mode].seconds, many[mode].seconds, more, many[mode].gigabytes, memory]
        )
    heads = ["mode", *(f"s, {size / 1e6:.0f} M" for size in sizes), "s per billion more"]
    heads += [f"GB, {sizes[1] / 1e6:.0f} M", "GB per billion more"]
    print(f"{args.samples} samples of {args.seqlen} tokens, one thread, width {args.width}")
    print(tabulate(rows, headers=heads, floatfmt=".1f"))


if __name__ == "__main__":
    main()
