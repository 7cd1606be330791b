"""Benches of few and short samples, for tests."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.models import Model, Sampling
from qgate.modes import Mode
from qgate.modes.setups import ModelSetup
from tests.plugin.shared_bench import SharedBench

SHORT = Sampling(samples=2, seqlen=64, calib_samples=2, calib_seqlen=64)
Array = np.ndarray[Any, Any]
LLAMA, MAMBA = "tiny-llama", "tiny-mamba"


def bench(model: str = LLAMA, sampling: Sampling = SHORT, *, layers: int = 0, **more: Any) -> Bench:
    """Return the bench of a model, or of its first `layers`, which takes less time."""
    setup = ModelSetup(model, sampling=sampling)
    return Bench(
        setup, **({"_model": first_layers(setup.load(), layers)} if layers else {}), **more
    )


def first_layers(model: Model, count: int) -> Model:
    blocks = model.layers[0].rpartition(".")[0]
    del model.module.get_submodule(blocks)[count:]  # type: ignore[operator]
    model.module.config = replace(model.module.config, n_layer=count)  # type: ignore[type-var]
    return replace(model, layers=model.layers[:count])


def session(
    folder: Path, model: str = LLAMA, *, shared: bool = False, layers: int = 0, **more: Any
) -> ModelGates:
    """Return the gates of a model; `shared` takes what this process measured of it before.

    Only for a session that changes neither the model nor how it is measured.
    """
    sampling = more.pop("sampling", SHORT)
    policy = more.pop("policy", Policy())
    if shared and layers:
        of = _shared(model, sampling, layers)
    elif shared:
        of = SharedBench(ModelSetup(model, sampling=sampling))
    else:
        of = bench(model, sampling, layers=layers)
    return ModelGates(of, folder, policy, **more)


@functools.cache
def _shared(model: str, sampling: Sampling, layers: int) -> Bench:
    return bench(model, sampling, layers=layers)


def mode_of(of: Bench, name: str) -> Mode:
    return of.setup.select(name, of.model)[0]


def calls_of(model: Model, name: str, samples: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Run samples, and return the arguments and the result of each call of a module."""
    calls: list[tuple[Any, Any]] = []
    module = model.module.get_submodule(name)
    hook = module.register_forward_hook(lambda _m, args, y: calls.append((args, y)))
    with torch.no_grad():
        for sample in samples:
            model(sample)
    hook.remove()
    return calls


def task_oracle(of: Bench, reference: str, mode: str) -> dict[str, Array]:
    """Work out figures of the task for each sample, from the logits of two modes."""
    models = [
        of.model if name == "fp32" else of.quantized(mode_of(of, name)).model
        for name in (reference, mode)
    ]
    figures: dict[str, list[float]] = {"bits": [], "reference": [], "hits": [], "kl": []}
    for sample in of.model.inputs:
        with torch.no_grad():
            true, predicted = (m(sample)[0, :-1].double().softmax(-1).numpy() for m in models)
        ids = sample[0, 1:].numpy()
        for name, p in (("bits", predicted), ("reference", true)):
            figures[name].append(-np.log2(p[np.arange(len(ids)), ids]).mean())
        figures["hits"].append((predicted.argmax(-1) == ids).mean())
        figures["kl"].append((true * np.log(true / predicted)).sum(-1).mean())
    return {name: np.array(of_samples) for name, of_samples in figures.items()}


def mx_blocks(x: Array, element: Any = ml_dtypes.float8_e4m3fn) -> Array:
    """Quantize blocks of 32 along rows, from the definition of MXFP8 and MXFP4."""
    largest = float(ml_dtypes.finfo(element).max)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    _, exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True))
    scale = np.exp2(exponent - 1.0 - np.floor(np.log2(largest)))
    clipped = np.clip(blocks / scale, -largest, largest)
    return (clipped.astype(element).astype(np.float64) * scale).reshape(x.shape)


class Block(nn.Module):
    """Two products and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks of one kind, one after the other."""

    def __init__(self, block: type[nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
