"""A model as the subject of gates, as its baseline knows it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from qgate import formats, modes
from qgate.baselines import Origin, ReferenceTensor
from qgate.devices import arithmetic_of
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.coverage import mode_scope
from qgate.gate.subjects import Subject, commit_here
from qgate.models.model import inputs_hash
from qgate.models.rows import token_ids
from qgate.results.coverage import ModeScope

REFERENCE_CAP = 1 << 17


class ModelSubject(Subject):
    """Model on its bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        model = bench.model
        self.name, self.device = model.name, str(model.device)
        self.options = [("model", bench.setup.model)]
        self.bases = ("plain", *model.bases)
        self.is_calibrated = "rotated" in model.bases

    def origin(self) -> Origin:
        model, sampling = self.bench.model, self.bench.setup.sampling
        return Origin(
            model=model.name,
            weights=model.weights_hash(),
            inputs=inputs_hash(model.inputs),
            calibration=None,
            samples=len(model.inputs),
            seqlen=0 if token_ids(model.inputs[0]) is None else sampling.seqlen,
            seed=sampling.seed,
            device=arithmetic_of(model.device),
            torch=str(torch.__version__),
            commit=commit_here(),
        )

    def calibration(self) -> str:
        scales = self.bench.calibration
        settings = scales.settings
        return f"{scales.inputs[:40]}-{settings.percentile_alpha:g}-{settings.arithmetic}"

    def title(self, mode: str) -> str:
        """Name errors against FP32 by the mode alone."""
        reference = self.bench.reference_mode
        return mode if reference == "fp32" else f"{mode}@{reference}"

    def selecting(self, title: str) -> list[tuple[str, str]]:
        """Return the options of a title: its mode or format, and what it is compared with."""
        name, _, reference = title.partition("@")
        mode_names = (*modes.names(), *self.bench.model.modes, *self.bench.setup.modes)
        format_names = (*formats.names(), *formats.unlisted_names())
        kind = "format" if name in format_names and name not in mode_names else "mode"
        return [(kind, name), *([("reference", reference)] if reference else [])]

    def layer_of(self, site: str) -> str:
        return self.bench.layer_of(site)

    def references(self, basis: str) -> dict[str, ReferenceTensor]:
        """Return the FP32 outputs of all blocks and the logits, cut to a seeded sample of rows."""
        return {
            site: ReferenceTensor.of(
                torch.cat([t.reshape(-1, t.shape[-1]) for t in tensors]).cpu().numpy(),
                REFERENCE_CAP,
            )
            for site, tensors in self.bench.fp32(basis).tensors.items()
            if not site.endswith(":input")
        }

    def plans(self) -> Mapping[str, Mapping[str, str]]:
        return {
            name: {entry.site: f"{entry.does}; {entry.origin}" for entry in quantized.plan.entries}
            for name, quantized in self.bench.ran().items()
        }

    def scopes(self, modes: Collection[str]) -> Sequence[ModeScope]:
        applied = self.bench.ran().items()
        return [mode_scope(self.bench, quantized) for name, quantized in applied if name in modes]
