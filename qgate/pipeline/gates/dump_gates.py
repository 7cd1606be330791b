"""A dump under the gate: what formats lose of its tensors, and where their values lie."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qgate import formats
from qgate.baselines import Origin, ReferenceTensor
from qgate.dumps import Dump
from qgate.dumps.known_names import parse
from qgate.errors import QgateError, unknown
from qgate.gate import Measured, Policy
from qgate.metrics import METRICS
from qgate.modes import Mode
from qgate.pipeline.gates.dump_sites import (
    DumpSite,
    SitePool,
    Sites,
    drawn,
    layer_in_name,
    layer_order,
    losses_of_pool,
    losses_of_tensors,
    needs_values,
    pool,
)
from qgate.pipeline.gates.judging import Judging, Outcome
from qgate.pipeline.gates.subjects import commit_here
from qgate.results.pictures import MagnitudePicture

if TYPE_CHECKING:
    from qgate.storage.places import Place

VALUES = "values"
"""What the accepted record of the distributions is called."""
_LOSSES = tuple(each.name for each in METRICS.of("format") if each.counted)
_DRIFT = tuple(each.name for each in METRICS.of("dump"))
_SHARES = ("saturated", "flushed", "underflow")
_LEAST = -200.0
_KEPT = 1 << 23


class DumpSubject:
    """A folder of dumps under a name; `spelled_name` if that name has to be given again."""

    def __init__(self, folder: Place, name: str, asked: str = "", spelled_name: str = "") -> None:
        self.folder, self._name = folder, name
        self._asked, self._spelled = asked or str(folder), spelled_name

    @property
    def name(self) -> str:
        return self._name

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def options(self) -> Sequence[tuple[str, str]]:
        named = [("dump-name", self._spelled)] if self._spelled else []
        return [("dump", self._asked), *named]

    @property
    def bases(self) -> Sequence[str]:
        return ()

    @property
    def is_calibrated(self) -> bool:
        return False

    def origin(self) -> Origin:
        return Origin.of_dump(self.name, str(torch.__version__), commit_here())

    def calibration(self) -> str:
        raise QgateError(f"the dump {self.name} has no calibration.")

    def title(self, mode: str) -> str:
        return mode

    def layer_of(self, site: str) -> str:
        return self._layers.get(site) or layer_in_name(site)

    def references(self, basis: str) -> dict[str, ReferenceTensor]:
        raise unknown(f"basis of the dump {self.name}", basis, [])

    @cached_property
    def dump(self) -> Dump:
        try:
            return Dump.open(self.folder)
        except OSError as error:
            where = error.filename or self.folder
            raise QgateError(f"{str(where)!r} cannot be read: {error.strerror}.") from None

    @cached_property
    def sites(self) -> Sites:
        """What can be gated; an error where that is nothing."""
        try:
            found = Sites.of(self.dump)
        except OSError as error:
            where = error.filename or self.folder
            raise QgateError(f"{str(where)!r} cannot be read: {error.strerror}.") from None
        if not found.sites:
            there = [f"{count} records {why}" for why, count in found.left_out.items()]
            there += self.dump.notes()[:3]
            raise QgateError(
                f"the dump {str(self.folder)!r} has no tensor that a gate could look at: "
                f"{'; '.join(there) or 'it has no record'}."
            )
        return found

    @cached_property
    def _layers(self) -> Mapping[str, str]:
        return {site.name: site.layer for site in self.sites.sites}

    def damage(self) -> list[str]:
        """What is not as it was written. What was cut off at the end is not meant: that is what a
        run leaves that was killed, and its records count."""
        found = [line for state in self.dump.states for line in state.damaged]
        torn = {line.partition(": it ")[0]: line for line in self.dump.damaged}
        return found + [line for name, line in torn.items() if not self._is_last(name)]

    def _is_last(self, name: str) -> bool:
        """Whether a file of the known collector is the last of its rank."""

        def place(of: str) -> tuple[Any, ...]:
            named = parse(of)
            counter = named.counter if named and named.counter is not None else -1
            stamp = self.dump.files.stamp(of)
            moment = stamp.moment if stamp else -1
            return (named.timestamp, counter, moment) if named else ("~", -1, moment)

        named = parse(name)
        rank = (named.rank if named else None) or 0
        others = [record.tensor.file for record in self.dump.records(rank=rank) if record.tensor]
        return all(place(name) >= place(other) for other in others)

    def notes(self) -> list[str]:
        """What a reader of the verdict should know of the dump."""
        said = list(self.dump.notes())
        said += [f"{n} records {why}: they are not gated" for why, n in self.sites.left_out.items()]
        shares = [
            record.sampled
            for site in self.sites.sites
            for record in site.records
            if record.sampled < 1 and record.tensor is None
        ]
        if shares:
            said.append(
                f"{len(shares)} records have counts of a share of their elements, the least "
                f"{min(shares):.2g}: shares and quantiles of them are estimates"
            )
        return said


class DumpGates(Judging):
    """The gates of one dump."""

    subject: DumpSubject

    def __init__(self, subject: DumpSubject, baselines: Place, policy: Policy, **how: Any) -> None:
        super().__init__(subject, baselines, policy, **how)
        self._pools: OrderedDict[str, dict[str, SitePool]] = OrderedDict()
        self._accepted: dict[str, set[tuple[str, str]]] | None = None
        self._is_sound = False

    # Before anything is compared ------------------------------------------------------------------

    def check_baseline(self) -> None:
        """Refuse a dump that is damaged, and an accepted record of something else."""
        if not self._is_sound:
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
        checked = policy or self.policy
        own = tuple(
            each for each in checked.settings if each.models or each.source.startswith("limits mar")
        )
        narrow = Policy(own, checked.model)
        narrow.check_sites([site.name for site in self.subject.sites.sites])
        narrow.check_modes([*formats.names(), VALUES])

    def layers(self, suite: str) -> list[str]:
        """The layers of the dump, and those that a suite has accepted numbers of."""
        accepted = {layer for of, layer in self._accepted_in() if of == suite}
        return sorted({*self.subject.sites.layers, *accepted}, key=layer_order)

    def _accepted_in(self) -> set[tuple[str, str]]:
        return {place for places in self._places().values() for place in places}

    def _places(self) -> dict[str, set[tuple[str, str]]]:
        """By title, the suites and layers that have accepted numbers."""
        if self._accepted is None:
            self._accepted = {}
            for title, found in self.store.accepted_of(self.store.modes()).items():
                self._accepted[title] = {
                    (key.suite, self.subject.layer_of(key.site)) for key in found.values
                }
        return self._accepted

    def left_out(self, suite: str, fmt: str, layer: str) -> str | None:
        """Why a format cannot be looked at in a layer; an empty text where there is no layer."""
        here = self.subject.sites.in_layer(layer)
        if not here:
            there = (suite, layer) in self._places().get(fmt, ())
            return None if there else ""
        if needs_values(fmt) and not any(site.has_values for site in here):
            return "only counts were stored, and it scales by blocks or tensors"
        return None

    # The gates ------------------------------------------------------------------------------------

    def overflow(self, suite: str, fmt: str, layer: str) -> Outcome:
        """Gate the shares that saturate and that are flushed in all tensors of a layer."""
        fmt = formats.get(fmt).name
        rows = []
        by_tensor = needs_values(fmt)
        for site in self._in_layer(suite, layer):
            if by_tensor and not site.has_values:
                continue
            pooled = self._pool(site)
            if by_tensor:
                losses = losses_of_tensors(self.subject.dump, site.records, fmt)
            else:
                losses = losses_of_pool(pooled, fmt)
            values = {f"{kind}_share": losses.share(kind) for kind in _SHARES}
            pictures = (drawn(pooled, fmt, losses),) if self.plots != "none" else ()
            rows.append(_row(site, pooled, values, _LOSSES, pictures))
        mode = Mode(fmt, "the format alone")
        return self.judge(
            suite, mode, rows, layer, self._about(), title=fmt, label="format", whole=[layer]
        )

    def distributions(self, suite: str, layer: str) -> Outcome:
        """Where the values of a layer's tensors lie."""
        rows = []
        for site in self._in_layer(suite, layer):
            pooled = self._pool(site)
            pictures = (drawn(pooled),) if self.plots != "none" else ()
            rows.append(_row(site, pooled, portrait(pooled), _DRIFT, pictures))
        mode = Mode(VALUES, "the values alone")
        return self.judge(
            suite, mode, rows, layer, self._about(), title=VALUES, label="dump", whole=[layer]
        )

    def _in_layer(self, suite: str, layer: str) -> list[DumpSite]:
        if layer not in self.layers(suite):
            raise unknown(f"layer of the dump {self.subject.name}", layer, self.layers(suite))
        return self.subject.sites.in_layer(layer)

    def _about(self) -> dict[str, Any]:
        return {"dump": str(self.subject.folder)}

    def _again(self, label: str, name: str) -> list[tuple[str, str]]:
        return [(label, name)] if label == "format" else []

    def _pool(self, site: DumpSite) -> SitePool:
        """The values of a site; those of the layers looked at last are kept."""
        layer = self._pools.setdefault(site.layer, {})
        self._pools.move_to_end(site.layer)
        if site.name not in layer:
            layer[site.name] = pool(self.subject.dump, site.records)
            while len(self._pools) > 1 and self._held() > _KEPT:
                self._pools.popitem(last=False)
        return layer[site.name]

    def _held(self) -> int:
        return sum(len(each.values) for layer in self._pools.values() for each in layer.values())


def portrait(pooled: SitePool) -> dict[str, float | None]:
    """Where values lie; what is compared are octaves, so that a drift is a factor.

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
    told: dict[str, float | None] = {
        "log2_mean": _log2(float(np.dot(within, weights)) / total, unit),
        "log2_p90": _log2(_quantile(within, weights, 0.9), unit),
        "log2_tail": math.log2(fourth / rms) if rms > 0 else 0.0,
        "log2_nonzero": _log2(nonzero / total),
        "amax": pooled.amax,
        "rms": rms * unit,
        "mean": pooled.mean,
        "std": pooled.std,
        "kurtosis": pooled.kurtosis,
        "zeros_share": 1 - nonzero / total,
        **{f"p{q:02d}": pooled.percentile(q, of="magnitude") for q in (1, 50, 99)},
    }
    return {k: v if v is not None and math.isfinite(v) else None for k, v in told.items()}


def _quantile(size: Any, weights: Any, share: float) -> float:
    """Of the magnitudes that are not zero; 0 where there is none."""
    order = np.argsort(size, kind="stable")
    size, weights = size[order], weights[order]
    there = size > 0
    if not there.any():
        return 0.0
    ends = np.cumsum(weights[there])
    return float(size[there][np.searchsorted(ends, share * ends[-1])])


def _log2(value: float, unit: float = 1.0) -> float:
    """The logarithm, and far below all numbers there are for zero, so that it can be accepted."""
    return math.log2(value) + math.log2(unit) if value > 0 else _LEAST


def _row(
    site: DumpSite,
    pooled: SitePool,
    values: Mapping[str, float | None],
    gated: tuple[str, ...],
    pictures: tuple[MagnitudePicture, ...],
) -> Measured:
    return Measured(
        site=site.name,
        layer=site.layer,
        scope=site.scope,  # type: ignore[arg-type]
        values=values,
        order=site.order,
        nonfinite=pooled.nonfinite,
        gated=gated,
        why={**dict.fromkeys(gated, ""), "nonfinite": pooled.first_bad},
        pictures=pictures,
    )
