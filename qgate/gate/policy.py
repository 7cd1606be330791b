r"""Limits of a run, absolute bounds among them: where they come from, and which one wins.

From weak to strong: the defaults; the `[tool.qgate.limits]` table; its `rules` that fit, in their
order; the `limits` markers of a test, in their order. Each gives only the limits that it changes,
absolute bounds metric by metric.

    [tool.qgate.limits]
    budget_db = 0.5
    absolute = ["relative_mse<1e-2", "correlation>0.99"]

    [[tool.qgate.limits.rules]]
    sites = 'layers\.0\.'            # a regular expression, searched in the site's name
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
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from qgate.errors import QgateError, unknown
from qgate.gate.measured import Measured, is_finite
from qgate.metrics import METRICS, Metric
from qgate.project.settings import LIMITS_OF_PYPROJECT
from qgate.results.kinds import SCOPES, Scope, scope_of
from qgate.results.run_facts import MARGINS, LooserLimit
from qgate.settings import check_values, setting, settings_of

Side = Literal["<=", ">=", "=="]
# Elements that other arithmetic moves across a threshold, and the share of them that other weights
# move: of 420 shares of tiny-llama none moved by more than 0.007 in 100 steps of tuning.
_ELEMENTS, _SHARE = 2, 0.01
# Codes that tip over on other threads moved carried errors of blocks by less than 1 % over 5,120
# tokens, by 2.8 % over 1,024, and those of their worst channel by 5.9 % there.
_MANY_TOKENS, _MOST_ROOM = 5_120, 5.0
# By how much a metric of the user's own may differ from that of other weights, on both sides.
_TASK_ACROSS_WEIGHTS = 0.25
_BOUND = re.compile(r"\s*([A-Za-z_]\w*(?:@\w+)?)\s*(<=?|>=?)\s*(\S+)\s*")


@dataclass(frozen=True)
class Bound:
    """Bound of a metric, or with `magnitude` of its absolute value; equal is allowed.

    `source` says where the bound was set, `reason` why.
    """

    metric: str
    side: Side
    value: float
    magnitude: bool = False
    source: str = ""
    reason: str = ""

    def holds(self, value: float | None) -> bool:
        """Tell if a value is finite and within the bound: NaN, infinity and no value are not."""
        if value is None:
            return False
        return within(abs(value) if self.magnitude else value, self.side, self.value)

    def __str__(self) -> str:
        return f"{self.metric} {self.side} {self.value:g}"


def room_for_few_tokens(tokens: int, *, is_part: bool = False) -> float:
    """Return how many times the tolerance of a carried error is that of 5,120 tokens or more.

    It grows by the root of how many fewer there are; of a part of the tensor, which few codes
    decide, by how many fewer. Where no tokens are counted it stays.
    """
    if not 0 < tokens < _MANY_TOKENS:
        return 1.0
    fewer = _MANY_TOKENS / tokens
    return min(fewer if is_part else math.sqrt(fewer), _MOST_ROOM)


def within(value: float | None, side: Side, bound: float) -> bool:
    if value is None or not (math.isfinite(value) and math.isfinite(bound)):
        return False
    if side == "==":
        return value == bound
    return value <= bound if side == "<=" else value >= bound


def times_over(metric: str, value: float | None, side: Side, bound: float) -> float:
    """Return how many times the bound a value is: above 1 is worse, infinite is not finite.

    For what is better the higher, the distance to perfect counts: 0.98 is twice as bad as 0.99.
    Of logarithms it is the factor. What has to be equal is 0 times over where it is, and infinitely
    often where it is not.
    """
    if value is None or not (is_finite(value) and is_finite(bound)):
        return math.inf
    if side == "==":
        return 0.0 if value == bound else math.inf
    about = METRICS.find(metric)
    if about.logarithm:
        return about.factor(value - bound if side == "<=" else bound - value)
    if side == "<=":
        return _ratio(value, bound)
    if about.bounded:
        return _ratio(1 - value, 1 - bound)
    return _ratio(bound, value)


def _ratio(value: float, bound: float) -> float:
    if value <= bound:
        return value / bound if bound > 0 else 0.0
    return value / bound if bound > 0 else math.inf


def parse_bound(text: str, *, source: str = "", reason: str = "") -> Bound:
    """Read the bound in `relative_mse<1e-3` or `correlation>0.999`; `<` and `<=` are the same.

    `mlperf-99` and `mlperf-99.9` are bounds of the accuracy that a mode keeps.
    """
    if text in MARGINS:
        text = f"accuracy_kept>{MARGINS[text]}"
    match = _BOUND.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise QgateError(
            f"limit {text!r} cannot be read. Write a metric, < or >, and a number: "
            "'relative_mse<1e-3' or 'correlation>0.999'."
        )
    metric, sign, number = match.groups()
    side: Side = "<=" if sign[0] == "<" else ">="
    about = METRICS.get(metric)
    direction = about.direction
    if direction == "equal":
        raise QgateError(
            f"limit {text!r} has no meaning: {metric} is held against its accepted value, and none "
            "is better than another."
        )
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise QgateError(f"limit {text!r} has {number!r} where a finite number has to be.")
    good: Side = ">=" if direction == "higher" else "<="
    if side != good and not about.task:
        raise QgateError(
            f"limit {text!r} would pass bad values and fail good ones: {metric} is better the "
            f"{'higher' if direction == 'higher' else 'lower'}. Write '{metric}{good}{number}'."
        )
    if about.signed and value < 0:
        raise QgateError(
            f"limit {text!r} is about the magnitude of {metric}, which is never below 0."
        )
    return Bound(metric, side, value, about.signed, source, reason)


def _share(default: float, help: str, high: float = 1) -> float:
    allowed = f"a share ({default:g} is {100 * default:g} %)"
    return setting(default, help, low=0, high=high, allowed_as=allowed)


@dataclass(frozen=True)
class Limits:
    """Limits that hold at one site; its settings are the numbers of a table of limits.

    absolute  bounds by metric
    missing   what a missing accepted value means: always "fail"
    sources   where each of them was set; "default" where it is not listed
    """

    budget_db: float = setting(
        0.5,
        "dB that a local error may exceed that of an ideal quantizer",
        low=0,
        high=100,
        allowed_as="decibels",
    )
    regression: float = _share(
        0.02, "share by which an error may exceed the accepted one, made on the same device"
    )
    regression_other_device: float = _share(
        0.05,
        "the same where other arithmetic made it: another device, instructions or torch",
        high=10,
    )
    # Tuning moved carried errors of blocks by up to 0.12, by 0.4 where one element decides; a
    # quantizer that truncates makes 20 times the error (docs/limits.md). Others than local errors
    # have more room (`Scope.limits`).
    regression_across_weights: float = _share(
        0.25, "the same where it is of other weights; local errors have twice this room", high=10
    )
    task_margin: float = _share(
        0.005,
        "share of the accepted bits per byte or task metric that its mean change stays within, "
        "with all of its 95 % interval, on both sides; one number for all has no interval",
    )
    task_margin_other_device: float = _share(0.02, "the same where other arithmetic made it")
    atol: float = setting(
        1e-14,
        "added to accepted errors beside the measured noise floor: what float32 rounding alone can "
        "do to a relative MSE, (2^-24)^2 thrice",
        low=0,
    )
    absolute: Mapping[str, Bound] = field(default_factory=dict)
    missing: Literal["fail"] = "fail"
    sources: Mapping[str, str] = field(default_factory=dict)
    other_weights: bool = False

    def __post_init__(self) -> None:
        check_values(self, "limit {} = ")
        if self.missing != "fail":
            raise QgateError(
                f"missing {self.missing!r} is not allowed, only 'fail': a gate without a baseline "
                "must not pass. Record one with --update-baselines."
            )

    def tolerance(
        self, device_matches: bool, metric: Metric | None = None, carried_tokens: int = 0
    ) -> float:
        """Return the share a metric may be worse by; a single channel averages over little.

        An error that blocks carry along is a mean over tokens, if they are counted.
        """
        if metric is not None and metric.tolerance:
            return metric.tolerance
        if metric is not None and metric.task:
            margin: float = getattr(self, self.task_limit(device_matches))
            return max(margin, _TASK_ACROSS_WEIGHTS) if self.other_weights else margin
        share: float = getattr(self, self.regression_limit(device_matches))
        room = 1.0 if metric is None else metric.room
        if not device_matches or self.other_weights:
            share = max(share, min(1.0, room * share))
        if self.other_weights or not carried_tokens:
            return share
        is_part = metric is not None and bool(metric.part)
        return share * room_for_few_tokens(carried_tokens, is_part=is_part)

    def task_limit(self, device_matches: bool) -> str:
        """Name the limit that a task is held by."""
        return "task_margin" if device_matches else "task_margin_other_device"

    def regression_limit(self, device_matches: bool) -> str:
        """Name the limit that regressions are held by: the wider one where two are meant."""
        names = {
            "regression_other_device": not device_matches,
            "regression_across_weights": self.other_weights,
        }
        meant = [name for name, is_meant in names.items() if is_meant]
        return max(meant, key=lambda name: float(getattr(self, name)), default="regression")

    def counted_slack(self, device_matches: bool, grain: float) -> float:
        """Return by how much a share of elements may differ beside its tolerance.

        A few elements fall to the other side of a threshold by other arithmetic, many by other
        weights.
        """
        if self.other_weights:
            return _SHARE
        return 0.0 if device_matches else _ELEMENTS * grain

    def source(self, name: str) -> str:
        return self.sources.get(name, "default")

    def to_dict(self) -> dict[str, object]:
        plain = {name: getattr(self, name) for name in (*NUMBERS, "missing")}
        bounds = {metric: str(bound) for metric, bound in sorted(self.absolute.items())}
        return {**plain, "absolute": bounds, "sources": dict(self.sources)}


NUMBERS = tuple(settings_of(Limits))


# From where on a limit holds nothing back, and why.
SWITCHED_OFF: Mapping[str, tuple[float, str]] = {
    "budget_db": (14.0, "a tensor of zeros is 14 dB over an ideal INT4 quantizer, and passes"),
    "regression": (1.0, "an error twice the accepted one passes"),
    "regression_other_device": (1.0, "an error twice the accepted one passes"),
    "regression_across_weights": (1.0, "an error twice the accepted one passes"),
    "task_margin": (0.5, "half as many bits per byte again pass"),
    "task_margin_other_device": (0.5, "half as many bits per byte again pass"),
    "atol": (
        1.0,
        "it is added to accepted values: a tensor of zeros, whose relative MSE is 1, passes, and a "
        "logarithm of a dump may grow by a factor of two",
    ),
}


def check_reason(name: str, value: float, reason: str) -> None:
    """Refuse a number that switches a kind of limit off and does not say why."""
    least, effect = SWITCHED_OFF[name]
    if value >= least and not reason.strip():
        raise QgateError(
            f"limit {name} = {value!r} switches that kind of limit off: {effect}. Set it below "
            f'{least:g}, or add the reason: reason = "…".'
        )


# Where limits come from ---------------------------------------------------------------------------

MARKER = "limits marker"
FINDINGS = "findings"
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
        rule = _setting(source, arguments)
        if standard is not None:
            rule = replace(rule, standard=_setting(source, standard))
        return replace(self, settings=(*self.settings, rule))

    def looser(self) -> list[LooserLimit]:
        """Return all limits that are looser than the default, or than a bound before them."""
        settings = [rule for rule in self.settings if rule.fits_model(self.model)]
        return [
            limit
            for number, rule in enumerate(settings)
            for limit in rule.looser(settings[:number])
        ]

    def for_model(self, name: str) -> Policy:
        """Return the policy of one model: only the settings that are for it."""
        fit = tuple(rule for rule in self.settings if rule.fits_model(name))
        return replace(self, settings=fit, model=name)

    def own(self) -> Policy:
        """Return markers, and the rules that name models: what was written for one subject."""
        own = (s for s in self.settings if s.models or s.source.startswith(MARKER))
        return replace(self, settings=tuple(own))

    def without_findings(self, scope: str, source: str) -> Policy:
        """Return the policy that allows no finding in a scope where no rule does."""
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
        for rule in self.settings:
            if rule.fits_model(self.model) and rule.fits(site, mode, scope):
                values.update(rule.values)
                sources.update(dict.fromkeys(rule.values, rule.source))
                absolute.update(rule.bounds(scope))
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
        for rule in self.settings:
            if not any(re.search(rule.sites, name) for name in names):
                some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                raise QgateError(
                    f"{rule.source}: {rule.sites!r} matches no site. There are {some or 'none'}."
                )

    def check_modes(self, names: Iterable[str], also: Iterable[str] = ()) -> None:
        """Refuse a pattern that fits no mode: its limits would never hold.

        `also` has further valid names, which the error does not list.
        """
        modes, others = list(names), list(also)
        for rule in self.settings:
            for pattern in rule.modes:
                if not any(fnmatch.fnmatchcase(name, pattern) for name in (*modes, *others)):
                    error = unknown("mode pattern", pattern, modes, others)
                    raise QgateError(f"{rule.source}: {error}")

    def idle_bounds(self, measured: Iterable[Measured], mode: str) -> str:
        """Name a marker's absolute bound that limits nothing its test measured.

        A marker that names sites, modes or scopes is about some tests only.
        """
        rows = list(measured)
        for rule in self.settings:
            if not rule.source.startswith(MARKER) or rule.sites or rule.modes:
                continue
            met = {metric for row in rows for metric in rule.bounds(row.scope)}
            for bound in () if rule.scopes else rule.absolute:
                if bound.metric not in met:
                    scopes = ", ".join(dict.fromkeys(row.scope for row in rows)) or "nothing"
                    return (
                        f"{rule.source}: {bound} is about scope "
                        f"{' or '.join(_homes(bound.metric))}, and mode {mode} was measured in "
                        f"{scopes}"
                    )
        return ""

    def to_dict(self) -> list[dict[str, object]]:
        return [
            {
                "source": rule.source,
                **rule.values,
                "absolute": [str(bound) for bound in rule.absolute],
                "sites": rule.sites,
                "modes": list(rule.modes),
                "models": list(rule.models),
                "scopes": list(rule.scopes),
            }
            for rule in self.settings
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
