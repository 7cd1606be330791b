"""What it costs to check a quantized checkpoint against its parent.

    python benchmarks/checkpoints.py speed [--megabytes 134] [--rounds 5]
    python benchmarks/checkpoints.py cores [--parameters 270] [--jobs 2]
    python benchmarks/checkpoints.py memory [--gigabytes 1 5 20] [--folder DIR]

`speed` checks children of all formats against a bf16 parent with one thread, in turn with copying
the parent's file and, where compressed-tensors has the format, with loading both, decompressing by
that library and comparing in torch. Rates are of processor time, ratios are medians over rounds.
`cores` runs the command, which imports first, with one process and with several. `memory` checks
generated checkpoints of growing size, one of whose tensors has an eighth of it, and says how much
memory the process had besides files at most.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tabulate import tabulate
from torch import Tensor

from qgate import encode
from qgate.checkpoints.comparison import compare

Stored = dict[str, Tensor]
WIDTH = 2048


def compressed(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """Declare a format as compressed-tensors does."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def per_row(w: Tensor) -> Stored:
    scale = w.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (w.float() / scale).round().to(torch.int8), "weight_scale": scale}


def fp8_per_row(w: Tensor) -> Stored:
    scale = w.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (w.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_per_tensor(w: Tensor) -> Stored:
    scale = w.float().abs().amax().reshape(1) / 448
    return {"weight": (w.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_tiles(w: Tensor) -> Stored:
    tiles = w.float().reshape(len(w) // 128, 128, -1, 128)
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    values = (tiles / scale).reshape(w.shape).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale[:, 0, :, 0].contiguous()}


def _int4(w: Tensor) -> tuple[Tensor, Tensor]:
    groups = w.float().reshape(len(w), -1, 128)
    scale = groups.abs().amax(2, keepdim=True) / 7
    return (groups / scale).round().reshape(w.shape).to(torch.int32) + 8, scale[:, :, 0]


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight codes along the last axis into a word, each at its position."""
    eight = codes.reshape(*codes.shape[:-1], -1, 8)
    word = torch.zeros(eight.shape[:-1], dtype=torch.int32)
    for number, position in enumerate(order):
        word |= eight[..., number] << 4 * position
    return word


def int4_groups(w: Tensor) -> Stored:
    codes, scale = _int4(w)
    shape = torch.tensor(w.shape)
    return {"weight_packed": _words(codes), "weight_scale": scale, "weight_shape": shape}


def _uint4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = w.float().reshape(len(w), -1, 128)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = (high - low) / 15
    zeros = (-low / scale).round()
    codes = (groups / scale[..., None] + zeros[..., None]).round().clamp(0, 15)
    return codes.reshape(w.shape).to(torch.int32), scale, zeros.to(torch.int32).T.contiguous()


def gptq(w: Tensor) -> Stored:
    codes, scale, zeros = _uint4(w)
    return {
        "qweight": _words(codes).T.contiguous(),
        "qzeros": _words(zeros - 1),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(w.shape[1]) // 128).int(),
    }


def awq(w: Tensor) -> Stored:
    codes, scale, zeros = _uint4(w)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    return {
        "qweight": _words(codes.T.contiguous(), order),
        "qzeros": _words(zeros, order),
        "scales": scale.T.contiguous(),
    }


def _pairs(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def mxfp4(w: Tensor) -> Stored:
    e = encode(w, "mxfp4")
    return {"weight_packed": _pairs(e.codes), "weight_scale": e.scales.reshape(len(w), -1)}


def nvfp4(w: Tensor) -> Stored:
    e = encode(w, "nvfp4")
    assert e.tensor_scale is not None
    return {
        "weight_packed": _pairs(e.codes),
        "weight_scale": e.scales.reshape(len(w), -1).view(torch.float8_e4m3fn),
        "weight_global_scale": 1 / e.tensor_scale.reshape(1).float(),
    }


Export = tuple[Callable[[Tensor], Stored], dict[str, Any], str]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FORMATS: dict[str, Export] = {
    "int8 per row": (per_row, compressed("int", 8, "channel"), "int-quantized"),
    "int4 per 128": (int4_groups, compressed("int", 4, "group", group_size=128), "pack-quantized"),
    "FP8 per row": (fp8_per_row, compressed("float", 8, "channel"), "float-quantized"),
    "FP8 per tensor": (fp8_per_tensor, compressed("float", 8, "tensor"), "float-quantized"),
    "FP8 128 x 128": (fp8_tiles, {"quant_method": "fp8", "weight_block_size": [128, 128]}, ""),
    "MXFP4": (
        mxfp4,
        compressed("float", 4, "group", group_size=32, scale_dtype="uint8"),
        "mxfp4-pack-quantized",
    ),
    "NVFP4": (
        nvfp4,
        compressed("float", 4, "tensor_group", group_size=16, scale_dtype="float8_e4m3fn"),
        "nvfp4-pack-quantized",
    ),
    "GPTQ": (gptq, GPTQ, ""),
    "AWQ": (awq, AWQ, ""),
}


def write(folder: Path, tensors: Stored, recipe: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    save_file({k: x.contiguous() for k, x in tensors.items()}, folder / "model.safetensors")
    configuration = {} if recipe is None else {"quantization_config": recipe}
    (folder / "config.json").write_text(json.dumps(configuration))
    return folder


def parent_tensors(count: int) -> Stored:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{layer}.mlp.up_proj.weight": (
            torch.randn(2 * WIDTH, WIDTH, generator=generator) * 0.02
        ).bfloat16()
        for layer in range(count)
    }


def export(folder: Path, tensors: Stored, name: str) -> Path:
    make, recipe, _ = FORMATS[name]
    child = {
        f"{key.removesuffix('weight')}{ending}": part
        for key, w in tensors.items()
        for ending, part in make(w).items()
    }
    return write(folder, child, recipe)


# Speed -------------------------------------------------------------------------------------------


def by_library(child: Path, parent: Path, name: str) -> float:
    """Load both, decompress by compressed-tensors, and compare in torch; return the worst error."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    _, recipe, form = FORMATS[name]
    arguments = QuantizationArgs(**recipe["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored, tensors = (load_file(folder / "model.safetensors") for folder in (child, parent))
    worst = 0.0
    for key, w in tensors.items():
        stem = key.removesuffix("weight")
        parts = {k.removeprefix(stem): x for k, x in stored.items() if k.startswith(stem)}
        values = compressor.decompress(parts, scheme)["weight"].float()
        source = w.float()
        worst = max(worst, float((values - source).square().sum() / source.square().sum()))
    return worst


def speed(args: argparse.Namespace, home: Path) -> None:
    torch.set_num_threads(1)
    tensors = parent_tensors(max(1, round(args.megabytes * 1e6 / (4 * WIDTH * WIDTH))))
    parent = write(home / "parent", tensors)
    size = (parent / "model.safetensors").stat().st_size / 1e6
    rows = []
    for name in FORMATS:
        child = export(home / "child", tensors, name)
        work: dict[str, Callable[[], object]] = {
            "qgate": lambda child=child: compare(str(child), str(parent)),
            "copy": lambda: shutil.copyfile(parent / "model.safetensors", home / "copied"),
        }
        if FORMATS[name][2]:
            work["library"] = lambda child=child, name=name: by_library(child, parent, name)
        findings = compare(str(child), str(parent)).findings
        assert not findings, (name, findings[:3])
        spent: dict[str, list[float]] = {key: [] for key in work}
        for count in range(args.rounds + 1):
            for key, do in work.items():
                start = time.process_time()
                do()
                if count:
                    spent[key].append(time.process_time() - start)
        ratios = {
            key: statistics.median(a / b for a, b in zip(spent[key], spent["qgate"], strict=True))
            for key in work
        }
        rows.append(
            [
                name,
                size / statistics.median(spent["qgate"]),
                size / min(spent["qgate"]),
                1 / ratios["copy"],
                ratios.get("library"),
            ]
        )
        shutil.rmtree(child)
    print(f"parent of {size:.0f} MB in bf16, one thread, {args.rounds} rounds, processor time")
    heads = ["child", "MB/s", "best MB/s", "times a copy", "times faster than the library"]
    print(tabulate(rows, headers=heads, floatfmt=("", ".0f", ".0f", ".1f", ".1f")))


# Cores -------------------------------------------------------------------------------------------


def cores(args: argparse.Namespace, home: Path) -> None:
    tensors = parent_tensors(max(1, round(args.parameters * 1e6 / (2 * WIDTH * WIDTH))))
    count = sum(w.numel() for w in tensors.values()) / 1e6
    parent, child = write(home / "parent", tensors), export(home / "child", tensors, "FP8 per row")
    rows = []
    for jobs in (1, args.jobs):
        command = [sys.executable, "-c", _WAITING, str(child), str(parent), str(jobs)]
        took = [
            float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(args.rounds)
        ]
        rows.append([jobs, statistics.median(took), min(took)])
    print(f"{count:.0f} million parameters, FP8 per row, after the imports of the first process")
    print(tabulate(rows, headers=["processes", "seconds", "best"], floatfmt=".2f"))


_WAITING = """
import sys, time
import torch
torch.set_num_threads(1)
from qgate.checkpoints.comparison import compare
if __name__ == "__main__":
    start = time.perf_counter()
    compare(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]))
    print(time.perf_counter() - start)
"""


# Memory ------------------------------------------------------------------------------------------


def write_large(folder: Path, total: int, block: Stored) -> None:
    """Write a checkpoint whose tensors repeat one block of rows, an eighth of it in one tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": FORMATS["FP8 per row"][1]} if len(block) > 1 else {})
    )
    counts = [total // 8, *[total // 56] * 49]
    entries: dict[str, Any] = {}
    offset = 0
    codes = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    for number, count in enumerate(counts):
        for ending, x in block.items():
            size = count * x.numel() * x.itemsize
            entries[f"model.layers.{number}.mlp.up_proj.{ending}"] = {
                "dtype": codes[x.dtype],
                "shape": [count * len(x), *x.shape[1:]],
                "data_offsets": [offset, offset + size],
            }
            offset += size
    head = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for count in counts:
            for x in block.values():
                data = x.contiguous().view(torch.uint8).numpy().tobytes()
                for _ in range(count):
                    file.write(data)


def memory(args: argparse.Namespace, home: Path) -> None:
    weight = next(iter(parent_tensors(1).values()))[:1024]
    rows = []
    for gigabytes in args.gigabytes:
        blocks = max(56, round(gigabytes * 1e9 / 3 / weight.numel()))
        write_large(home / "parent", blocks, {"weight": weight})
        write_large(home / "child", blocks, fp8_per_row(weight))
        command = [sys.executable, "-c", _WATCHED, str(home / "child"), str(home / "parent")]
        start = time.perf_counter()
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        took = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        before, most, processor = (float(text) for text in output.split())
        rows.append([gigabytes, gigabytes / 8, before, most, used, took, processor])
        for name in ("parent", "child"):
            shutil.rmtree(home / name)
    heads = ["GB of both", "largest", "MB after imports", "MB at most", "resident", "s", "CPU s"]
    print(tabulate(rows, headers=heads, floatfmt=(".1f", ".1f", ".0f", ".0f", ".0f", ".0f", ".0f")))


_WATCHED = """
import resource, sys, threading, time
import torch
torch.set_num_threads(1)
from qgate.checkpoints.comparison import compare

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024

if __name__ == "__main__":
    before = most = anonymous()
    over = threading.Event()
    def watch():
        global most
        while not over.wait(0.02):
            most = max(most, anonymous())
    watching = threading.Thread(target=watch)
    watching.start()
    record = compare(sys.argv[1], sys.argv[2])
    over.set()
    watching.join()
    assert not record.findings, record.findings[:3]
    print(before, most, time.process_time())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "cores", "memory"))
    parser.add_argument("--megabytes", type=float, default=134, help="of the parent, for speed")
    parser.add_argument("--parameters", type=float, default=270, help="in millions, for cores")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 5, 20])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where there is room (default: temporary)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as home:
        {"speed": speed, "cores": cores, "memory": memory}[args.what](args, Path(home))


if __name__ == "__main__":
    main()
