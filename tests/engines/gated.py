"""A trainer and a rollout engine in small, with accepted figures, and faults planted in one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qgate
from qgate.engines.gate import EngineGates, EngineSubject
from qgate.gate import Policy
from qgate.gate.sessions import Outcome
from qgate.models.tiny import TINY
from tests.engines import runs

SUITE = "engines"
NAME = "engines-mine"
NOISE = 1e-2
Change = Callable[[Tensor], Tensor]


def logits_pair(folder: Path, change: Change | None = None, seed: int = 1) -> tuple[str, str]:
    """Write the logits of a trainer, which a change may spoil, and of a rollout engine."""
    rollout = runs.scored(samples=8)
    trainer = runs.moved(rollout, NOISE, seed)
    if change is not None:
        trainer = runs.Scored(trainer.ids, change(trainer.logits.clone()))
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_npz(folder / "rollout.npz", rollout)
    runs.write_npz(folder / "trainer.npz", trainer)
    return str(folder / "trainer.npz"), str(folder / "rollout.npz")


def more_noise(factor: float) -> Change:
    """Return a change that multiplies the difference from the rollout engine."""
    return lambda logits: (plain := runs.scored(samples=8).logits) + factor * (logits - plain)


def one_token(logits: Tensor) -> Tensor:
    logits[2, 30] *= 1.3
    return logits


def one_sample(logits: Tensor) -> Tensor:
    logits[5] += 0.1 * torch.randn(logits[5].shape, generator=torch.Generator().manual_seed(4))
    return logits


def with_temperature(logits: Tensor) -> Tensor:
    return logits / 0.7


def in_another_order(logits: Tensor) -> Tensor:
    return logits[..., torch.randperm(logits.shape[-1], generator=torch.Generator().manual_seed(2))]


def one_late(logits: Tensor) -> Tensor:
    return logits.roll(1, 1)


def not_a_number(logits: Tensor) -> Tensor:
    logits[1, 3] = torch.nan
    return logits


FAULTS: dict[str, tuple[Change, str]] = {
    "one token": (one_token, r"token 31 of sample 2 carries \d+\.?\d* % of the difference"),
    "one sample": (one_sample, r"sample 5 carries 9\d"),
    "temperature": (with_temperature, r"the logits are 1\.4\d* times the other engine's: .*temper"),
    "vocabulary": (in_another_order, "are the other engine's in another order of the vocabulary"),
    "one late": (one_late, "the logits are those of one position (before|after) it"),
    "not a number": (not_a_number, r"1 NaN or infinite in actual"),
    "20 % more KL": (more_noise(1.2**0.5), r"kl .* > .* at all tokens \(engines tokens\): "),
}


def subject_of(
    engines: tuple[str, str], weights: tuple[str, str] | None = None, **how: Any
) -> EngineSubject:
    return EngineSubject(*engines, NAME, weights, **how)


def gates_of(
    engines: tuple[str, str],
    baselines: Path,
    limits: Any = None,
    weights: tuple[str, str] | None = None,
    **how: Any,
) -> EngineGates:
    return EngineGates(
        subject_of(engines, weights), baselines, Policy.from_table(limits or {}), **how
    )


def outcomes(gates: EngineGates) -> list[Outcome]:
    """Run all gates of two engines."""
    gates.check_accepted()
    gates.check_baseline()
    return [gates.part(SUITE, part) for part in gates.subject.parts]


def failures(gates: EngineGates) -> list[str]:
    return [outcome.text for outcome in outcomes(gates) if outcome.text]


def accept(
    engines: tuple[str, str], baselines: Path, weights: tuple[str, str] | None = None
) -> list[str]:
    """Accept what two engines have, and return what no update accepts."""
    gates = gates_of(engines, baselines, weights=weights, updating="failed", accept_plan=True)
    texts = failures(gates)
    gates.commit()
    return texts


# Dumps --------------------------------------------------------------------------------------------


def network() -> nn.Module:
    return copy.deepcopy(TINY.get("tiny-llama").load())


def collect(folder: Path, module: nn.Module, samples: int = 4) -> str:
    """Write the dump of a network on a few tokens."""
    ids = torch.randint(256, (samples, 48), generator=torch.Generator().manual_seed(0))
    sites = "embedding|attention|linear|norm"
    with torch.no_grad(), qgate.collect(module, folder, sites=sites, phases=("forward",)):
        module(ids)
    return str(folder)


def older_weights(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("model.layers.2.mlp.up_proj.weight").mul_(1.01)


def other_module(module: nn.Module) -> None:
    """Round what one projection returns."""
    projection = module.get_submodule("model.layers.1.self_attn.o_proj")
    plain = projection.forward
    projection.forward = lambda x: plain(x).bfloat16().float()  # type: ignore[method-assign]
