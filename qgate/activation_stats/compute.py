"""Statistics of a model's activations and weights: one forward pass per sample for all of them.

result = qgate.activations(model, [ids, ids], outlier__threshold=64)
result.record, result.tables(), result.failed
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qgate._version import __version__
from qgate.activation_stats.candidates import CandidateRequest, sensitivity_of
from qgate.activation_stats.findings import findings, summary
from qgate.activation_stats.layer_stats import LayerStats
from qgate.activation_stats.networks import (
    LoadedNetwork,
    NetworkSource,
    evaluation_mode,
    network_source,
)
from qgate.activation_stats.plan import ActivationPlan, layer_number, plan_of, weight_table
from qgate.activation_stats.plots.formats import draw_losses
from qgate.activation_stats.reading import name_of, worst_format
from qgate.activation_stats.record import ACTIVATIONS, ActivationsRecord, LayerActivations, Smoothed
from qgate.activation_stats.sensitivity import NO_LOSS, Progress, SensitivityTarget, predicts_next
from qgate.activation_stats.settings import (
    ActivationSettings,
    changed_values,
    report_settings,
    with_values,
)
from qgate.activation_stats.shards import gather_statistics
from qgate.activation_stats.smoothing import smoothing_advice
from qgate.activation_stats.subjects import MeasuredNetwork, SampleSet, sample_set_of, subject_of
from qgate.activation_stats.tables import Row, tables_of
from qgate.activation_stats.texts import worst_layers
from qgate.charts.overviews import Overview, Overviewed, frame_of
from qgate.charts.sheet import Sheet
from qgate.devices import resolve
from qgate.engine import Workers
from qgate.engine.workers import workers_of
from qgate.errors import QgateError, unknown
from qgate.hooks.observing import INPUT, OUTPUT, WEIGHT, ObservedCalls
from qgate.models import Model
from qgate.models.sites import kind_of
from qgate.summaries.reading import figure_of
from qgate.summaries.record import ValueSummary
from qgate.text import listed, shortened

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ActivationsResult", "activations"]


@dataclass(frozen=True, repr=False)
class ActivationsResult(Overviewed):
    """The result of `activations`: `record` is plain data, `failed` is true if values are not
    finite or a module that was matched never ran."""

    record: ActivationsRecord
    failed: bool

    @property
    def notes(self) -> list[str]:
        return self.record["notes"]

    def tables(self) -> dict[str, list[Row]]:
        """Return rows by table: layers, magnitude, outliers, tokens, channels, ranges, formats,
        smoothing, sensitivity, proposals."""
        return tables_of(self.record)

    def overview(self) -> Overview:
        """Describe the run: what was found, and the layers that formats lose most in."""
        lines = [str(finding) for finding in findings(self.record)]
        title = f"Activations of {shortened(self.record['model'], 60)}: {summary(self.record)}"
        return Overview(title, worst_layers(self.record), _layer_row, "layer", lines[:5], "amax")

    def to_frame(self, table: str = "layers") -> pd.DataFrame:
        """Return one of `tables()` as a data frame."""
        tables = self.tables()
        if table not in tables:
            raise unknown("table of activations", table, tables)
        return frame_of(tables[table])

    def _draw(self) -> Sheet | None:
        view = report_settings(self.record["settings"]).visualization
        pictures = (draw_losses(self.record, role, view) for role in (INPUT, OUTPUT, WEIGHT))
        return next(filter(None, pictures), None) or super()._draw()


def _layer_row(layer: LayerActivations) -> dict[str, object]:
    name, loss = worst_format(layer) or ("", None)
    summary_figures = layer["portrait"]
    return {
        "layer": name_of(layer, 60),
        "role": layer["role"],
        "worst format": name,
        "SQNR (dB)": None if loss is None else loss.worse,
        **{figure: figure_of(summary_figures, figure) for figure in ("amax", "rms", "kurtosis")},
    }


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
    """Measure what flows through a model, in one forward pass per sample.

    model      any torch module, a qgate.Model, or a name (tiny-llama, hf:PATH, mamba:PATH)
    data       token ids (rows, or batches with their attention mask), any other arguments of the
               model, or a source of text such as "custom:FILE"; the built-in text by default
    settings   from `read_settings`; `overrides` replace some, with __ in place of dots
    tokenizer  reads text and writes the texts of tokens, where the model is a module
    progress   called with the name of the step, how much is done, and how much there is
    workers    processes, or another engine: each has the model, and takes shards of the samples
    """
    settings = with_values(settings or ActivationSettings(), overrides)
    if isinstance(data, str):
        settings, data = with_values(settings, {"data.source": data}), None
    workers = workers_of(workers)
    if workers.is_local:
        resolve(settings.memory.device)
        resolve(settings.memory.offload_device)
    subject = subject_of(model, tokenizer)
    plan = plan_of(subject.module, settings, subject.part)
    samples = sample_set_of(subject, data, settings)
    return _Run(subject, samples, plan, settings, progress).result(workers)


@dataclass
class _Run:
    subject: MeasuredNetwork
    samples: SampleSet
    plan: ActivationPlan
    settings: ActivationSettings
    progress: Progress | None

    def __post_init__(self) -> None:
        self.root = self.subject.module
        self.notes = [*self.plan.notes, *self.samples.notes]
        self.seconds: dict[str, float] = {}

    def result(self, workers: Workers) -> ActivationsResult:
        own, samples, requests = self.settings, self.samples.calls, self.plan.requests
        with network_source(self.subject, self.plan.blocks, own.memory, workers) as source:
            predicts = own.sensitivity.enabled and self._predicts(source)
            with self._timed("forward"):
                gathered = gather_statistics(samples, requests, source, workers, self.progress)
                self.stats = {
                    key: gathered.layers.get(key) or LayerStats(*key, request)
                    for key, request in requests.items()
                }
                self.notes += gathered.notes
            idle = self._note_silence(gathered.flowed)
            with self._timed("weights"):
                for (name, role), stats in self.stats.items():
                    table = weight_table(self._module(name)) if role == WEIGHT else None
                    if table is not None:
                        stats.update(table)
            with self._timed("smoothing"):
                advice = self._smoothing()
            with self._timed("sensitivity"):
                limits = own.sensitivity
                targets = [
                    SensitivityTarget(sqnr_db=limits.target_sqnr_db),
                    SensitivityTarget(loss=limits.target_loss),
                ]
                sensitivity, proposals = sensitivity_of(
                    source,
                    CandidateRequest(samples, self._quantizable(), predicts),
                    limits.formats if limits.enabled else (),
                    [target for target in targets if target != SensitivityTarget()],
                    workers,
                    self.progress,
                )
        with self._timed("statistics"):
            layers = self._layers(advice)
        bad = [
            f"{s.module} ({s.role}): {s.kinds[0]} NaN, {s.kinds[1]} Inf, {s.kinds[2]} -Inf"
            for s in self.stats.values()
            if any(s.kinds)
        ]
        if bad:
            self.notes.insert(0, f"values that are not finite: {listed(bad, 10)}.")
        record = ActivationsRecord(
            kind=ACTIVATIONS,
            model=own.model.name or self.subject.name,
            architecture=type(self.root).__name__,
            device=", ".join(gathered.devices) or own.memory.device,
            versions={
                "qgate": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            settings=changed_values(own, plain=True),
            data={
                "source": self.samples.source,
                "samples": len(samples),
                "tokens": self.samples.tokens,
                "seed": own.data.seed,
            },
            notes=self.notes,
            seconds=self.seconds,
            layers=layers,
            panels=self.plan.panels,
            sensitivity=sensitivity,
            proposals=proposals,
        )
        return ActivationsResult(record, bool(bad) or idle)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 6)

    def _module(self, name: str) -> nn.Module:
        return self.root.get_submodule(name)

    def _predicts(self, source: NetworkSource) -> bool:
        """Check for a loss of next tokens before any pass, because a target may need it."""
        samples = self.samples.calls
        if isinstance(source, LoadedNetwork):
            predicts = predicts_next(self.root, samples, source.device)
        else:
            device = next((p.device for p in self.root.parameters()), torch.device("cpu"))
            with evaluation_mode(self.root):
                predicts = predicts_next(self.root, samples, device)
        if self.settings.sensitivity.target_loss is not None and not predicts:
            raise QgateError(NO_LOSS)
        return predicts

    def _note_silence(self, flowed: ObservedCalls) -> bool:
        """Note modules that never ran; those without numbers are left out of the record."""
        numberless = self.numberless = flowed.numberless()
        idle = [pair for pair in flowed.silent() if pair not in numberless]
        for why, pairs in (
            ("matched, and they never ran (coverage 0)", idle),
            ("matched, and they have no floating point numbers there", numberless),
        ):
            if pairs:
                names = listed([f"{module} ({role})" for module, role in pairs], 10)
                self.notes.append(f"{why}: {names}.")
        of = len(self.samples.calls)
        partly = [
            f"{s.module} ({s.role}) in {len(s.samples)} of {of}"
            for s in self.stats.values()
            if s.role != WEIGHT and 0 < len(s.samples) < of
        ]
        if partly:
            self.notes.append(f"not reached by all samples: {listed(partly, 10)}.")
        return bool(idle)

    def _smoothing(self) -> dict[str, list[Smoothed]]:
        advice: dict[str, list[Smoothed]] = {}
        own = self.settings.smoothing
        blocks: dict[int, int] = {}
        for done, name in enumerate(self.plan.smoothed):
            if self.progress is not None:
                self.progress("smoothing", done, len(self.plan.smoothed))
            stats = self.stats[name, INPUT]
            rows, weight = stats.rows(stats.request.rows), weight_table(self._module(name))
            if rows is None or weight is None or rows.shape[-1] != weight.shape[-1]:
                continue
            advised = smoothing_advice(
                rows,
                weight,
                amax=torch.from_numpy(stats.amax),
                formats=own.formats,
                alphas=own.alphas,
                seed=self.settings.data.seed,
            )
            if advised is not None:
                advice[name] = advised.smoothed
                if advised.block < weight.shape[-1]:
                    blocks[weight.shape[-1]] = advised.block
        for width, block in blocks.items():
            text = f"blocks of {block}" if block > 1 else "no block at all, so none is predicted"
            self.notes.append(
                f"{width} is no power of two: a Hadamard rotation of so many channels is of {text}."
            )
        return advice

    def _quantizable(self) -> list[str]:
        """Leave weights alone that are computed from others."""
        names = []
        for name in self.plan.sensitive:
            if self._module(name)._parameters.get("weight") is not None:
                names.append(name)
            else:
                self.notes.append(f"{name} computes its weight: it is not quantized alone.")
        return names

    def _layers(self, advice: dict[str, list[Smoothed]]) -> list[LayerActivations]:
        layers = []
        raw = self.settings.output.include_raw_data
        summaries: dict[tuple[bool, int], ValueSummary] = {}
        for (name, role), stats in self.stats.items():
            if (name, role) in self.numberless:
                continue
            kind = "block" if name in self.plan.blocks else kind_of(self._module(name))
            of = 1 if role == WEIGHT else len(self.samples.calls)
            # Traces are of the processes that made them, and those of weights are of this one.
            trace = (role == WEIGHT, stats.trace)
            summary = summaries.get(trace) if stats.calls else None
            layer = stats.record(layer_number(name), kind, of, self.samples.decode, raw, summary)
            summaries[trace] = layer["portrait"]
            if role == INPUT and name in advice:
                layer["smoothing"] = advice[name]
            layers.append(layer)
        return layers
