"""The cost of activation statistics over their forward passes, and their memory.

    python benchmarks/activations.py [--rounds 5] [--samples 64] [--tokens 512] [--no-memory]

A Llama of 4 layers and 256 channels. `bare` runs the samples through it; `down_proj` measures the
inputs and outputs of the layers of quant-smooth-ana's example, `every layer` all linear layers and
blocks; both make all four analyses: magnitude, outliers, distribution and percentiles of channels.
Memory is the peak of a process of its own, with 16 and 256 samples too.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

import qgate

sys.path.insert(0, str(Path(__file__).parent))
from _turns import median_ratio, seconds

WAYS = ("bare", "down_proj", "every layer")
_ALL = {
    "enabled.distribution": True,
    "enabled.percentile_range": True,
    "smoothing.enabled": False,
    "data.num_samples": 100_000,
}


def network() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    made: nn.Module = LlamaForCausalLM(config).eval()
    return made


def way(name: str, model: nn.Module, samples: list[Tensor]) -> Callable[[], object]:
    def bare() -> None:
        with torch.no_grad():
            for ids in samples:
                model(ids)

    patterns = {"magnitude.patterns": (r"mlp\.down_proj",)} if name == "down_proj" else {}
    settings = {**_ALL, **patterns}
    return bare if name == "bare" else lambda: qgate.activations(model, samples, **settings)


def ids_of(count: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 2000, (1, tokens), generator=generator) for _ in range(count)]


def peak(name: str, samples: int, tokens: int) -> float:
    """Megabytes of a process that does nothing else."""
    command = [sys.executable, __file__, "--only", name, "--tokens", str(tokens)]
    done = subprocess.run(
        [*command, "--samples", str(samples)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, samples = network(), ids_of(args.samples, args.tokens)
    if args.only:
        way(args.only, model, samples)()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    times = seconds({name: way(name, model, samples) for name in WAYS}, args.rounds)
    counts = [] if args.no_memory else sorted({16, args.samples, 256})
    peaks = {name: [peak(name, count, args.tokens) for count in counts] for name in WAYS}
    rows = [
        [
            name,
            min(times[name]),
            median_ratio(times[name], times["bare"]),
            *[f"{mb:.0f}" for mb in peaks[name]],
        ]
        for name in WAYS
    ]
    heads = ["way", "seconds", "times bare", *[f"peak MB, {count} samples" for count in counts]]
    print(tabulate(rows, heads, floatfmt=".2f"))


if __name__ == "__main__":
    main()
