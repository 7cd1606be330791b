"""Measure underflow at a format's lower end, of one tensor or while a program quantizes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import msgspec
import torch
from torch import Tensor, nn

from qgate import formats
from qgate.charts.overviews import Overview, Overviewed
from qgate.formats import Quantizer
from qgate.formats.quantizer import as_quantizer
from qgate.stats import counts
from qgate.sweeps.advice import SIGNIFICANT, severity
from qgate.text import for_terminal, one_line

if TYPE_CHECKING:
    from types import FrameType

    from qgate.formats import Format
    from qgate.formats.options import Options

_INSIDE = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
# The frame in which a module runs with its hooks.
_CALL = nn.Module._call_impl.__code__
_log = logging.getLogger("qgate")


@dataclass(frozen=True, repr=False)
class Range(Overviewed):
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

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {
            "underflow_share": self.underflow_share,
            "flushed_share": self.flushed_share,
            "severity": self.severity,
        }

    def overview(self) -> Overview:
        """Describe the lower end: what is below it, and the ranges that explain it."""
        title, *lines = (line.strip() for line in str(self).splitlines())
        rows = ("elements", "finite", "underflow", "flushed")
        return Overview(title, rows, self._count_row, "count", lines, "% of finite")

    def _count_row(self, kind: str) -> dict[str, object]:
        count = getattr(self, kind)
        return {"count": kind, "elements": count, "% of finite": 100 * count / (self.finite or 1)}

    def __str__(self) -> str:
        unit = " in units of the scale" if self.scaled else ""
        lines = [
            f"underflow before {one_line(self.format)}: {self.underflow} of {self.finite} finite "
            f"elements ({self.underflow_share:.2%}), {self.flushed} become zero "
            f"({self.flushed_share:.2%})",
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
    """Measure how much of x lies below a format's smallest normal number at its own scale."""
    q = as_quantizer(format, options)
    effects, summary, fmt = formats.report(x, q), counts(x.detach()), q.format
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
        scaled=q.granularity is not None,
    )


@dataclass
class WatchedSite:
    """Use of one format at one place in a program: its tensors, and the worst of them."""

    place: str
    worst: Range
    tensors: int = 0
    """Tensors quantized here."""
    lossy: int = 0
    """Those of them with more than 0.1 % underflow."""

    @property
    def key(self) -> tuple[str, str]:
        return self.place, self.worst.format

    @property
    def rank(self) -> tuple[float, float, str, str]:
        """Sort key: the sites that lose most come first."""
        return -self.worst.flushed_share, -self.worst.underflow_share, *self.key

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> WatchedSite:
        return msgspec.convert(record, cls)

    def __str__(self) -> str:
        worst = self.worst
        name = one_line(self.place.replace(f"{Path.cwd()}{os.sep}", ""))
        return (
            f"{name}, {worst.format}: {worst.underflow_share:.2%} below the smallest normal "
            f"number, {worst.flushed_share:.2%} become zero ({worst.severity}); {self.lossy} of "
            f"{self.tensors} tensors"
        )


@dataclass(repr=False)
class Watch(Overviewed):
    """Findings of `watch_underflow`: one site per place in the program and format."""

    sites: dict[tuple[str, str], WatchedSite] = field(default_factory=dict)

    @property
    def findings(self) -> dict[tuple[str, str], Range]:
        """The worst tensor of every site that underflows by more than 0.1 %."""
        return {key: site.worst for key, site in self.sites.items() if site.lossy}

    def add(self, site: WatchedSite) -> None:
        """Add the counts of a site, of this or another process."""
        total = self.sites.setdefault(site.key, site)
        if total is not site:
            total.tensors += site.tensors
            total.lossy += site.lossy
            total.worst = max(total.worst, site.worst, key=lambda worst: worst.underflow_share)

    def overview(self) -> Overview:
        """Describe what was watched, the sites that lose most first."""
        sites = sorted(self.sites.values(), key=lambda site: site.rank)
        title = self.lines(0)[0].removeprefix("underflow: ")
        return Overview(title, sites, _site_row, "site", drawn="below normal (%)")

    def lines(self, most: int = 20) -> list[str]:
        """Sum up a run in lines: nothing was lost, or the sites that lose, worst first."""
        if not self.sites:
            return [
                "underflow: no tensor was quantized by qgate.quantize, qgate.encode or a mode made "
                "of them, so none was watched"
            ]
        sites = sorted(self.sites.values(), key=lambda site: site.rank)
        tensors = sum(site.tensors for site in sites)
        lossy = [site for site in sites if site.lossy]
        if not lossy:
            largest = max(site.worst.underflow_share for site in sites)
            much = f"at most {largest:.2%} of a tensor is" if largest else "no value is"
            return [
                f"underflow: nothing was lost: {much} below the smallest normal number of its "
                f"format (tensors quantized: {tensors}, sites: {len(sites)})"
            ]
        more = [f"  and {len(lossy) - most} more sites"] if len(lossy) > most else []
        return [
            f"underflow: small values are lost at {len(lossy)} of {len(sites)} sites (tensors "
            f"quantized: {tensors}); the worst tensor of each:",
            *(for_terminal(f"  {site}") for site in lossy[:most]),
            *more,
        ]


def _site_row(site: WatchedSite) -> dict[str, object]:
    return {
        "place": site.place, "format": site.worst.format, "tensors": site.tensors,
        "lossy": site.lossy, "below normal (%)": 100 * site.worst.underflow_share,
    }  # fmt: skip


@contextlib.contextmanager
def watch_underflow(say: Callable[[str], None] | None = None) -> Iterator[Watch]:
    """Report, once per site, that a tensor quantized inside underflows by more than 0.1 %.

    Results do not change. A site is the module that was called, if any, and the line that called
    qgate, with the format; a moderate site is reported again if it gets high. Reports go to the
    logger "qgate", or to `say`; `Watch.lines` sums them up.
    """
    watch = Watch()
    speak = say or _log.warning
    names = _ModuleNames()
    lock = threading.Lock()

    def measure(x: Tensor, q: Quantizer) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0:
            return
        with torch.no_grad():
            measured = range(x.detach(), q)
        lossy = measured.underflow_share > SIGNIFICANT
        site = WatchedSite(_calling_site(names), measured, 1, int(lossy))
        with lock:
            before = watch.findings.get(site.key)
            watch.add(site)
        if lossy and (before is None or before.severity != "high" == measured.severity):
            speak(for_terminal(f"{one_line(site.place)}: {measured}"))

    with formats.observe(measure):
        yield watch


class _ModuleNames:
    """Names of modules within the model that was called first."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = (
            weakref.WeakKeyDictionary()
        )

    def name(self, module: nn.Module, model: nn.Module) -> str:
        if module is not model and id(module) not in self._names.get(model, {}):
            self._names[model] = {id(child): name for name, child in model.named_modules()}
        name = "" if module is model else self._names[model].get(id(module), "")
        return name or type(module).__name__


def _calling_site(names: _ModuleNames) -> str:
    """Name the module that runs, if any, and the line that called this package or torch."""
    line = ""
    running: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            running.append(frame.f_locals["self"])
        if not line and (frame.f_back is None or not code.co_filename.startswith(_INSIDE)):
            line = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{names.name(running[0], running[-1])} at {line}" if running else line
