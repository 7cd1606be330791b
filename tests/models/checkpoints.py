"""Checkpoint folders for tests: random weights, what two networks compute, and how folders go bad."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models import language

Folder = Callable[[Path], object]


class FoldersByName(dict[str, Path]):
    """Folders by name, each made when it is asked for."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Path:
        self[name] = self._make(name)
        return self[name]


def randomize(network: nn.Module, seed: int = 0) -> None:
    """Weights of ordinary size everywhere, so that a forgotten norm or bias shows."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if name.endswith("A_log"):
                parameter.copy_(parameter + 0.2 * noise)
            elif parameter.dim() <= 1:
                parameter.copy_(("norm" in name or name.endswith(".D")) + 0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def outputs(network: nn.Module, blocks: list[str], ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits and the output of every block named."""
    streams: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            streams[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [network.get_submodule(name).register_forward_hook(keep(name)) for name in blocks]
    with torch.no_grad():
        result = network(ids)
    for handle in handles:
        handle.remove()
    return getattr(result, "logits", result), [streams[name] for name in blocks]


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


def check_refusal(load: Callable[[Path], object], folder: Path, words: list[str]) -> None:
    """Load a bad folder: one short line names it and has the words, and none of its code ran."""
    with pytest.raises(QgateError) as caught:
        load(folder)
    message = str(caught.value)
    for word in [str(folder), *words]:
        assert word in message, message
    assert not Path("was-run").exists()
    assert len(message) < 700
    assert "\n" not in message


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


@functools.cache
def _trained(vocabulary: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([language.text("calibration", 20000)], trainer)
    return str(trained.to_str())


def byte_level_tokenizer(vocabulary: int) -> Any:
    """A byte-level tokenizer of the tokenizers library, trained once per size of vocabulary."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(_trained(vocabulary))


class Hostile:
    """Runs a command if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was-run",)


def as_bin(content: Any) -> Folder:
    def act(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return act


def in_turn(first: Folder, second: Folder) -> Folder:
    return lambda folder: (first(folder), second(folder))
