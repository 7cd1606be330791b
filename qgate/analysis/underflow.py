"""What a format's lower end does to a tensor, before quantization and while it happens."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from qgate import formats
from qgate.analysis.sweeps.advice import SIGNIFICANT, severity
from qgate.formats import BlockFormat, Quantizer
from qgate.formats.quantizer import as_quantizer
from qgate.stats import counts

if TYPE_CHECKING:
    from qgate.formats import Format
    from qgate.formats.quantizer import Options

_PACKAGE = str(Path(__file__).parent.parent)
_log = logging.getLogger("qgate")


@dataclass(frozen=True)
class Range:
    """Counts at the lower end of a format, with the ranges that explain them."""

    format: str
    elements: int
    underflow: int
    finite: int
    flushed: int
    minimum: float
    maximum: float
    smallest: float
    max: float
    min_normal: float
    min_subnormal: float
    scaled: bool

    @property
    def underflow_share(self) -> float:
        return self.underflow / self.finite if self.finite else 0.0

    @property
    def flushed_share(self) -> float:
        return self.flushed / self.finite if self.finite else 0.0

    @property
    def severity(self) -> str:
        """ "high" above 1 % of underflow, "moderate" from 0.1 %, else "none"."""
        return severity(self.underflow_share)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "underflow_share": self.underflow_share,
            "flushed_share": self.flushed_share,
            "severity": self.severity,
        }

    def __str__(self) -> str:
        unit = " in units of the scale" if self.scaled else ""
        lines = [
            f"underflow before {self.format}: {self.underflow} of {self.finite} finite elements "
            f"({self.underflow_share:.2%}), {self.flushed} become zero ({self.flushed_share:.2%})",
            f"  tensor from {self.minimum:.3g} to {self.maximum:.3g}, smallest magnitude "
            f"{self.smallest:.3g}",
            f"  format: max {self.max:g}, smallest normal {self.min_normal:.3g}, subnormal "
            f"{self.min_subnormal:.3g}{unit}",
        ]
        if self.severity != "none":
            advice = {
                "high": "HIGH: use a smaller scale or a format with more exponent bits",
                "moderate": "MODERATE: small numbers lose precision",
            }
            lines.append(f"  {advice[self.severity]}")
        return "\n".join(lines)


def range(x: Tensor, format: str | Format | Quantizer, **options: Unpack[Options]) -> Range:
    """How much of x lies below a format's smallest normal number at the scale it would get."""
    q = as_quantizer(format, options)
    effects = formats.report(x, q)
    fmt = q.format
    summary = counts(x.detach())
    return Range(
        format=fmt.name,
        elements=effects.elements,
        underflow=effects.underflow,
        finite=effects.finite,
        flushed=effects.flushed,
        minimum=summary.min,
        maximum=summary.max,
        smallest=summary.amin,
        max=fmt.max,
        min_normal=fmt.min_normal,
        min_subnormal=fmt.min_subnormal,
        scaled=isinstance(fmt, BlockFormat) or q.granularity is not None,
    )


@dataclass
class Watch:
    """What `watch_underflow` found: one entry per place in the program and format."""

    findings: dict[tuple[str, str], Range] = field(default_factory=dict)


@contextlib.contextmanager
def watch_underflow(say: Callable[[str], None] | None = None) -> Iterator[Watch]:
    """Speak up, once per site, when a tensor quantized inside underflows by more than 0.1 %.

    Results stay what they are. A site is the line that called qgate, with the format; one that was
    moderate speaks again if it gets high. What is said goes to the logger "qgate" unless `say`
    takes it.
    """
    watch = Watch()
    speak = say or _log.warning

    def look(x: Tensor, q: Quantizer) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0:
            return
        site = (_caller(), q.format.name)
        before = watch.findings.get(site)
        if before is not None and before.severity == "high":
            return
        with torch.no_grad():
            found = range(x.detach(), q)
        worse = before is None or found.severity == "high"
        if found.underflow_share > SIGNIFICANT and worse:
            watch.findings[site] = found
            speak(f"{site[0]}: {found}")

    with formats.observe(look):
        yield watch


def _caller() -> str:
    """The file and line outside this package and torch that asked for the quantization."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _inside(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _inside(filename: str) -> bool:
    return filename.startswith((_PACKAGE, str(Path(torch.__file__).parent)))
