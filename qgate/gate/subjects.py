"""Subjects of gates, as their baseline knows them: a model, its activations, a dump, a pair."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping, Sequence

from qgate.baselines import Origin, ReferenceTensor
from qgate.errors import unknown
from qgate.results.coverage import ModeScope

OUTSIDE = "outside"
"""Layer of what is in no block: embeddings, the head."""


class Subject:
    """Name of a baseline, layers of its sites, and origin of its numbers.

    options        options that measure it again, each with its values
    bases          the bases that references are kept in; none where only numbers are kept
    is_calibrated  some of its accepted errors depend on a calibration
    """

    name: str
    device: str = "cpu"
    options: Sequence[tuple[str, ...]] = ()
    bases: Sequence[str] = ()
    is_calibrated: bool = False

    def origin(self) -> Origin:
        """Return what is measured and with what, without a calibration."""
        raise NotImplementedError

    def calibration(self) -> str:
        """Return a text that identifies its calibration."""
        raise NotImplementedError

    def title(self, mode: str) -> str:
        """Return the name of the accepted errors of a mode."""
        return mode

    def selecting(self, title: str) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return options, beside those of the subject, that measure the errors of a title."""
        return []

    def layer_of(self, site: str) -> str:
        """Return the layer of a site, even of one that is gone; empty where it is in none."""
        raise NotImplementedError

    def references(self, basis: str) -> dict[str, ReferenceTensor]:
        """Return the reference tensors of a basis, as they are stored."""
        raise unknown(f"basis of {self.name}", basis, self.bases)

    def plans(self) -> Mapping[str, Mapping[str, str]]:
        """Return the plans of the modes that ran, site by site."""
        return {}

    def scopes(self, modes: Collection[str]) -> Sequence[ModeScope]:  # noqa: ARG002
        """Return what there is to compare of these modes, as far as they were measured."""
        return ()


def layer_order(layer: str) -> tuple[bool, str, int]:
    """Sort layers by number, and what is in none last."""
    stem, _, number = layer.rpartition(".")
    return layer == OUTSIDE, stem, int(number) if number.isdecimal() else 0


def commit_here() -> str | None:
    """Return the commit that is checked out where this runs."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
