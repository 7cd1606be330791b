"""Gates of a dump: what formats lose of its tensors, and where their values lie."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from qgate import formats
from qgate.baselines import Origin
from qgate.dumps import Dump
from qgate.dumps.gate_sites import (
    DumpSite,
    SitePool,
    Sites,
    layer_in_name,
    losses_of_pool,
    losses_of_tensors,
    needs_values,
    pool,
    pool_picture,
)
from qgate.dumps.tensor_saver_names import parse
from qgate.errors import QgateError, unknown
from qgate.formats.losses import Losses
from qgate.gate.measured import Measured
from qgate.gate.measuring.pictures import log2_or_least
from qgate.gate.policy import Policy
from qgate.gate.sessions import GateSession, Outcome, gate
from qgate.gate.subjects import Subject, commit_here, layer_order
from qgate.metrics import METRICS
from qgate.modes import Mode

if TYPE_CHECKING:
    from qgate.storage.locations import Location

VALUES = "values"
"""Name of the accepted record of the distributions."""
_LOSSES = tuple(metric.name for metric in METRICS.of("format") if metric.counted)
_DRIFT = tuple(metric.name for metric in METRICS.of("dump"))
_SHARES = ("saturated", "flushed", "underflow")
_MOST_POOLED = 1 << 23
T = TypeVar("T")
Values = Mapping[str, float | None]


class DumpSubject(Subject):
    """Folder of dumps under a name; `spelled_name` if that name has to be given again."""

    def __init__(
        self, folder: Location, name: str, option: str = "", spelled_name: str = ""
    ) -> None:
        self.folder, self.name = folder, name
        named = [("dump-name", spelled_name)] if spelled_name else []
        self.options = [("dump", option or str(folder)), *named]

    def origin(self) -> Origin:
        return Origin.of_subject("dump", self.name, str(torch.__version__), commit_here())

    def layer_of(self, site: str) -> str:
        return self._layers.get(site) or layer_in_name(site)

    @cached_property
    def dump(self) -> Dump:
        return self._readable(lambda: Dump.open(self.folder))

    @cached_property
    def sites(self) -> Sites:
        """Return the sites that can be gated; an error where there is none."""
        sites = self._readable(lambda: Sites.of(self.dump))
        if not sites.sites:
            reasons = [f"{count} records {why}" for why, count in sites.left_out.items()]
            reasons += self.dump.notes()[:3]
            raise QgateError(
                f"the dump {str(self.folder)!r} has no tensor that a gate could look at: "
                f"{'; '.join(reasons) or 'it has no record'}."
            )
        return sites

    def _readable(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except OSError as error:
            where = error.filename or self.folder
            raise QgateError(f"{str(where)!r} cannot be read: {error.strerror}.") from None

    @cached_property
    def _layers(self) -> Mapping[str, str]:
        return {site.name: site.layer for site in self.sites.sites}

    def damage(self) -> list[str]:
        """List what is not as it was written, but for what was cut off at the end.

        That is what a run leaves that was killed, and its records count.
        """
        lines = [line for state in self.dump.states for line in state.damaged]
        torn = {line.partition(": it ")[0]: line for line in self.dump.damaged}
        return lines + [line for name, line in torn.items() if not self._is_last(name)]

    def _is_last(self, name: str) -> bool:
        """Tell if a file of megatron-tensor-saver is the last of its rank."""

        def written(file: str) -> tuple[Any, ...]:
            parts = parse(file)
            counter = parts.counter if parts and parts.counter is not None else -1
            stamp = self.dump.files.stamp(file)
            moment = stamp.moment if stamp else -1
            return (parts.timestamp, counter, moment) if parts else ("~", -1, moment)

        parts = parse(name)
        rank = (parts.rank if parts else None) or 0
        files = [record.tensor.file for record in self.dump.records(rank=rank) if record.tensor]
        return all(written(name) >= written(file) for file in files)

    def notes(self) -> list[str]:
        """List what a reader of the verdict should know of the dump."""
        notes = list(self.dump.notes())
        notes += [
            f"{n} records {why}: they are not gated" for why, n in self.sites.left_out.items()
        ]
        shares = [
            record.sampled
            for site in self.sites.sites
            for record in site.records
            if record.sampled < 1 and record.tensor is None
        ]
        if shares:
            notes.append(
                f"{len(shares)} records have counts of a share of their elements, the least "
                f"{min(shares):.2g}: shares and quantiles of them are estimates"
            )
        return notes


class DumpGates(GateSession):
    """Gates of one dump."""

    subject: DumpSubject

    def __init__(
        self, subject: DumpSubject, baselines: Path, policy: Policy, **options: Any
    ) -> None:
        super().__init__(subject, baselines, policy, **options)
        self._pools: OrderedDict[str, dict[str, SitePool]] = OrderedDict()
        self._is_sound = False

    # Before anything is compared ------------------------------------------------------------------

    def check_baseline(self) -> None:
        """Refuse a dump that is damaged, and an accepted record of something else."""
        if self._is_sound:
            return
        damage = self.subject.damage()
        if damage:
            more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
            raise QgateError(
                f"the dump {str(self.subject.folder)!r} is damaged: {damage[0]}{more}. "
                f"`qgate dumps verify {self.subject.folder}` lists all of it."
            )
        super().check_baseline()
        self._is_sound = True

    def check_policy(self, policy: Policy | None = None) -> None:
        """Refuse a marker, or a rule for this dump by name, that fits no site or no format.

        Rules for everything are checked on the models they were written for.
        """
        narrow = (policy or self.policy).own()
        narrow.check_sites([site.name for site in self.subject.sites.sites])
        narrow.check_modes([*formats.names(), VALUES], formats.unlisted_names())

    def layers(self, suite: str) -> list[str]:
        """List the layers of the dump, and those that a suite has accepted numbers of."""
        accepted = {
            layer for places in self._accepted.values() for of, layer in places if of == suite
        }
        return sorted({*self.subject.sites.layers, *accepted}, key=layer_order)

    @cached_property
    def _accepted(self) -> dict[str, set[tuple[str, str]]]:
        """By title, the suites and layers that have accepted numbers."""
        return {
            title: {(key.suite, self.subject.layer_of(key.site)) for key in accepted.values}
            for title, accepted in self.store.accepted_of(self.store.modes()).items()
        }

    def left_out(self, suite: str, fmt: str, layer: str) -> str | None:
        """Say why a format cannot be looked at in a layer; empty where there is no layer."""
        sites = self.subject.sites.in_layer(layer)
        if not sites:
            return None if (suite, layer) in self._accepted.get(fmt, ()) else ""
        if needs_values(fmt) and not any(site.has_values for site in sites):
            why = "only counts were stored, and it scales by blocks or tensors"
            return f"{fmt} on {self.subject.folder}: {why}"
        return None

    # The gates ------------------------------------------------------------------------------------

    @gate
    def overflow(self, suite: str, fmt: str, layer: str) -> Outcome:
        """Judge the shares that saturate and that are flushed in all tensors of a layer."""
        fmt = formats.get(fmt).name
        by_tensor = needs_values(fmt)

        def measure(site: DumpSite) -> tuple[Values, Losses]:
            if by_tensor:
                losses = losses_of_tensors(self.subject.dump, site.records, fmt)
            else:
                losses = losses_of_pool(self._pool(site), fmt)
            return {f"{kind}_share": losses.share(kind) for kind in _SHARES}, losses

        sites = self._in_layer(suite, layer)
        sites = [site for site in sites if site.has_values or not by_tensor]
        return self._of_sites(suite, Mode(fmt, "the format alone"), layer, sites, measure, _LOSSES)

    @gate
    def distributions(self, suite: str, layer: str) -> Outcome:
        """Judge where the values of a layer's tensors lie."""

        def measure(site: DumpSite) -> tuple[Values, None]:
            return distribution(self._pool(site)), None

        sites = self._in_layer(suite, layer)
        return self._of_sites(
            suite, Mode(VALUES, "the values alone"), layer, sites, measure, _DRIFT
        )

    def _in_layer(self, suite: str, layer: str) -> list[DumpSite]:
        if layer not in self.layers(suite):
            raise unknown(f"layer of the dump {self.subject.name}", layer, self.layers(suite))
        return self.subject.sites.in_layer(layer)

    def _of_sites(
        self,
        suite: str,
        mode: Mode,
        layer: str,
        sites: Sequence[DumpSite],
        measure: Callable[[DumpSite], tuple[Values, Losses | None]],
        gated: tuple[str, ...],
    ) -> Outcome:
        rows = []
        for site in sites:
            pooled, (values, losses) = self._pool(site), measure(site)
            fmt = "" if losses is None else mode.name
            row = Measured(
                site=site.name,
                layer=site.layer,
                scope=site.scope,
                values=values,
                order=site.order,
                nonfinite=pooled.nonfinite,
                gated=gated,
                why={**dict.fromkeys(gated, ""), "nonfinite": pooled.first_bad},
                pictures=(pool_picture(pooled, fmt, losses),) if self.plots != "none" else (),
            )
            rows.append(row)
        notes = {"dump": str(self.subject.folder)}
        label = "dump" if mode.name == VALUES else "format"
        return self.judge(suite, mode, rows, layer, notes, label=label, whole=[layer])

    def _pool(self, site: DumpSite) -> SitePool:
        """Return the values of a site; those of the layers used last are kept."""
        layer = self._pools.setdefault(site.layer, {})
        self._pools.move_to_end(site.layer)
        if site.name not in layer:
            layer[site.name] = pool(self.subject.dump, site.records)
            while len(self._pools) > 1 and self._pooled() > _MOST_POOLED:
                self._pools.popitem(last=False)
        return layer[site.name]

    def _pooled(self) -> int:
        return sum(len(pool.values) for layer in self._pools.values() for pool in layer.values())


def distribution(pooled: SitePool) -> dict[str, float | None]:
    """Return where values lie; octaves are compared, so that a drift is a factor.

    log2_mean      of the mean magnitude
    log2_p90       of the magnitude that nine of ten values other than zero are below
    log2_tail      how far the fourth root of the fourth moment is above the rms
    log2_nonzero   of the share of values that are not zero
    """
    values, weights = pooled.weighted()
    size, total = np.abs(values), max(pooled.finite, 1)
    nonzero = int(weights[size > 0].sum())
    unit = pooled.unit if len(values) else 1.0
    within = size / unit
    rms = math.sqrt(float(np.dot(within**2, weights)) / total)
    fourth = (float(np.dot(within**4, weights)) / total) ** 0.25
    figures: dict[str, float | None] = {
        "log2_mean": log2_or_least(float(np.dot(within, weights)) / total, unit),
        "log2_p90": log2_or_least(_quantile(within, weights, 0.9), unit),
        "log2_tail": math.log2(fourth / rms) if rms > 0 else 0.0,
        "log2_nonzero": log2_or_least(nonzero / total),
        "amax": pooled.amax,
        "rms": rms * unit,
        "mean": pooled.mean,
        "std": pooled.std,
        "kurtosis": pooled.kurtosis,
        "zeros_share": 1 - nonzero / total,
        **{f"p{q:02d}": pooled.percentile(q, of="magnitude") for q in (1, 50, 99)},
    }
    return {k: v if v is not None and math.isfinite(v) else None for k, v in figures.items()}


def _quantile(size: Any, weights: Any, share: float) -> float:
    """Return a quantile of the magnitudes that are not zero; 0 where there is none."""
    order = np.argsort(size, kind="stable")
    size, weights = size[order], weights[order]
    nonzero = size > 0
    if not nonzero.any():
        return 0.0
    ends = np.cumsum(weights[nonzero])
    return float(size[nonzero][np.searchsorted(ends, share * ends[-1])])
