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
_WIDE_NOISE, _HALF_NOISE = 1e-9, 1e-5
"""Relative MSE that sums in another order make in a layer in float32, and roundings to 16 bits."""


def add_outputs(
    source: WeightSource, probe: Probe, record: SyncRecord, limits: EngineLimits
) -> None:
    """Add where outputs begin to differ, and how far apart the log-probabilities are."""
    if not (isinstance(source, ProbeSource) and source.probe.outputs and probe.outputs):
        return
    trainer = source.probe.outputs
    if not torch.equal(trainer["tokens"], probe.outputs["tokens"]):
        raise QgateError(
            f"{record.trainer!r} and {record.engine!r} have outputs of other tokens "
            f"({len(trainer['tokens']):,} and {len(probe.outputs['tokens']):,}): let both compute "
            "the same request inside of qgate.probe.outputs."
        )
    for name in source.probe.modules:
        reference, actual = trainer.get(f"output/{name}"), probe.outputs.get(f"output/{name}")
        if reference is not None and actual is not None and actual.shape == reference.shape:
            energy = float(reference.double().square().sum()) or 1.0
            error = float((actual.double() - reference.double()).square().sum()) / energy
            record.modules.append(ModuleDistance(name, error))
    is_wide = all(shard.values.dtype == torch.float32 for shard in probe.shards)
    record.begins = _beginning(record.modules, _WIDE_NOISE if is_wide else _HALF_NOISE)
    record.tokens = len(trainer["tokens"])
    if "logprobs" in trainer and "logprobs" in probe.outputs:
        _add_tokens(trainer, probe.outputs, record, limits)


def _beginning(modules: list[ModuleDistance], noise: float) -> str:
    """Name the first module at which the difference jumps, if one does."""
    before = 0.0
    for module in modules:
        value = module.relative_mse
        if not value <= _JUMP * max(before, noise):
            sizes = f"relative MSE {brief(before)} before it, {brief(value)} after"
            return f"{module.name} ({sizes})"
        before = value
    return ""


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
