"""The time of formats whose blocks choose between two grids, in times of NVFP4's.

    python benchmarks/choosing.py [--rounds 15] [--size 2048]

All formats run in turn on one tensor and one thread; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import qgate

FORMATS = ("nvfp4", "if4", "mixfp4", "if3", "if6_e2m3", "nvfp4_4over6", "nvfp4_4over6_mse")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(args.size, args.size, generator=torch.Generator().manual_seed(0)).to(dtype)
        seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
        for _ in range(args.rounds + 1):
            for name in FORMATS:
                start = time.perf_counter()
                qgate.quantize(x, name)
                seconds[name].append(time.perf_counter() - start)
        usual = statistics.median(seconds["nvfp4"][1:])
        for name in FORMATS:
            median = statistics.median(seconds[name][1:])
            print(f"{dtype!s:15} {name:18} {1e3 * median:8.1f} ms  {median / usual:5.2f}")


if __name__ == "__main__":
    main()
