"""Benches of few and short samples, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.models import Sampling
from qgate.modes import Mode
from qgate.modes.setups import ModelSetup
from tests.plugin.shared_bench import SharedBench

SHORT = Sampling(samples=2, seqlen=64, calib_samples=2, calib_seqlen=64)
LLAMA, MAMBA = "tiny-llama", "tiny-mamba"


def bench(model: str = LLAMA, sampling: Sampling = SHORT, **more: Any) -> Bench:
    return Bench(ModelSetup(model, sampling=sampling), **more)


def session(folder: Path, model: str = LLAMA, *, shared: bool = False, **more: Any) -> ModelGates:
    """Return the gates of a model; `shared` takes what this process measured of it before.

    Only for a session that changes neither the model nor how it is measured.
    """
    sampling = more.pop("sampling", SHORT)
    policy = more.pop("policy", Policy())
    kind = SharedBench if shared else Bench
    return ModelGates(kind(ModelSetup(model, sampling=sampling)), folder, policy, **more)


def mode_of(of: Bench, name: str) -> Mode:
    return of.setup.select(name, of.model)[0]


class Stack(nn.Module):
    """Blocks of one kind, one after the other."""

    def __init__(self, block: type[nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
