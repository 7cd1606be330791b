"""Make the fixed inputs of the golden cases: a zoo of tensors and two dumps.

All values come from raw bits of Philox and exact arithmetic (sums of integers, powers of two), so
they are the same on every machine, Python and numpy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from qgate.dumps import DumpWriter, Record

Bits = np.ndarray[Any, np.dtype[np.uint64]]
Values = np.ndarray[Any, np.dtype[np.float64]]


def random_bits(seed: int, count: int) -> Bits:
    """Return 64-bit words of a stream; equal seeds give equal words everywhere."""
    return np.asarray(np.random.Philox(key=seed).random_raw(count), dtype=np.uint64)


def bell(seed: int, *shape: int) -> Values:
    """Return values around zero, about normal with deviation 1: sums of twelve 16-bit numbers."""
    count = int(np.prod(shape))
    halves = random_bits(seed, 3 * count).view(np.uint16).reshape(count, 12).astype(np.int64)
    return ((halves.sum(1) - 6 * 65535) / 65536).reshape(shape)


def heavy(seed: int, *shape: int) -> Values:
    """Return values with a heavy tail: a bell times 2 to the number of leading coin tosses."""
    tosses = random_bits(seed + 1, int(np.prod(shape)))
    lowest = (tosses & (~tosses + np.uint64(1))).astype(np.float64)  # 2 to the trailing zeros
    return bell(seed, *shape) * np.minimum(lowest, 2.0**14).reshape(shape)


def outlier_channel(seed: int, rows: int, width: int, factor: float) -> Values:
    values = bell(seed, rows, width)
    values[:, 7] *= factor
    return values


# Tensors ---------------------------------------------------------------------------------------


def write_zoo(folder: Path) -> None:
    """Write the tensors of the zoo, in every kind of file that `qgate sweep` reads."""
    folder.mkdir()
    usual = bell(1, 64, 96)
    spiked = bell(3, 64, 96)
    spiked[5, 5] = 1000.0
    wide = np.ldexp(bell(4, 64, 96), (np.arange(64 * 96).reshape(64, 96) % 260) - 140)
    holes = bell(5, 32, 64)
    holes[0, :4] = np.nan, np.inf, -np.inf, 0.0
    bf16 = {
        "usual": usual,
        "outlier_channel": outlier_channel(2, 64, 96, 100.0),
        "heavy": heavy(6, 64, 96),
        "spiked": spiked,
        "wide": wide,
        "holes": holes,
        "constant": np.full((16, 32), 0.75),
        "zeros": np.zeros((16, 32)),
        "small": usual * 2.0**-100,
        "large": usual * 2.0**120,
    }
    tensors = {name: torch.from_numpy(x).bfloat16() for name, x in bf16.items()}
    save_file(tensors, folder / "zoo.safetensors")
    torch.save(torch.from_numpy(usual).half(), folder / "usual_fp16.pt")
    np.save(folder / "heavy_fp32.npy", heavy(7, 64, 96).astype(np.float32))
    subnormal = (bell(8, 32, 64) * 2.0**-130).astype(np.float32)
    integers = np.round(bell(9, 32, 64) * 40).astype(np.float32)
    np.savez(folder / "more_fp32.npz", subnormal=subnormal, integers=integers)


# Dumps -----------------------------------------------------------------------------------------

LAYERS, RANKS, SAMPLES = 3, 2, 2
ROWS, WIDTH = 32, 64
# Type of layer, direction, name, component and the size of its values.
TENSORS = (
    ("attention", "forward", "query", "FA", 2.0),
    ("attention", "forward", "key", "FA", 2.0),
    ("attention", "forward", "context", "FA", 0.25),
    ("linear", "forward", "input", "linear", 1.0),
    ("linear", "forward", "weight", "linear", 2.0**-4),
    ("linear", "forward", "output", "linear", 4.0),
    ("linear", "backward", "grad_output", "linear", 2.0**-12),
    ("linear", "backward", "grad_input", "linear", 2.0**-14),
)
AFTER = ("context", "output", "grad_input")


def records_of(rank: int, quant_type: str) -> Iterator[tuple[Record, Values]]:
    """What one rank of a small transformer sees in one iteration, sample by sample."""
    order = 0
    for sample in range(SAMPLES):
        for operation in ("forward", "backward"):
            layers = range(LAYERS) if operation == "forward" else reversed(range(LAYERS))
            for layer in layers:
                for layer_type, direction, name, component, size in TENSORS:
                    if direction != operation:
                        continue
                    part = "self_attn" if layer_type == "attention" else "mlp.fc1"
                    record = Record(
                        order=order,
                        layer_type=layer_type,
                        operation=operation,  # type: ignore[arg-type]
                        phase="post" if name in AFTER else "pre",
                        component=component,
                        name=name,
                        module=f"model.layers.{layer}.{part}",
                        layer=layer,
                        quant_type=quant_type,
                        rank=rank,
                        world_size=RANKS,
                        iteration=0,
                        sample=sample,
                    )
                    seed = 100 + order + (0 if name == "weight" else 1000 * rank)
                    if name == "weight":
                        seed = 50 + layer
                    yield record, bell(seed, ROWS, WIDTH) * size * 2.0**layer
                    order += 1


def planted(record: Record, values: Values) -> Values:
    """One Inf, casts of 600 and -700, a layer of one rank that is wrong, an outlier channel."""
    values = values.copy()
    where = (record.rank, record.layer, record.sample, record.name)
    if where == (0, 0, 1, "grad_output"):
        values[3, 4] = np.inf
    if where == (0, 1, 0, "input"):
        values[1, 2], values[2, 3] = 600.0, -700.0
    if where[:2] == (1, 2) and record.name == "output":
        values *= 1.5
    if record.name == "output":
        values[:, 5] *= 20.0
    return values


def noisy(record: Record, values: Values) -> Values:
    """The same with noise of one part in 256, as another number format would leave it."""
    return values * (1 + bell(5000 + 100 * record.rank + record.order, ROWS, WIDTH) / 256)


def write_dump(folder: Path, *, faults: bool, quant_type: str, ranks: tuple[int, ...]) -> None:
    """Write the dump of some ranks; without faults it is the run to compare with."""
    for rank in ranks:
        header = {"model": "Toy", "quant_type": quant_type, "run": "golden"}
        with DumpWriter(folder, header=header, rank=rank, world_size=RANKS) as writer:
            for record, values in records_of(rank, quant_type):
                altered = planted(record, values) if faults else noisy(record, values)
                nonfinite = {"nan": 0, "posinf": int(np.isinf(altered).sum()), "neginf": 0}
                writer.add(replace(record, nonfinite=nonfinite), as_stored(record, altered))


def as_stored(record: Record, values: Values) -> Tensor:
    """bf16, as it is trained with; weights in fp32."""
    tensor = torch.from_numpy(values)
    return tensor.float() if record.name == "weight" else tensor.bfloat16()


def write_dumps(folder: Path) -> None:
    """Write `faulty` and `clean` of two ranks, and each rank of `clean` by itself to be merged."""
    folder.mkdir()
    all_ranks = tuple(range(RANKS))
    write_dump(folder / "faulty", faults=True, quant_type="mxfp8", ranks=all_ranks)
    write_dump(folder / "clean", faults=False, quant_type="hifp8", ranks=all_ranks)
    for rank in all_ranks:
        name = f"clean-rank{rank}"
        write_dump(folder / name, faults=False, quant_type="hifp8", ranks=(rank,))


# A program ------------------------------------------------------------------------------------

PROGRAM = '''"""Train a model of two linear layers for one step, with values that are exact in fp32."""

import torch
from torch import nn


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        for part in (self.up, self.down):
            size = part.weight.numel()
            part.weight.data = (torch.arange(size).reshape(part.weight.shape) * 37 % 101 - 50) / 512
            part.bias.data = torch.arange(part.bias.numel()) % 7 / 8

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


model = Toy()
model((torch.arange(16 * 32).reshape(16, 32) * 29 % 97 - 48) / 16).sum().backward()
print("trained")
'''


def write_program(path: Path) -> None:
    """Write a program for `qgate collect`."""
    path.write_text(PROGRAM, encoding="utf-8")


# Results ---------------------------------------------------------------------------------------


def write_worse_results(before: Path, after: Path) -> None:
    """Write records of a run in which every fifth comparison got worse by half, and some fail."""
    after.mkdir()
    lines = (before / "results.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for record in records[1::5]:
        for check in record.get("checks", ()):
            if check["metric"] == "relative_mse" and check["value"] is not None:
                check["value"] *= 1.5
                check["passed"] = check["bound"] is not None and check["value"] <= check["bound"]
                record["values"]["relative_mse"] = check["value"]
                record["passed"] = record["passed"] and check["passed"]
    jsonl_text = "".join(f"{json.dumps(record)}\n" for record in records)
    (after / "results.jsonl").write_text(jsonl_text, encoding="utf-8")


def write_checkpoints(folder: Path) -> None:
    """Write a parent, a right INT8 export of it, and one with scales that are off by two."""
    shapes = {
        f"model.layers.{n}.mlp.{p}_proj.weight": (32, 64) for n in (0, 1) for p in ("up", "down")
    }
    parent = {name: torch.from_numpy(bell(seed, *shape)).float() / 16
              for seed, (name, shape) in enumerate(shapes.items(), 900)}  # fmt: skip
    child: dict[str, Tensor] = {}
    for name, weight in parent.items():
        scale = weight.abs().amax(1, keepdim=True) / 127
        child |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
    norm = {"model.norm.weight": torch.ones(64)}
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    recipe = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    wrong = dict(child)
    wrong["model.layers.1.mlp.up_proj.weight_scale"] = (
        child["model.layers.1.mlp.up_proj.weight_scale"] * 2
    )
    for name, tensors in (("parent", parent), ("child", child), ("wrong", wrong)):
        (folder / name).mkdir(parents=True)
        save_file(tensors | norm, folder / name / "model.safetensors")
        declared = {} if name == "parent" else {"quantization_config": recipe}
        (folder / name / "config.json").write_text(json.dumps(declared), encoding="utf-8")


def write_engines(folder: Path) -> None:
    """Write the tokens and logits of an engine, and of one that is wrong at one position."""
    folder.mkdir(parents=True)
    logits = torch.from_numpy(bell(950, 3 * 12, 20)).float().reshape(3, 12, 20)
    tokens = (torch.arange(36).reshape(3, 12) * 7) % 20
    other = logits.bfloat16().float()
    other[1, 4] *= 1.5
    for name, values in (("trainer", other), ("rollout", logits)):
        np.savez(folder / f"{name}.npz", tokens=tokens.numpy(), logits=values.numpy())
