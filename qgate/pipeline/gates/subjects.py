"""What gates judge: a model on its bench, or a dump. What both are to a baseline is said here.

A subject has a name that its baseline is kept under, sites that are in layers, an origin that its
numbers belong to, and perhaps references that are stored with them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Protocol

import torch

from qgate.baselines import Origin, ReferenceTensor
from qgate.devices import arithmetic_of
from qgate.models.model import inputs_hash
from qgate.pipeline.gates.bench import Bench
from qgate.pipeline.gates.passes import short_layer

REFERENCE_CAP = 1 << 17


class Subject(Protocol):
    """What a ledger has to know of what was measured."""

    @property
    def name(self) -> str:
        """What its baseline is called."""

    @property
    def device(self) -> str: ...

    @property
    def options(self) -> Sequence[tuple[str, str]]:
        """The options that mean it, with their values: what has to be typed to run it again."""

    @property
    def bases(self) -> Sequence[str]:
        """The bases that references are kept in; none where nothing is kept but numbers."""

    @property
    def is_calibrated(self) -> bool:
        """Whether some of its accepted errors depend on a calibration."""

    def origin(self) -> Origin:
        """What is measured and with what, without a calibration."""

    def calibration(self) -> str: ...

    def title(self, mode: str) -> str:
        """What the accepted errors of a mode are called."""

    def layer_of(self, site: str) -> str:
        """The layer of a site, also of one that is there no more; empty where it is in none."""

    def references(self, basis: str) -> dict[str, ReferenceTensor]: ...


class ModelSubject:
    """A model on its bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    @property
    def name(self) -> str:
        return self.bench.model.name

    @property
    def device(self) -> str:
        return str(self.bench.model.device)

    @property
    def options(self) -> Sequence[tuple[str, str]]:
        return [("model", self.bench.setup.model)]

    @property
    def bases(self) -> Sequence[str]:
        return ("plain", *self.bench.model.bases)

    @property
    def is_calibrated(self) -> bool:
        return "rotated" in self.bench.model.bases

    def origin(self) -> Origin:
        model, sampling = self.bench.model, self.bench.setup.sampling
        return Origin(
            model=model.name,
            weights=model.weights_hash(),
            inputs=inputs_hash(model.inputs),
            calibration=None,
            samples=len(model.inputs),
            seqlen=sampling.seqlen,
            seed=sampling.seed,
            device=arithmetic_of(model.device),
            torch=str(torch.__version__),
            commit=commit_here(),
        )

    def calibration(self) -> str:
        made = self.bench.calibration
        return f"{made.inputs[:40]}-{made.settings.percentile_alpha:g}-{made.settings.arithmetic}"

    def title(self, mode: str) -> str:
        """Those against FP32 by the mode's name alone."""
        reference = self.bench.reference_mode
        return mode if reference == "fp32" else f"{mode}@{reference}"

    def layer_of(self, site: str) -> str:
        return short_layer(self.bench.model.layer_of(site.partition(":")[0]))

    def references(self, basis: str) -> dict[str, ReferenceTensor]:
        """The FP32 outputs of all blocks and the logits, cut to a seeded sample of rows."""
        return {
            site: ReferenceTensor.of(
                torch.cat([t.reshape(-1, t.shape[-1]) for t in tensors]).numpy(), REFERENCE_CAP
            )
            for site, tensors in self.bench.fp32(basis).tensors.items()
            if not site.endswith(":input")
        }


def commit_here() -> str | None:
    """The commit that is checked out where this runs."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
