"""Files of every kind with 22 hostile names in each, and a check of what is printed of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from qgate.baselines import Key, Store
from qgate.baselines.candidates import Candidate, write_candidate
from qgate.dumps import DumpWriter
from tests.baselines.building import ORIGIN, accepting, recording
from tests.checkpoints.gated import write_pair
from tests.dumps.making import record as dump_record
from tests.engines.gated import logits_pair
from tests.hostile import FORGED, TOGETHER
from tests.results.making import record, write

MODEL = f"""
import copy
import torch
from torch import nn
import qgate
from qgate.modes import Kernel

NAMES = {[name.replace(".", "_") for name in TOGETHER]!r}


class Block(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.parts = nn.ModuleDict({{name: nn.Linear(16, 16) for name in names}})

    def forward(self, x):
        for part in self.parts.values():
            x = x + part(x)
        return x


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(NAMES[:11]), Block(NAMES[11:])])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build(samples=2, seed=0):
    torch.manual_seed(seed)
    inputs = [torch.randn(2, 4, 16) for _ in range(samples)]
    modes = {{name: Kernel(lambda model: copy.deepcopy(model.module), stands_for="int8") for name in (NAMES[9], NAMES[15], NAMES[20])}}
    return qgate.Model(Network(), inputs, name=NAMES[9], modes=modes)


if __name__ == "__main__":
    network = Network()
    network(torch.randn(2, 16)).sum().backward()
"""
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# On the console Azure obeys a command anywhere in a line; a file has lines of data.
_ON_CONSOLE = re.compile(rf"^\s*(::|{FORGED})|##\[|##vso\[", re.MULTILINE)
_IN_FILES = re.compile(rf"^\s*(::|{FORGED}|##\[|##vso\[)", re.MULTILINE)
TEXTS = {
    ".txt",
    ".md",
    ".csv",
    ".html",
    ".log",
    ".json",
    ".jsonl",
    ".yaml",
    ".toml",
    ".py",
    ".svg",
}


def assert_calm(text: str, where: str, command: re.Pattern[str] = _ON_CONSOLE) -> None:
    """Fail where a terminal or a service of CI would obey a text, or a name begins a line."""
    for pattern in (_OBEYED, command):
        match = pattern.search(text)
        assert not match, f"{where}: {text[max(0, match.start() - 120) : match.end() + 60]!a}"


def write_dump(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    with DumpWriter(folder, header={"model": TOGETHER[0], TOGETHER[1]: TOGETHER[2]}) as writer:
        for order, name in enumerate(TOGETHER):
            name_fields = {
                "module": name,
                "layer": order if order % 3 else None,
                "layer_type": name,
                "quant_type": name,
                "component": name,
            }
            for part, phase in (("input", "pre"), (name, "post")):
                values = torch.randn(8, 32, generator=draw).bfloat16()
                values[0, 0] = torch.inf if order % 2 else 1.0
                writer.add(
                    dump_record(
                        2 * order + (phase == "post"), name=part, phase=phase, **name_fields
                    ),
                    values,
                )


def write_baselines(root: Path) -> None:
    for model in TOGETHER:
        origin = replace(ORIGIN, model=model)
        store = Store(root, model)
        store.commit(recording(origin))
        keys = {Key(name, name, name, "relative_mse"): 1e-3 for name in TOGETHER}
        store.commit(accepting(keys, model, origin))
        for name in TOGETHER[:3]:
            changed = dict.fromkeys(keys, 2e-3)
            write_candidate(root.parent / "candidates", Candidate(origin, name, name, changed))


def write_results(folder: Path) -> None:
    name_fields = ("mode", "model", "layer", "suite", "scope", "file")
    rows = [
        record(name, 1.0, node=f"{name}::{name}", line=3, **dict.fromkeys(name_fields, name))
        for name in TOGETHER
    ]
    folder.mkdir()
    write(folder / "results.jsonl", *rows, record("good"), commit=TOGETHER[1], device=TOGETHER[1],
          modes=TOGETHER, notes=TOGETHER, errors=TOGETHER, broken={n: n for n in TOGETHER},
          models={n: {"weights": n} for n in TOGETHER}, complete=True)  # fmt: skip


def write_checkpoints(folder: Path) -> None:
    """Write a pair whose weights have hostile names beside good ones."""
    write_pair(folder)
    for side in ("child", "parent"):
        path = folder / side / "model.safetensors"
        tensors = load_file(path)
        generator = torch.Generator().manual_seed(len(side))
        tensors |= {f"{n}.weight": torch.randn(16, 16, generator=generator) for n in TOGETHER}
        if side == "child":
            tensors |= {f"{n}.weight_scale": torch.ones(16, 1) for n in TOGETHER[:11]}
        save_file(tensors, path)


def write_all(folder: Path) -> None:
    """Write a file of every kind that commands read."""
    for name in ("dump", "other"):
        write_dump(folder / name)
    write_baselines(folder / "baselines")
    write_results(folder / "run")
    write_checkpoints(folder / "checkpoints")
    logits_pair(folder / "engines")
    (folder / "hostile_model.py").write_text(MODEL, encoding="utf-8", errors="surrogatepass")
    draw = np.random.default_rng(0)
    names = dict.fromkeys(TOGETHER)
    save_file({n: torch.randn(4, 32).bfloat16() for n in names}, folder / "t.safetensors")
    np.savez(folder / "t.npz", **{n.replace("\0", ""): draw.normal(size=(4, 32)) for n in names})


def assert_calm_files(paths: Iterable[Path]) -> None:
    """Fail where a file of text has a control character, or a name at the beginning of a line."""
    for path in paths:
        if path.suffix in TEXTS and path.is_file():
            text = path.read_bytes().decode().replace("\r\n", "\n")
            assert_calm(text, str(path), _IN_FILES)
