"""Limits of a run: where they come from, and which one wins.

From weak to strong: the defaults; the `[tool.qgate.limits]` table; its `rules` that fit, in their
order; the `limits` markers of a test, in their order. Each gives only the limits that it changes,
absolute bounds metric by metric.

    [tool.qgate.limits]
    budget_db = 0.5
    absolute = ["relative_mse<1e-2", "correlation>0.99"]

    [[tool.qgate.limits.rules]]
    sites = 'layers\\.0\\.'          # a regular expression, searched in the site's name
    modes = "2-*"                   # patterns of modes; all where they are not given
    models = "tiny-*"               # patterns of models, likewise
    scopes = ["carried"]            # likewise
    regression = 0.1
    reason = "the first layer amplifies"

An absolute bound is about the carried error, about the task for a task metric, or about the
checkpoint or the engines for metrics of these, unless its rule names scopes.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qgate.errors import QgateError, unknown
from qgate.gate.checks import FINDINGS
from qgate.gate.limits import (
    NUMBERS,
    Bound,
    Limits,
    check_reason,
    parse_bound,
    times_over,
)
from qgate.gate.measured import Measured
from qgate.metrics import METRICS
from qgate.project.settings import LIMITS_OF_PYPROJECT
from qgate.results.schema import LooserLimit
from qgate.results.scopes import SCOPES, Scope, scope_of

MARKER = "limits marker"
_VALUES = (*NUMBERS, "absolute", "missing")
_WHERE = ("sites", "modes", "models", "scopes", "reason")


@dataclass(frozen=True)
class LimitRule:
    """Limits from one source, and the sites, modes, models and scopes that they are for.

    standard   what the marker of a shipped suite says, where this is such a marker or a changed one
    """

    source: str
    values: Mapping[str, Any]
    absolute: tuple[Bound, ...] = ()
    sites: str = ""
    modes: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    reason: str = ""
    standard: LimitRule | None = None

    def fits(self, site: str, mode: str, scope: str) -> bool:
        return (
            re.search(self.sites, site) is not None
            and _matches(mode, self.modes)
            and (not self.scopes or scope in self.scopes)
        )

    def fits_model(self, model: str) -> bool:
        return _matches(model, self.models)

    def bounds(self, scope: str) -> dict[str, Bound]:
        return {
            bound.metric: bound
            for bound in self.absolute
            if scope in self.scopes or (not self.scopes and scope in _homes(bound.metric))
        }

    @property
    def is_shipped(self) -> bool:
        """Tell if this is the marker of a suite as qgate ships it."""
        shipped = self.standard
        return shipped is not None and replace(self, standard=None, source="") == replace(
            shipped, source=""
        )

    def looser(self, earlier: Iterable[LimitRule]) -> Iterator[LooserLimit]:
        """Yield the limits that are looser than the default, or than bounds of earlier settings."""
        shipped = None if self.is_shipped else self.standard
        for name in NUMBERS:
            if name not in self.values:
                continue
            usual = _least_default(name, self.scopes)
            if shipped is not None:
                usual = max(usual, shipped.values.get(name, usual))
            value = float(self.values[name])
            if value > usual:
                yield self._looser(name, value, usual, value / usual if usual else math.inf)
        before = {
            bound.metric: bound
            for setting in (*earlier, *([shipped] if shipped else []))
            if self._meets(setting)
            for bound in setting.absolute
        }
        for bound in self.absolute:
            if (strict := before.get(bound.metric)) is None:
                continue
            times = times_over(bound.metric, bound.value, bound.side, strict.value)
            if times > 1:
                yield self._looser(f"absolute {bound.metric}", bound.value, strict.value, times)
        present = {bound.metric for bound in self.absolute}
        for bound in shipped.absolute if shipped else ():
            if bound.metric not in present:
                yield self._looser(f"absolute {bound.metric}", None, bound.value, math.inf)

    def _meets(self, other: LimitRule) -> bool:
        """Tell if some mode, scope and model may be that of both settings."""
        pairs = (
            (self.modes, other.modes), (self.scopes, other.scopes), (self.models, other.models)
        )  # fmt: skip
        return all(
            not (mine and theirs)
            or any(_matches(name, theirs) for name in mine)
            or any(_matches(name, mine) for name in theirs)
            for mine, theirs in pairs
        )

    def _looser(self, name: str, value: float | None, usual: float, factor: float) -> LooserLimit:
        return LooserLimit(
            limit=name, value=value, usual=usual, factor=factor, source=self.source,
            reason=self.reason, sites=self.sites, modes=[*self.modes], models=[*self.models],
            scopes=[*self.scopes], shipped=self.is_shipped,
        )  # fmt: skip


def _scope(name: str) -> Scope:
    """Return a scope by its exact name; another name is an error with near ones."""
    if name not in SCOPES.entries:
        raise unknown("scope", name, SCOPES.names())
    return scope_of(name)


def _least_default(name: str, scopes: tuple[str, ...]) -> float:
    """Return the tightest default of a limit in some scopes, or in all."""
    default = float(getattr(Limits(), name))
    return min(scope_of(scope).limits.get(name, default) for scope in scopes or SCOPES.names())


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _homes(metric: str) -> tuple[str, ...]:
    """Return the scopes that a limit of a metric is about where none is named."""
    sources = METRICS.find(metric).sources
    homes = (scope.name for scope in SCOPES if not {*sources}.isdisjoint(scope.sources))
    return tuple(homes) or ("carried",)


@dataclass(frozen=True)
class Policy:
    """Settings of a run, weak to strong; those for named models hold only for such a model."""

    settings: tuple[LimitRule, ...] = ()
    model: str = ""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = LIMITS_OF_PYPROJECT) -> Policy:
        """Read the policy of a table, which messages call `where`, as in `[limits] of a file`."""
        _check_keys(table, (*_VALUES, "rules", "reason"), f"key of {where}")
        rules = table.get("rules", [])
        if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
            name = where.partition("]")[0].removeprefix("[")
            raise QgateError(f"rules of {where} are {rules!r}: write [[{name}.rules]].")
        base = {key: value for key, value in table.items() if key != "rules"}
        settings = [_setting(where, base)]
        for number, rule in enumerate(rules, 1):
            _check_keys(rule, (*_VALUES, *_WHERE), f"key of rule {number} of {where}")
            if not rule.get("sites"):
                raise QgateError(
                    f"rule {number} of {where} says nothing of sites: give a regular expression."
                )
            settings.append(_setting(f"rule {number} of {where}", rule))
        return cls(tuple(settings))

    def with_marker(
        self,
        arguments: Mapping[str, Any],
        source: str = "limits marker",
        standard: Mapping[str, Any] | None = None,
    ) -> Policy:
        """Return the policy under a marker's keyword arguments, which win over all so far.

        standard   the arguments of that marker in the suite as qgate ships it
        """
        _check_keys(arguments, (*_VALUES, *_WHERE), f"argument of the {source}")
        setting = _setting(source, arguments)
        if standard is not None:
            setting = replace(setting, standard=_setting(source, standard))
        return replace(self, settings=(*self.settings, setting))

    def looser(self) -> list[LooserLimit]:
        """Return all limits that are looser than the default, or than a bound before them."""
        settings = [setting for setting in self.settings if setting.fits_model(self.model)]
        return [
            limit
            for number, setting in enumerate(settings)
            for limit in setting.looser(settings[:number])
        ]

    def for_model(self, name: str) -> Policy:
        """Return the policy of one model: only the settings that are for it."""
        fit = tuple(setting for setting in self.settings if setting.fits_model(name))
        return replace(self, settings=fit, model=name)

    def own(self) -> Policy:
        """Return markers, and the rules that name models: what was written for one subject."""
        own = (s for s in self.settings if s.models or s.source.startswith(MARKER))
        return replace(self, settings=tuple(own))

    def without_findings(self, scope: str, source: str) -> Policy:
        """Return the policy that allows no finding in a scope where no setting does."""
        bound = Bound(FINDINGS, "<=", 0.0, source=source)
        none = LimitRule(source, {}, (bound,), scopes=(scope,))
        return replace(self, settings=(none, *self.settings))

    def limits_for(
        self, site: str, mode: str = "", scope: str = "local", other_weights: bool = False
    ) -> Limits:
        """Return the limits at a site, for accepted errors of the same or of other weights."""
        about = _scope(scope)
        values: dict[str, Any] = dict(about.limits)
        absolute: dict[str, Bound] = {}
        sources: dict[str, str] = {}
        for setting in self.settings:
            if setting.fits_model(self.model) and setting.fits(site, mode, scope):
                values.update(setting.values)
                sources.update(dict.fromkeys(setting.values, setting.source))
                absolute.update(setting.bounds(scope))
        return Limits(**values, absolute=absolute, sources=sources, other_weights=other_weights)

    def limits_of(self, mode: str, other_weights: bool = False) -> Callable[[Measured], Limits]:
        """Return the function that `judge` asks, for one mode.

        Of engines each row is about metrics of its own, and limits of others are for other rows.
        """

        def limits(row: Measured) -> Limits:
            all_limits = self.limits_for(row.site, mode, row.scope, other_weights)
            if not row.about.own_bounds:
                return all_limits
            own = {name: all_limits.absolute[name] for name in all_limits.absolute
                   if name in row.values}  # fmt: skip
            return replace(all_limits, absolute=own)

        return limits

    def check_sites(self, sites: Iterable[str]) -> None:
        """Refuse a rule or marker whose expression matches none of all sites."""
        names = list(sites)
        for setting in self.settings:
            if not any(re.search(setting.sites, name) for name in names):
                some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                raise QgateError(
                    f"{setting.source}: {setting.sites!r} matches no site. There are "
                    f"{some or 'none'}."
                )

    def check_modes(self, names: Iterable[str], also: Iterable[str] = ()) -> None:
        """Refuse a pattern that fits no mode: its limits would never hold.

        `also` has further valid names, which the error does not list.
        """
        modes, others = list(names), list(also)
        for setting in self.settings:
            for pattern in setting.modes:
                if not any(fnmatch.fnmatchcase(name, pattern) for name in (*modes, *others)):
                    error = unknown("mode pattern", pattern, modes, others)
                    raise QgateError(f"{setting.source}: {error}")

    def idle_bounds(self, measured: Iterable[Measured], mode: str) -> str:
        """Name a marker's absolute bound that limits nothing its test measured.

        A marker that names sites, modes or scopes is about some tests only.
        """
        rows = list(measured)
        for setting in self.settings:
            if not setting.source.startswith(MARKER) or setting.sites or setting.modes:
                continue
            met = {metric for row in rows for metric in setting.bounds(row.scope)}
            for bound in () if setting.scopes else setting.absolute:
                if bound.metric not in met:
                    scopes = ", ".join(dict.fromkeys(row.scope for row in rows)) or "nothing"
                    return (
                        f"{setting.source}: {bound} is about scope "
                        f"{' or '.join(_homes(bound.metric))}, and mode {mode} was measured in "
                        f"{scopes}"
                    )
        return ""

    def to_dict(self) -> list[dict[str, object]]:
        return [
            {
                "source": setting.source,
                **setting.values,
                "absolute": [str(bound) for bound in setting.absolute],
                "sites": setting.sites,
                "modes": list(setting.modes),
                "models": list(setting.models),
                "scopes": list(setting.scopes),
            }
            for setting in self.settings
        ]


def _check_keys(table: Mapping[str, Any], allowed: Iterable[str], kind: str) -> None:
    for key in table:
        if key not in (names := list(allowed)):
            raise unknown(kind, key, names)


def _setting(source: str, table: Mapping[str, Any]) -> LimitRule:
    values = {name: table[name] for name in (*NUMBERS, "missing") if name in table}
    try:
        Limits(**values)
        reason = str(table.get("reason", ""))
        for name in NUMBERS:
            if name in table:
                check_reason(name, table[name], reason)
        bounds = tuple(
            parse_bound(text, source=source, reason=reason) for text in _texts("absolute", table)
        )
        sites = str(table.get("sites", ""))
        try:
            re.compile(sites)
        except re.error as error:
            raise QgateError(f"sites = {sites!r} is no regular expression: {error}.") from None
        scopes = tuple(_texts("scopes", table))
        for scope in scopes:
            _scope(scope)
        modes, models = (tuple(_texts(name, table)) for name in ("modes", "models"))
        return LimitRule(source, values, bounds, sites, modes, scopes, models, reason)
    except QgateError as error:
        raise QgateError(f"{source}: {error}") from None


def _texts(name: str, table: Mapping[str, Any]) -> list[str]:
    """Return texts, listed or separated by commas; an empty list would silently mean all."""
    if name not in table:
        return []
    value = table[name]
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise QgateError(f"{name} = {value!r} is not allowed; it is a text or a list of texts.")
    texts = [part.strip() for part in parts if part.strip()]
    if not texts:
        raise QgateError(f"{name} = {value!r} names nothing: leave it out.")
    return texts
