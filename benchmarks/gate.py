"""Where the time of a gate goes: loading, calibration, references, and each part of a mode.

    python benchmarks/gate.py [--model tiny-mamba] [--modes essential] [--threads N]

There is no peer to run in turn; the parts are compared with each other and with the bare forward
pass over the same samples.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from qgate.devices import wait_calmly

wait_calmly()

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402

from qgate.gate.measuring.bench import Bench  # noqa: E402
from qgate.gate.measuring.tasks import task_values  # noqa: E402
from qgate.modes.setups import ModelSetup  # noqa: E402


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-mamba")
    parser.add_argument("--modes", default="essential")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(ModelSetup(args.model))
    rows = [["load", timed(lambda: bench.model)]]
    modes = bench.setup.select(args.modes, bench.model)
    if any(mode.calibrated for mode in modes):
        rows.append(["calibrate", timed(lambda: bench.calibration)])
    bases = dict.fromkeys(bench.quantized(mode).model.basis for mode in modes)
    for basis in bases:
        rows.append([f"reference, {basis}", timed(lambda basis=basis: bench.reference(basis))])
        gradients = timed(lambda basis=basis: bench.reference_gradients(basis))
        rows.append([f"reference gradients, {basis}", gradients])

    def bare() -> None:
        with torch.no_grad():
            for sample in bench.model.inputs:
                bench.model.module(sample)

    rows.append(["bare forward, sample by sample", timed(bare)])
    for mode in modes:
        parts = {
            "layers": timed(lambda mode=mode: bench.measure(mode)),
            "gradients": timed(lambda mode=mode: bench.gradients(mode)),
            "task": timed(lambda mode=mode: task_values(bench, mode)),
        }
        rows += [[f"mode {mode.name}, {name}", seconds] for name, seconds in parts.items()]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {args.threads} threads")
    print(tabulate([[name, f"{seconds:.2f}"] for name, seconds in rows], headers=["", "s"]))


if __name__ == "__main__":
    main()
