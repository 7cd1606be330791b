"""Make the small inputs that the commands of docs/seeds.md are run on."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.activation_stats.test_settings import KNOWN_FILE

_WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "while",
    "seven",
    "zebras",
    "watch",
    "from",
    "afar",
]
_KINDS = {
    "forward": (
        ("attention", "pre_FA", "query"),
        *(("attention", "post_FA", name) for name in ("output", "attention_weights")),
        *(("linear", "pre_linear", name) for name in ("input", "weight")),
    ),
    "backward": (("linear", "pre_linear", "input"), ("linear", "post_linear", "output")),
}
TRAIN = """\
import os

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))


torch.manual_seed(0)
model = nn.Sequential(Attention(), nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(3):
    os.environ["CURRENT_SAMPLE_IDX"] = str(100 + step)
    optimizer.zero_grad()
    model(torch.randn(2, 4, 16)).square().mean().backward()
    optimizer.step()
"""
QUANTIZE = """\
import torch

import qgate

model = torch.nn.Sequential(torch.nn.Linear(16, 16))
x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * 2**-10
model(qgate.quantize(x, "fp8_e4m3")).sum().backward()
"""


def write_inputs(folder: Path) -> None:
    """Write tensors, a folder of the tensor saver, programs, texts, a model and a configuration."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=generator)
    x[:, 7] *= 30
    for number in (1, 2, 3):
        torch.save((x * number).bfloat16(), folder / f"tensor{number}.pt")
    torch.save({"tensor": x.bfloat16()}, folder / "dictionary.pt")
    torch.save([x.bfloat16(), x.bfloat16() * 2], folder / "list.pt")
    (folder / "train.py").write_text(TRAIN)
    (folder / "quantize.py").write_text(QUANTIZE)
    settings = "samples = 2\nseqlen = 64\ncalib_samples = 2\ncalib_seqlen = 64\n"
    (folder / "qgate.toml").write_text(settings)
    _write_tensor_logs(folder / "tensor_logs")
    _write_plain_logs(folder)
    _write_texts(folder)
    config = KNOWN_FILE.replace("/path/to/your/model", "tiny-llama").replace(
        '"pile"', '"custom:data.txt"'
    )
    config = config.replace("num_samples: 64", "num_samples: 2").replace("1024", "48")
    (folder / "my_model.yaml").write_text(config)
    everything = config.partition("  # 层选择")[0].replace("false", "true")
    kept_lines = [line for line in everything.splitlines() if "_proj" not in line or "down" in line]
    everything = "\n".join([*kept_lines, "smoothing: {enabled: false}", "formats: [int8]", ""])
    (folder / "everything.yaml").write_text(everything)


def _write_tensor_logs(folder: Path) -> None:
    """Write plain tensors under the saver's names: three quant types, ranks, samples and layers."""
    folder.mkdir()
    counter = itertools.count(1)
    places = itertools.product(("hifp8", "mxfp8", "bf16"), (0, 1, 2), (0, 1), (0, 1), _KINDS)
    for quant_type, rank, sample, layer, operation in places:
        for layer_type, phase, name in _KINDS[operation]:
            seed = hash((layer, len(name), name == "weight" or (rank, sample)))
            x = _values(name, operation, sample, torch.Generator().manual_seed(seed % 2**31))
            if name == "input" and operation == "forward" and layer == 1:
                x.view(-1)[:20] = 7e4  # beyond fp16
            file = (
                f"20250908_092156_{next(counter):04d}_iter000_{layer_type}_L{layer}_{operation}_"
                f"{phase}_{quant_type}_rank{rank:02d}_sample{sample:03d}_{name}.pt"
            )
            torch.save(x.bfloat16(), folder / file)


def _write_plain_logs(folder: Path) -> None:
    """Write plain tensors under the first names of the saver; in one folder a file is empty."""
    names = (
        ("attention_L0_forward", ("query", "key", "value", "output")),
        ("linear_L1_forward", ("input", "weight", "output")),
        ("linear_L1_backward", ("input", "weight", "output")),
    )
    counter = itertools.count(1)
    for logs in ("plain_logs", "broken_logs"):
        (folder / logs).mkdir()
    for site, tensors in names:
        for name in tensors:
            file = f"20250908_092156_{next(counter):04d}_{site}_hifp8_{name}.pt"
            torch.save(torch.randn(4, 8).bfloat16(), folder / "plain_logs" / file)
            if name == "key":
                torch.save(torch.ones(4, 8), folder / "broken_logs" / file)
            if name == "query":
                (folder / "broken_logs" / file).touch()


def _values(name: str, operation: str, sample: int, generator: torch.Generator) -> Tensor:
    if name == "attention_weights":
        return torch.softmax(torch.randn(2, 2, 16, 16, generator=generator) * 2, -1)
    x = torch.randn(2 + sample, 16, 32, generator=generator)
    x[..., 5] *= 60
    return x * 1e-5 if operation == "backward" else x


def _write_texts(folder: Path) -> None:
    generator = np.random.default_rng(0)
    lines = [" ".join(generator.choice(_WORDS, 400)) for _ in range(24)]
    (folder / "data.txt").write_text("\n".join(lines) + "\n")
    (folder / "data.json").write_text(json.dumps([{"text": line} for line in lines]))
    with (folder / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["content"], *([line] for line in lines)])
