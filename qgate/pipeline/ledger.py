"""The baseline of one model as a run sees it: what was accepted, and what an update collects.

Numbers of other weights, samples or calibrations cannot be held against each other: that is said
before anything is compared, and is an error and no failure.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from qgate.baselines import Key, Origin, ReferenceTensor, Store, Update, accepted_file, differences
from qgate.baselines.origin import REFERENCE_FIELDS
from qgate.errors import QgateError
from qgate.gate import Verdict, decide_update
from qgate.gate.checks import Check
from qgate.gate.updating import Which
from qgate.models.model import inputs_hash
from qgate.modes import Mode
from qgate.pipeline.bench import Bench

REFERENCE_CAP = 1 << 17


class Ledger:
    """Accepted errors are read once; what an update writes is collected until the end."""

    def __init__(self, bench: Bench, root: Path, updating: Which | None = None) -> None:
        self.bench = bench
        self.root = root
        self.updating = updating
        self._update: Update | None = None
        self._origin: Origin | None = None
        self._accepted: dict[str, Mapping[Key, float]] = {}
        self._devices: dict[str, str] = {}
        self._records_anew = False

    @property
    def store(self) -> Store:
        return Store(self.root, self.bench.model.name)

    @property
    def is_used(self) -> bool:
        """Whether anything was measured or held against it."""
        return self._origin is not None

    def origin(self, calibrated: bool = False) -> Origin:
        """What this run measures, and with what."""
        if self._origin is None:
            model, sampling = self.bench.model, self.bench.setup.sampling
            self._origin = Origin(
                model=model.name,
                weights=model.weights_hash(),
                inputs=inputs_hash(model.inputs),
                calibration=None,
                samples=len(model.inputs),
                seqlen=sampling.seqlen,
                seed=sampling.seed,
                device=model.device.type,
                torch=str(torch.__version__),
                commit=_commit(),
            )
        if not calibrated:
            return self._origin
        made = self.bench.calibration
        told = f"{made.inputs[:40]}-{made.settings.percentile_alpha:g}-{made.settings.arithmetic}"
        return replace(self._origin, calibration=told)

    def check(self) -> None:
        """Refuse to compare with a baseline of something else; an update replaces it instead."""
        recorded = self.store.origin()
        if self.updating is not None or recorded is None:
            return
        found = differences(recorded, self.origin(), REFERENCE_FIELDS)
        if found:
            raise QgateError(
                f"{'; '.join(found)}. If that is meant, record the baseline again with "
                "--update-baselines; else run what it was made with "
                f"({self.store.folder})."
            )

    def title(self, mode: Mode) -> str:
        """What the accepted errors of a mode are called: those against FP32 by its name alone."""
        reference = self.bench.reference_mode
        return mode.name if reference == "fp32" else f"{mode.name}@{reference}"

    def file(self, title: str) -> Path:
        return self.store.folder / accepted_file(title)

    def accepted(self, title: str, calibrated: bool) -> Mapping[Key, float]:
        """The accepted errors of a mode by its title, none where they were never recorded."""
        if title not in self._accepted:
            found = self.store.accepted(title)
            values: Mapping[Key, float] = {}
            if found is not None:
                stale = found.stale(self.origin(calibrated=calibrated))
                if stale and self.updating is None:
                    mode = title.partition("@")[0]
                    raise QgateError(
                        f"the accepted errors of mode {title} are stale: {'; '.join(stale)}. "
                        f"Refresh them with --mode {mode} --update-baselines."
                    )
                values = {} if stale else found.values
                self._devices[title] = found.device
            self._accepted[title] = values
        return self._accepted[title]

    def same_device(self, title: str) -> bool:
        """Whether the accepted errors were measured on a device like this one."""
        return self._devices.get(title, self.origin().device) == self.origin().device

    def reference_tensors(self, basis: str) -> dict[str, ReferenceTensor]:
        """The FP32 outputs of all blocks and the logits, cut to a seeded sample of rows."""
        return {
            site: ReferenceTensor.of(
                torch.cat([t.reshape(-1, t.shape[-1]) for t in tensors]).numpy(), REFERENCE_CAP
            )
            for site, tensors in self.bench.fp32(basis).tensors.items()
            if not site.endswith(":input")
        }

    # An update ------------------------------------------------------------------------------------

    def collect(
        self, title: str, suite: str, calibrated: bool, verdict: Verdict
    ) -> tuple[int, tuple[Check, ...]]:
        """Note what an update writes for a verdict: how many entries, and what still fails."""
        if self.updating is None:
            return 0, verdict.failed
        decided = decide_update(verdict, self.updating)
        update = self._collected()
        for (site, scope, metric), value in decided.values.items():
            update.set_accepted(title, Key(suite, site, scope, metric), value)
        gone = [
            key
            for key in self.accepted(title, calibrated)
            if key.suite == suite and (key.site, key.scope) in decided.removed
        ]
        for key in gone:
            update.drop(title, key)
        if not calibrated:
            update.without_calibration(title)
        return len(decided.values) + len(gone), decided.remaining

    def record_anew(self) -> None:
        """The update is to have the references, whatever is stored."""
        self._collected()
        self._records_anew = True

    def finish(self) -> Update | None:
        """What was collected, with the references where they are new or of other weights."""
        update, recorded = self._update, self.store.origin()
        if update is None:
            return None
        other = recorded is None or differences(recorded, update.origin, REFERENCE_FIELDS)
        if self._records_anew or other:
            for basis in ("plain", *self.bench.model.bases):
                update.set_reference(basis, self.reference_tensors(basis))
        self._update = None
        return update

    def _collected(self) -> Update:
        if self._update is None:
            calibrated = "rotated" in self.bench.model.bases
            self._update = Update(self.origin(calibrated=calibrated))
        return self._update


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
