"""Checkpoint folders for tests: random weights, what two networks compute, and how folders go bad."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Folder = Callable[[Path], object]


def randomize(network: nn.Module, seed: int = 0) -> None:
    """Weights of ordinary size everywhere, so that a forgotten norm or bias shows."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if name.endswith("A_log"):
                parameter.copy_(parameter + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(("norm" in name or name.endswith(".D")) + 0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def outputs(network: nn.Module, blocks: list[str], ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits and the output of every block named."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [network.get_submodule(name).register_forward_hook(keep(name)) for name in blocks]
    with torch.no_grad():
        result = network(ids)
    for handle in handles:
        handle.remove()
    return getattr(result, "logits", result), [seen[name] for name in blocks]


def assert_same(ours: nn.Module, theirs: nn.Module, blocks: list[str], vocabulary: int) -> None:
    """Logits to 1e-4, every block output to a relative 1e-5, on rows of 1, 2, 7 and 64 tokens."""
    for tokens in (1, 2, 7, 64):
        draw = torch.Generator().manual_seed(tokens)
        ids = torch.randint(vocabulary, (2, tokens), generator=draw)
        logits, streams = outputs(ours, blocks, ids)
        expected, references = outputs(theirs, blocks, ids)
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= 1e-4
        for stream, reference in zip(streams, references, strict=True):
            assert stream.shape == reference.shape
            assert (stream - reference).norm() <= 1e-5 * reference.norm()


def changed(source: Path, target: Path, change: Folder) -> Path:
    """A copy of a checkpoint folder with something done to it."""
    shutil.copytree(source, target)
    change(target)
    return target


def config(**fields: Any) -> Folder:
    """A change that sets fields of config.json; None takes a field out."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        merged = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))

    return change


def text(name: str, content: str) -> Folder:
    return lambda folder: (folder / name).write_text(content)


def cut(name: str, keep: float = 0.5) -> Folder:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * keep))


def unlink(name: str) -> Folder:
    return lambda folder: (folder / name).unlink()


class Hostile:
    """Runs a command if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was-run",)


def as_bin(content: Any) -> Folder:
    def act(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return act


def both(first: Folder, second: Folder) -> Folder:
    return lambda folder: (first(folder), second(folder))
