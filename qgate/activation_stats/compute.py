"""Statistics of a model's activations and weights: one forward pass per sample for all of them.

result = qgate.activations(model, [ids, ids], outlier__threshold=64)
result.record, result.tables(), result.failed
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qgate._version import __version__
from qgate.activation_stats.candidates import CandidateRequest, sensitivity_of
from qgate.activation_stats.layer_stats import LayerStats
from qgate.activation_stats.network_hosts import Host, Where, evaluating, placed
from qgate.activation_stats.plan import ActivationPlan, kind_in, layer_number, plan_of, weight_table
from qgate.activation_stats.record import (
    ACTIVATIONS,
    ActivationsRecord,
    LayerActivations,
    Proposal,
    Sensitive,
)
from qgate.activation_stats.sensitivity import NO_LOSS, Progress, SensitivityTarget, predicts_next
from qgate.activation_stats.setting_keys import made, value_of
from qgate.activation_stats.setting_values import listed as known_key
from qgate.activation_stats.settings import ActivationSettings, _check_together, changed, keys
from qgate.activation_stats.shards import Statistics, gathered
from qgate.activation_stats.smoothing import smoothing_advice
from qgate.activation_stats.subjects import MeasuredNetwork, Passes, passes_of, subject_of
from qgate.activation_stats.tables import Row, tables_of
from qgate.capture.flowing import INPUT, WEIGHT, Flowed, listed
from qgate.devices import resolve
from qgate.engine import Workers
from qgate.engine.workers import workers_of
from qgate.errors import QgateError
from qgate.models import Model
from qgate.summaries.record import Portrait

__all__ = ["ActivationsResult", "activations"]


@dataclass(frozen=True)
class ActivationsResult:
    """What `activations` found: `record` is plain data, `failed` tells of values that are not
    finite and of modules that were matched and never ran."""

    record: ActivationsRecord
    failed: bool

    @property
    def notes(self) -> list[str]:
        return self.record["notes"]

    def tables(self) -> dict[str, list[Row]]:
        """Rows by table: layers, magnitude, outliers, tokens, channels, ranges, formats, smoothing,
        sensitivity, proposals."""
        return tables_of(self.record)


def activations(
    model: nn.Module | Model | MeasuredNetwork | str,
    data: Any = None,
    *,
    settings: ActivationSettings | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
    workers: Workers | int = 1,
    **overrides: Any,
) -> ActivationsResult:
    """Statistics of what flows through a model, in one forward pass per sample.

    model      any torch module, a qgate.Model, or a name (tiny-llama, hf:PATH, mamba:PATH)
    data       token ids (rows, or batches with their attention mask), whatever else the model is
               called with, or a source of text such as "custom:FILE"; without it, the built-in text
    settings   of `read_settings`; `overrides` are keys over them, with __ in place of dots
    tokenizer  for text and for the texts of tokens, where the model is a module
    progress   called with what is done, how much of it, and of how much
    workers    processes, or another engine: each has the model, and takes shards of the samples
    """
    settings = _with(settings or ActivationSettings(), overrides)
    if isinstance(data, str):
        settings, data = _with(settings, {"data.source": data}), None
    workers = workers_of(workers)
    if workers.is_local:
        resolve(settings.memory.device)
        resolve(settings.memory.offload_device)
    subject = subject_of(model, tokenizer)
    plan = plan_of(subject.module, settings, subject.part)
    passes = passes_of(subject, data, settings)
    return _Run(subject, passes, plan, settings, workers, progress).result()


def _with(settings: ActivationSettings, overrides: dict[str, Any]) -> ActivationSettings:
    if not overrides:
        return settings
    known = {each.name: each for each in keys()}
    values = {name: each.of(settings) for name, each in known.items()}
    for given, value in overrides.items():
        name = known_key(given.replace("__", "."), known)
        values[name] = value_of(known[name], list(value) if isinstance(value, tuple) else value)
    changed_ones: ActivationSettings = made(ActivationSettings, values, source=settings.source)
    _check_together(changed_ones)
    return changed_ones


class _Run:
    def __init__(
        self,
        subject: MeasuredNetwork,
        passes: Passes,
        plan: ActivationPlan,
        settings: ActivationSettings,
        workers: Workers,
        progress: Progress | None,
    ) -> None:
        self.subject, self.passes, self.plan = subject, passes, plan
        self.settings, self.workers, self.progress = settings, workers, progress
        self.root = subject.module
        self.notes = [*plan.notes, *passes.notes]
        self.seconds: dict[str, float] = {}

    def result(self) -> ActivationsResult:
        own = self.settings
        with placed(self.subject, self.plan.blocks, own.memory, self.workers) as where:
            predicts = own.sensitivity.enabled and self._predicts(where)
            seen = self._timed("forward", lambda: self._forward(where))
            idle = self._note_silence(seen.flowed)
            self._timed("weights", self._weights)
            self._timed("smoothing", self._smoothing)
            sensitivity, proposals = self._timed(
                "sensitivity", lambda: self._sensitivity(where, predicts)
            )
        layers = self._timed("statistics", self._layers)
        failed = self._note_nonfinite() or idle
        record = ActivationsRecord(
            kind=ACTIVATIONS,
            model=self.settings.model.name or self.subject.name,
            architecture=type(self.root).__name__,
            device=", ".join(seen.devices) or own.memory.device,
            versions={
                "qgate": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            settings=changed(self.settings, plain=True),
            data={
                "source": self.passes.source,
                "samples": len(self.passes.samples),
                "tokens": self.passes.tokens,
                "seed": self.settings.data.seed,
            },
            notes=self.notes,
            seconds={name: round(value, 6) for name, value in self.seconds.items()},
            layers=layers,
            panels=self.plan.panels,
            sensitivity=sensitivity,
            proposals=proposals,
        )
        return ActivationsResult(record, failed)

    def _timed(self, name: str, work: Any) -> Any:
        start = time.perf_counter()
        found = work()
        self.seconds[name] = time.perf_counter() - start
        return found

    # Passes ------------------------------------------------------------------------------------

    def _forward(self, where: Where) -> Statistics:
        asks = self.plan.asks
        seen = gathered(self.passes.samples, asks, where, self.workers, self.progress)
        self.stats = {
            key: seen.layers.get(key) or LayerStats(*key, ask) for key, ask in asks.items()
        }
        self.notes += seen.notes
        return seen

    def _predicts(self, where: Where) -> bool:
        """Said before any pass, because a target may ask for it."""
        samples = self.passes.samples
        if isinstance(where, Host):
            found = predicts_next(self.root, samples, where.device)
        else:
            device = next((p.device for p in self.root.parameters()), torch.device("cpu"))
            with evaluating(self.root):
                found = predicts_next(self.root, samples, device)
        if self.settings.sensitivity.target_loss is not None and not found:
            raise QgateError(NO_LOSS)
        return found

    def _note_silence(self, flowed: Flowed) -> bool:
        """If a module never ran; one that has no numbers to look at is left out of the record."""
        numberless = self.numberless = flowed.numberless()
        idle = [each for each in flowed.silent() if each not in numberless]
        for said, pairs in (
            ("matched, and they never ran (coverage 0)", idle),
            ("matched, and they have no floating point numbers there", numberless),
        ):
            if pairs:
                names = listed([f"{module} ({role})" for module, role in pairs], 10)
                self.notes.append(f"{said}: {names}.")
        of = len(self.passes.samples)
        partly = [
            f"{s.module} ({s.role}) in {len(s.samples)} of {of}"
            for s in self.stats.values()
            if s.role != WEIGHT and 0 < len(s.samples) < of
        ]
        if partly:
            self.notes.append(f"not reached by all samples: {listed(partly, 10)}.")
        return bool(idle)

    def _weights(self) -> None:
        for (name, role), stats in self.stats.items():
            if role == WEIGHT:
                table = weight_table(self.root.get_submodule(name))
                if table is not None:
                    stats.update(table)

    def _smoothing(self) -> None:
        self.advice: dict[str, Any] = {}
        own = self.settings.smoothing
        blocks: dict[int, int] = {}
        for done, name in enumerate(self.plan.smoothed):
            if self.progress is not None:
                self.progress("smoothing", done, len(self.plan.smoothed))
            stats = self.stats[name, INPUT]
            stats.finish()
            rows = stats.rows(stats.ask.rows)
            weight = weight_table(self.root.get_submodule(name))
            if rows is None or weight is None or rows.shape[-1] != weight.shape[-1]:
                continue
            found = smoothing_advice(
                rows,
                weight,
                amax=torch.from_numpy(stats.amax),
                formats=own.formats,
                alphas=own.alphas,
                seed=self.settings.data.seed,
            )
            if found is not None:
                self.advice[name] = found.smoothed
                if found.block < weight.shape[-1]:
                    blocks[weight.shape[-1]] = found.block
        for width, block in blocks.items():
            said = f"blocks of {block}" if block > 1 else "no block at all, so none is predicted"
            self.notes.append(
                f"{width} is no power of two: a Hadamard rotation of so many channels is of {said}."
            )

    def _sensitivity(self, where: Where, predicts: bool) -> tuple[list[Sensitive], list[Proposal]]:
        own = self.settings.sensitivity
        if not own.enabled:
            return [], []
        names = [n for n in self.plan.sensitive if self._quantizable(n)]
        targets = [
            SensitivityTarget(sqnr_db=own.target_sqnr_db),
            SensitivityTarget(loss=own.target_loss),
        ]
        targets = [each for each in targets if each != SensitivityTarget()]
        asked = CandidateRequest(self.passes.samples, names, predicts)
        return sensitivity_of(where, asked, own.formats, targets, self.workers, self.progress)

    def _quantizable(self, name: str) -> bool:
        """Weights that are computed from others are left alone."""
        module = self.root.get_submodule(name)
        own = module._parameters.get("weight") is not None
        if not own:
            self.notes.append(f"{name} computes its weight: it is not quantized alone.")
        return own

    # The record --------------------------------------------------------------------------------

    def _layers(self) -> list[LayerActivations]:
        found = []
        of = len(self.passes.samples)
        raw = self.settings.output.include_raw_data
        portraits: dict[tuple[bool, int], Portrait] = {}
        for (name, role), stats in self.stats.items():
            if (name, role) in self.numberless:
                continue
            kind = kind_in(self.root, name, self.plan.blocks)
            total = 1 if role == WEIGHT else of
            # Traces are of the processes that made them, and those of weights are of this one.
            trace = (role == WEIGHT, stats.trace)
            known = portraits.get(trace) if stats.calls else None
            number = layer_number(name)
            layer = stats.record(number, kind, total, self.passes.decode, raw, known)
            portraits[trace] = layer["portrait"]
            if role == INPUT and name in self.advice:
                layer["smoothing"] = self.advice[name]
            found.append(layer)
        return found

    def _note_nonfinite(self) -> bool:
        bad = [
            f"{s.module} ({s.role}): {s.kinds[0]} NaN, {s.kinds[1]} Inf, {s.kinds[2]} -Inf"
            for s in self.stats.values()
            if s.nonfinite
        ]
        if bad:
            self.notes.insert(0, f"values that are not finite: {listed(bad, 10)}.")
        return bool(bad)
