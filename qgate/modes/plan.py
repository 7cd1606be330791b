"""A plan: a mode resolved on one model, site by site, each scale with its origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qgate.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.formats.quantizer import Quantizer


@dataclass(frozen=True)
class PlanEntry:
    """One site of a plan: what is done there, with which scale, and the origin of that scale.

    calibrated   the scales that calibration samples decided: one, or one per head or channel
    """

    site: str
    does: str
    scale: float | None
    origin: str
    quantizer: Quantizer | None = None
    calibrated: tuple[float, ...] = ()


def numbers_of(scale: float | Tensor | None) -> tuple[float, ...]:
    """Return the numbers of a scale: none, one, or one per head or channel."""
    if scale is None:
        return ()
    return (scale,) if isinstance(scale, float) else (*scale.flatten().tolist(),)


@dataclass(frozen=True)
class Plan:
    """A mode written out for one model, site by site."""

    mode: str
    about: str
    model: str
    basis: str
    entries: tuple[PlanEntry, ...]
    out_of_reach: tuple[str, ...] = ()

    def quantizers(self) -> dict[str, Quantizer]:
        """Return the sites that have a quantizer, in the order of the model."""
        return {entry.site: entry.quantizer for entry in self.entries if entry.quantizer}

    def to_dict(self) -> dict[str, object]:
        """Return plain data, as for JSON."""
        return {
            "mode": self.mode,
            "model": self.model,
            "basis": self.basis,
            "out_of_reach": list(self.out_of_reach),
            "sites": [
                {"site": e.site, "does": e.does, "scale": e.scale, "origin": e.origin}
                for e in self.entries
            ],
        }

    def __str__(self) -> str:
        from tabulate import tabulate

        rows = [
            [
                one_line(entry.site),
                entry.does,
                "-" if entry.scale is None else f"{entry.scale:.6g}",
                entry.origin,
            ]
            for entry in self.entries
        ]
        head = one_line(f"mode {self.mode} on {self.model}, basis {self.basis}: {self.about}")
        if not rows:
            return f"{head}\nNothing is quantized."
        table = tabulate(rows, headers=["site", "does", "scale", "origin"], disable_numparse=True,
                         colalign=("left", "left", "right", "left"))  # fmt: skip
        return f"{head}\n\n{table}{self._missed()}"

    def _missed(self) -> str:
        if not self.out_of_reach:
            return ""
        return (
            f"\n\nOut of reach and left as they are: {len(self.out_of_reach)} weights such as "
            f"{one_line(self.out_of_reach[0])}. They belong to no layer that is called as such: "
            "fused experts of a mixture, or modules that a fused path goes around."
        )
