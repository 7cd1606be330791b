"""Where limits come from, and which one wins.

From weak to strong: the defaults; the `[tool.qgate.limits]` table; its `rules` that fit, in their
order; the `limits` markers of a test, in their order. Each says only what it changes, absolute
bounds metric by metric.

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

An absolute bound is about the carried error, or about the task for a task metric, unless its rule
names scopes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qgate.errors import QgateError, unknown
from qgate.gate.bounds import Bound, parse_bound
from qgate.gate.limits import NUMBERS, Limits, check_number
from qgate.gate.measured import SCOPES, Measured
from qgate.metrics import METRICS

MARKER = "limits marker"
_VALUES = (*NUMBERS, "absolute", "missing")
# Single codes that flip with other arithmetic are amplified on the way back: 0.65 of a gradient's
# error was seen to come and go. The smallest divergence of a task is mostly noise.
_BY_SCOPE: Mapping[str, Mapping[str, float]] = {
    "backward": {"regression_other_device": 1.0},
    "task": {"regression_other_device": 0.15},
}
_WHERE = ("sites", "modes", "models", "scopes", "reason")


@dataclass(frozen=True)
class Setting:
    """One place that sets limits, and for which sites, modes, models and scopes."""

    source: str
    values: Mapping[str, Any]
    absolute: tuple[Bound, ...] = ()
    sites: str = ""
    modes: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

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
            if scope in self.scopes or (not self.scopes and scope == _home(bound.metric))
        }


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, each) for each in patterns)


def _home(metric: str) -> str:
    return "task" if "task" in METRICS.find(metric).sources else "carried"


@dataclass(frozen=True)
class Policy:
    """All settings, weak to strong; those for named models hold in the policy of such a model."""

    settings: tuple[Setting, ...] = ()
    model: str = ""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Policy:
        """Read the policy of a `[tool.qgate.limits]` table."""
        where = "[tool.qgate.limits]"
        _known_keys(table, (*_VALUES, "rules"), f"key of {where}")
        rules = table.get("rules", [])
        if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
            raise QgateError(f"rules of {where} are {rules!r}: write [[tool.qgate.limits.rules]].")
        base = {key: value for key, value in table.items() if key != "rules"}
        settings = [_setting(where, base)]
        for number, rule in enumerate(rules, 1):
            _known_keys(rule, (*_VALUES, *_WHERE), f"key of rule {number} of {where}")
            if not rule.get("sites"):
                raise QgateError(
                    f"rule {number} of {where} says nothing of sites: give a regular expression."
                )
            settings.append(_setting(f"rule {number} of {where}", rule))
        return cls(tuple(settings))

    def with_marker(self, given: Mapping[str, Any], source: str = "limits marker") -> Policy:
        """The policy under a marker's keyword arguments, which win over all so far."""
        _known_keys(given, (*_VALUES, *_WHERE), f"argument of the {source}")
        setting = _setting(source, given)
        return replace(self, settings=(*self.settings, setting))

    def for_model(self, name: str) -> Policy:
        """The policy of one model: only the settings that are for it."""
        fit = tuple(setting for setting in self.settings if setting.fits_model(name))
        return replace(self, settings=fit, model=name)

    def limits_for(self, site: str, mode: str = "", scope: str = "local") -> Limits:
        if scope not in SCOPES:
            raise unknown("scope", scope, SCOPES)
        values: dict[str, Any] = dict(_BY_SCOPE.get(scope, {}))
        absolute: dict[str, Bound] = {}
        sources: dict[str, str] = {}
        for setting in self.settings:
            if setting.fits_model(self.model) and setting.fits(site, mode, scope):
                values.update(setting.values)
                sources.update(dict.fromkeys(setting.values, setting.source))
                absolute.update(setting.bounds(scope))
        return Limits(**values, absolute=absolute, sources=sources)

    def limits_of(self, mode: str) -> Callable[[Measured], Limits]:
        """The function that `judge` asks, for one mode."""
        return lambda measured: self.limits_for(measured.site, mode, measured.scope)

    def check_sites(self, sites: Iterable[str]) -> None:
        """An error if a rule's or marker's expression finds none of all the sites there are."""
        names = list(sites)
        for setting in self.settings:
            if not any(re.search(setting.sites, name) for name in names):
                shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                raise QgateError(
                    f"{setting.source}: {setting.sites!r} matches no site. There are "
                    f"{shown or 'none'}."
                )

    def check_modes(self, names: Iterable[str]) -> None:
        """An error if a pattern of modes fits none that there is: its limits would never hold."""
        there = list(names)
        for setting in self.settings:
            for pattern in setting.modes:
                if not any(fnmatch.fnmatchcase(name, pattern) for name in there):
                    raise QgateError(f"{setting.source}: {unknown('mode pattern', pattern, there)}")

    def idle_bounds(self, measured: Iterable[Measured], mode: str) -> str:
        """A marker's absolute bound that is about nothing of what its test measured, in words.

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
                        f"{setting.source}: {bound} is about scope {_home(bound.metric)}, and mode "
                        f"{mode} was measured in {scopes}"
                    )
        return ""

    def to_dict(self) -> list[dict[str, Any]]:
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


def _known_keys(given: Mapping[str, Any], allowed: Iterable[str], what: str) -> None:
    for key in given:
        if key not in (names := list(allowed)):
            raise unknown(what, key, names)


def _setting(source: str, given: Mapping[str, Any]) -> Setting:
    values = {name: given[name] for name in (*NUMBERS, "missing") if name in given}
    try:
        for name in NUMBERS:
            if name in given:
                check_number(name, given[name])
        Limits(**values)
        reason = str(given.get("reason", ""))
        bounds = tuple(
            parse_bound(text, source=source, reason=reason) for text in _listed("absolute", given)
        )
        sites = _expression(given.get("sites", ""))
        scopes = tuple(_listed("scopes", given))
        for scope in scopes:
            if scope not in SCOPES:
                raise unknown("scope", scope, SCOPES)
        modes, models = (tuple(_listed(name, given)) for name in ("modes", "models"))
        return Setting(source, values, bounds, sites, modes, scopes, models)
    except QgateError as error:
        raise QgateError(f"{source}: {error}") from None


def _listed(name: str, given: Mapping[str, Any]) -> list[str]:
    """Texts, listed or separated by commas; given but empty would silently mean all."""
    if name not in given:
        return []
    value = given[name]
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise QgateError(f"{name} = {value!r} is not allowed; it is a text or a list of texts.")
    texts = [part.strip() for part in parts if part.strip()]
    if not texts:
        raise QgateError(f"{name} = {value!r} names nothing: leave it out.")
    return texts


def _expression(text: object) -> str:
    try:
        re.compile(str(text))
    except re.error as error:
        raise QgateError(f"sites = {text!r} is no regular expression: {error}.") from None
    return str(text)
