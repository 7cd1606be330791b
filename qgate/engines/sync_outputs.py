"""Outputs of layers and log-probabilities of the same tokens, in an engine and its trainer."""

from __future__ import annotations

import numpy as np
import torch

from qgate.engines.compute import figures_of, values_of
from qgate.engines.findings import EngineLimits, hold_limits
from qgate.engines.probes import Probe, ProbeSource, WeightSource
from qgate.engines.record import EnginesRecord
from qgate.engines.scored import ScoredSample, scored
from qgate.engines.sync_record import ModuleDistance, SyncRecord
from qgate.errors import QgateError
from qgate.text.numbers import brief

_JUMP = 10.0
"""Growth of the relative MSE from a layer to the next that is no carried difference."""
_LEAST_MSE = 1e-9
"""Relative MSE that another order of sums in float32 makes."""
_HALF_NOISE = 1e-3
"""Relative MSE that roundings to 16 bits leave in a single layer at most."""


def add_outputs(
    source: WeightSource, probe: Probe, record: SyncRecord, limits: EngineLimits
) -> None:
    """Add where outputs begin to differ, and how far apart the log-probabilities are."""
    trainer = source.probe.outputs if isinstance(source, ProbeSource) else {}
    if not (trainer and probe.outputs):
        return
    if not torch.equal(trainer["tokens"], probe.outputs["tokens"]):
        raise QgateError(
            f"{record.trainer!r} and {record.engine!r} have outputs of other tokens "
            f"({len(trainer['tokens']):,} and {len(probe.outputs['tokens']):,}): let both compute "
            "the same request inside of qgate.probe.outputs."
        )
    for key, reference in trainer.items():
        actual = probe.outputs.get(key)
        if key.startswith("output/") and actual is not None and actual.shape == reference.shape:
            energy = float(reference.double().square().sum()) or 1.0
            error = float((actual.double() - reference.double()).square().sum()) / energy
            record.modules.append(ModuleDistance(key.removeprefix("output/"), error))
    record.begins = _beginning(record.modules)
    record.tokens = len(trainer["tokens"])
    if "logprobs" in trainer and "logprobs" in probe.outputs:
        _add_tokens(trainer, probe.outputs, record, limits)


def _beginning(modules: list[ModuleDistance]) -> str:
    """Name the module at which the difference jumps, if one does."""
    before = _LEAST_MSE
    worst = ("", 0.0, 0.0, 0.0)
    for number, module in enumerate(modules):
        value = module.relative_mse
        growth = value / max(before, _LEAST_MSE) if number else value / _HALF_NOISE * _JUMP
        if not value <= 0 and not growth <= max(worst[3], _JUMP):
            worst = module.name, before if number else 0.0, value, growth
        before = value
    if not worst[0]:
        return ""
    return f"{worst[0]} (relative MSE {brief(worst[1])} before it, {brief(worst[2])} after)"


def _add_tokens(
    trainer: dict[str, torch.Tensor], engine: dict[str, torch.Tensor], record: SyncRecord,
    limits: EngineLimits,
) -> None:  # fmt: skip
    actual, reference = _samples(trainer), _samples(engine)
    pairs = list(zip(actual, reference, strict=True))
    figures = figures_of(pairs, values_of(pairs))
    record.k3 = figures.k3.mean
    compared = EnginesRecord(record.trainer, record.engine, figures)
    for figure in hold_limits(compared, limits):
        if figure.reason and "weights" not in figure.figure:
            record.beyond.append(figure.reason)


def _samples(outputs: dict[str, torch.Tensor]) -> list[ScoredSample]:
    """Split the tokens of calls into sequences."""
    starts = outputs["starts"].nonzero()[:, 0].tolist()
    ends = [*starts[1:], len(outputs["tokens"])]
    ids = outputs["tokens"].numpy().astype(np.int64)
    logs = outputs["logprobs"].double().numpy()
    return [
        scored(str(number), ids[start:end], logs[start:end])
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
