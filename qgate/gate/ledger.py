"""The baseline of one subject in a run: the accepted errors, and what an update collects.

Numbers of other weights, samples or calibrations cannot be compared: that is an error, and no
failure, before anything is measured. Across weights, relative errors can be. An update stores

| state of an entry | failed (default) | new | all |
|---|---|---|---|
| in tolerance | kept | kept | rewritten |
| worse | rewritten | fails | rewritten |
| improved | rewritten | kept, listed | rewritten |
| missing | written | written | written |
| accepted, but not measured | removed | fails | removed |
| broken | fails, kept | fails, kept | fails, kept |

An entry is one metric of one site and scope. Broken is what is not finite, over an absolute limit
or over the format budget; then that site and scope is left alone whole, since the other numbers of
a broken tensor are not worth accepting either. At the end of a run a mode is left out whole where a
limit broke that says what is right (`LimitKind.bars_mode`). Of a gate whose plan changed nothing is
written, unless the plan is accepted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from qgate.baselines import (
    Accepted,
    Key,
    Origin,
    Store,
    StoredChange,
    Update,
    accepted_file,
    brief,
    differences,
    kind_of,
)
from qgate.baselines.kinds import Files, values_for
from qgate.baselines.origin import REFERENCE_FIELDS
from qgate.charts.overviews import Overview, Overviewed
from qgate.errors import QgateError, unknown
from qgate.gate.checks import NOT_QUANTIZED, TASK_CHANGE, Check, Verdict
from qgate.gate.measured import Measured, is_finite
from qgate.gate.subjects import Subject
from qgate.gate.texts import hint
from qgate.metrics import METRICS, sample_number
from qgate.storage.locations import short_path
from qgate.text import counted, listed

Which = Literal["failed", "new", "all"]
WHICH: tuple[Which, ...] = get_args(Which)
EntryKey = tuple[str, str, str]
State = Literal["new", "worse", "improved", "same", "removed"]


@dataclass(frozen=True)
class EntryChange:
    """One entry, old → new; a removed one is a whole site and scope without a metric."""

    site: str
    scope: str
    metric: str
    state: State
    old: float | str | None
    new: float | str | None


@dataclass(frozen=True, repr=False)
class GateUpdate(Overviewed):
    """Entries to write, (site, scope) to remove, and the failures that remain."""

    values: dict[EntryKey, float | str]
    removed: tuple[tuple[str, str], ...]
    changes: tuple[EntryChange, ...]
    remaining: tuple[Check, ...]
    hint: str

    def overview(self) -> Overview:
        """Describe the update: its changes, old and new."""
        title = f"Update of {counted(len(self.values), 'value')}"
        title += f", {len(self.removed):,} removed, {len(self.remaining):,} failures remain"
        return Overview(title, self.changes, vars, "change", [self.hint] if self.hint else [])

    @property
    def passed(self) -> bool:
        return not self.remaining


def decide_update(
    verdict: Verdict, which: Which = "failed", accept_plan: bool = False
) -> GateUpdate:
    """Return what `--update-baselines` writes for a verdict.

    Where a site has another quantizer than was accepted, it writes nothing without `accept_plan`.
    """
    if which not in WHICH:
        raise unknown("choice of what to update", which, WHICH)
    if not accept_plan and any(check.is_plan_change for check in verdict.failed):
        return GateUpdate({}, (), (), verdict.failed, hint(verdict.failed))
    broken = {
        (check.site, check.scope) for check in verdict.failed if not check.limit.is_acceptable
    }
    open_checks = [check for check in verdict.checks if (check.site, check.scope) not in broken]
    changes = [
        change
        for check in open_checks
        if (change := _change(check)) is not None and _is_written(change.state, which)
    ]
    changes += _parts(verdict, broken)
    changes += [change for change in _samples(verdict, broken) if _is_written(change.state, which)]
    values = {
        (change.site, change.scope, change.metric): change.new
        for change in changes
        if change.new is not None
    }
    removed = tuple((change.site, change.scope) for change in changes if change.state == "removed")
    remaining = tuple(
        check
        for check in verdict.failed
        if not check.limit.is_acceptable
        or not (_is_settled(check, values) or (check.site, check.scope) in removed)
    )
    return GateUpdate(values, removed, tuple(changes), remaining, hint(remaining))


def _change(check: Check) -> EntryChange | None:
    """Return what an update could do about one check, None where there is nothing."""
    if check.limit.is_absent:
        return EntryChange(*check.key, "removed", None, None)
    if not check.limit.is_acceptable or not is_finite(check.value) or check.metric == TASK_CHANGE:
        return None
    if check.limit.is_new:
        return EntryChange(*check.key, "new", None, check.text or check.value)
    state: State = "improved" if check.improved else "same" if check.passed else "worse"
    old, new = check.accepted_text or check.against, check.text or check.value
    return EntryChange(*check.key, state, old, new)


def _is_written(state: State, which: Which) -> bool:
    if state == "new" or which == "all":
        return True
    return which == "failed" and state in ("worse", "improved", "removed")


def _parts(verdict: Verdict, broken: set[tuple[str, str]]) -> Iterator[EntryChange]:
    """Return numbers of parts, which are recorded with a site that is new."""
    for measured in verdict.measured:
        if measured.key in broken or measured.accepted:
            continue
        for metric in measured.part_metrics():
            if metric not in measured.compared:
                yield EntryChange(*measured.key, metric, "new", None, measured.value(metric))


def _samples(verdict: Verdict, broken: set[tuple[str, str]]) -> Iterator[EntryChange]:
    """Return figures of single samples, which are accepted together."""
    moved = {
        (check.site, check.scope)
        for check in verdict.failed
        if check.metric == TASK_CHANGE or not check.about.pairs_samples
    }
    for measured in verdict.measured:
        if measured.key in broken:
            continue
        state: State = "worse" if measured.key in moved else "same"
        for name in measured.sample_figures().values():
            old = (measured.accepted or {}).get(name)
            if old is not None:
                yield EntryChange(*measured.key, name, state, old, measured.value(name))


def _is_settled(check: Check, values: Mapping[EntryKey, float | str]) -> bool:
    """Tell if what an update writes cures a failure; a change of samples is cured by theirs."""
    if check.metric != TASK_CHANGE:
        return check.key in values
    return any(
        (site, scope) == (check.site, check.scope)
        and sample_number(METRICS.find(name).part) is not None
        for site, scope, name in values
    )


# The baseline of a subject ------------------------------------------------------------------------

# Titles that a sentence lists.
_TITLES = 6


@dataclass(frozen=True)
class AcceptedErrors:
    """Accepted errors of one title by key, by suite, site and scope, and by suite and layer.

    They are those of the device of a run, and of the first device where that one has none.

    elsewhere       the devices of those that other arithmetic than this run's made
    foreign         those of another kind of device, which no update of this run changes
    sources         the files that they are from, each with its device
    other_weights   the hash of the weights that they are of, where others run
    """

    values: Mapping[Key, float | str] = field(default_factory=dict)
    elsewhere: Mapping[Key, str] = field(default_factory=dict)
    foreign: Set[Key] = frozenset()
    sources: Sequence[tuple[str, str]] = ()
    by_site: Mapping[tuple[str, str, str], dict[str, float | str]] = field(default_factory=dict)
    by_layer: Mapping[tuple[str, str], Set[tuple[str, str]]] = field(default_factory=dict)
    other_weights: str = ""

    def devices_at(self, suite: str, site: str, scope: str) -> dict[str, str]:
        """Return the devices of values of other arithmetic at a site, by metric."""
        metrics = self.by_site.get((suite, site, scope), ())
        keys = {metric: Key(suite, site, scope, metric) for metric in metrics}
        return {name: self.elsewhere[key] for name, key in keys.items() if key in self.elsewhere}

    def absent_sites(
        self, suite: str, measured: Sequence[Measured], whole: Sequence[str]
    ) -> dict[tuple[str, str], str]:
        """Return sites accepted in the layers measured here that were not measured now.

        Each has the quantizer that was accepted there. Sites in no layer can be of another test:
        they are listed at the end of a complete run.
        """
        layers, scopes = {row.layer for row in measured} - {""}, {row.scope for row in measured}
        absent: set[tuple[str, str]] = {
            (site, scope)
            for layer in layers
            for site, scope in self.by_layer.get((suite, layer), ())
            if scope in scopes
        }
        for layer in whole:
            absent |= self.by_layer.get((suite, layer), set())
        return {
            (site, scope): str(self.by_site[suite, site, scope].get("quantizer", ""))
            for site, scope in absent - {row.key for row in measured}
        }


@dataclass(frozen=True)
class Decision:
    """Entries that an update writes for one gate, and the checks that fail all the same."""

    title: str
    suite: str
    calibrated: bool
    values: Mapping[Key, float | str] = field(default_factory=dict)
    drops: tuple[Key, ...] = ()
    remaining: tuple[Check, ...] = ()
    anew: bool = False

    @property
    def entries(self) -> int:
        return len(self.values) + len(self.drops) + self.anew


class Ledger:
    """Baseline of one run: accepted errors are read once, an update is collected until the end."""

    def __init__(
        self,
        subject: Subject,
        root: Path,
        updating: Which | None = None,
        refresh: Callable[[str], str] | None = None,
        accept_plan: bool = False,
        across_weights: bool = False,
    ) -> None:
        """Keep `refresh`, which returns the command that measures a title again.

        Only with `across_weights` are accepted errors of other weights compared.
        """
        self.subject, self.updating, self.refresh = subject, updating, refresh
        self.accept_plan, self.across_weights = accept_plan, across_weights
        self.store = Store(root, subject.name)
        self._update: Update | None = None
        self._sources: dict[tuple[str, Key], tuple[float | str, str]] = {}
        self._files: dict[str, Files] = {}
        self._accepted: dict[str, AcceptedErrors] = {}
        self._records_anew = False
        self.stale_titles: list[str] = []

    @cached_property
    def _origin(self) -> Origin:
        return self.subject.origin()

    @cached_property
    def recorded(self) -> Origin | None:
        """Return what was recorded when this run began: every test asks for it."""
        return self.store.origin()

    @property
    def is_other_kind(self) -> bool:
        """Tell if the references were recorded on another kind of device than this run's."""
        recorded = self.recorded
        return recorded is not None and kind_of(recorded.device) != kind_of(self._origin.device)

    @property
    def is_used(self) -> bool:
        """Tell if anything was measured or compared with it."""
        return "_origin" in self.__dict__

    def origin(self, calibrated: bool = False) -> Origin:
        """Return what this run measures, and with what."""
        if not calibrated:
            return self._origin
        return replace(self._origin, calibration=self.subject.calibration())

    # Before anything is compared ------------------------------------------------------------------

    def misfits(self) -> list[str]:
        """Say why the stored references are not those of this run."""
        return self._misfits(self.store.origin())

    def _misfits(self, recorded: Origin | None) -> list[str]:
        return [] if recorded is None else differences(recorded, self._origin, REFERENCE_FIELDS)

    def check(self) -> None:
        """Refuse to compare with a baseline of something else; an update replaces it instead.

        One of a dump, a checkpoint or two engines never takes the place of one of a model, nor the
        other way round.
        """
        recorded = self.recorded
        if recorded is not None and recorded.kind != self._origin.kind:
            # All but a model have names of their own by options.
            kinds = [of.kind for of in (self._origin, recorded) if of.is_collected]
            raise QgateError(
                f"the baseline {str(self.store.folder)!r} is of {recorded.noun}, and what is "
                f"measured is {self._origin.noun}: give the {kinds[0]} another name "
                f"(--{kinds[0]}-name)."
            )
        misfits = self._obstacles(recorded) if self.updating in (None, "new") else []
        if misfits and self.updating == "new":
            raise QgateError(
                f"{'; '.join(misfits)}. --update-which new only adds: record the baseline again "
                "with --update-which failed or all."
            )
        if misfits:
            raise QgateError(f"{'; '.join(misfits)} ({self.store.folder}). {self._ways(recorded)}")

    def _obstacles(self, recorded: Origin | None) -> list[str]:
        """Say what keeps errors from being compared; other weights do not where that is meant."""
        if recorded is not None and self.across_weights:
            recorded = replace(recorded, weights=self._origin.weights)
        return self._misfits(recorded)

    def _ways(self, recorded: Origin | None) -> str:
        """Say how to go on with a baseline of something else."""
        record_again = "record the baseline again with --update-baselines"
        if self.across_weights:
            return (
                "--across-weights compares other weights on the same samples only: run what the "
                f"baseline was made with, or {record_again}, without --across-weights."
            )
        if recorded and not self._misfits(replace(recorded, weights=self._origin.weights)):
            return (
                f"If that is meant, {record_again}, or hold relative errors against it with "
                "--across-weights; else run what it was made with."
            )
        return f"If that is meant, {record_again}; else run what it was made with."

    def baseline_text(self, title: str, accepted: AcceptedErrors) -> str:
        """Return the files that accepted errors are from, and on which device where that differs.

        Without any it is the file that an update would write.
        """
        parts = []
        for file, device in accepted.sources or ((accepted_file(title), self._origin.device),):
            part = short_path(Path.cwd(), self.store.folder / file)
            if device != self._origin.device:
                part += f" (accepted on {device}, this run is on {self._origin.device})"
            parts.append(part)
        return ", and for all other values ".join(parts)

    def accepted(self, title: str, calibrated: bool) -> AcceptedErrors:
        """Return the accepted errors of a title, none where they were never recorded."""
        if title in self._accepted:
            return self._accepted[title]
        sources, stale = self._sources_of(title, calibrated)
        if stale and self.updating is None:
            titles = list(dict.fromkeys([title, *self.stale_titles]))
            modes = ",".join(dict.fromkeys(name.partition("@")[0] for name in titles))
            raise QgateError(
                f"the accepted errors of mode{'s' * (len(titles) > 1)} {listed(titles, _TITLES)} "
                f"are stale: {'; '.join(stale)}. Refresh them with --mode {modes} "
                "--update-baselines."
            )
        weights = (of.weights for of in sources if of.weights != self._origin.weights)
        by_site: dict[tuple[str, str, str], dict[str, float | str]] = {}
        by_layer: dict[tuple[str, str], set[tuple[str, str]]] = {}
        values = values_for(sources)
        for key, (value, _) in values.items():
            by_site.setdefault((key.suite, key.site, key.scope), {})[key.metric] = value
        for suite, site, scope in by_site:
            layer = self.subject.layer_of(site)
            by_layer.setdefault((suite, layer), set()).add((site, scope))
        own = next((of.values for of in sources if self._is_own(of)), {})
        self._accepted[title] = AcceptedErrors(
            values={key: value for key, (value, _) in values.items()},
            elsewhere={key: of for key, (_, of) in values.items() if of != self._origin.device},
            foreign=values.keys() - own.keys(),
            sources=[(of.file, of.device) for of in sources],
            by_site=by_site,
            by_layer=by_layer,
            other_weights=next(weights, ""),
        )
        return self._accepted[title]

    def _sources_of(self, title: str, calibrated: bool) -> tuple[list[Accepted], list[str]]:
        """Return the files that a run takes its values from, and why the stored ones are stale.

        Those of its own kind of device come first. Where they are of this run, it does not matter
        that those of the first device are stale: what is missing then fails.
        """
        files = self._stored(title)
        first, beside = files.get(""), files.get(kind_of(self._origin.device))
        if first is not None and self._is_own(first):
            beside = None
        sources = [accepted for accepted in (beside, first) if accepted is not None]
        stale = [self._stale(accepted, calibrated) for accepted in sources]
        fresh = [of for of, why in zip(sources, stale, strict=True) if not why]
        return fresh, stale[0] if stale else []

    def _is_own(self, accepted: Accepted) -> bool:
        """Tell if accepted errors are of the kind of device of this run, which it may update."""
        return bool(accepted.kind) or kind_of(accepted.device) == kind_of(self._origin.device)

    def _stored(self, title: str) -> Files:
        if title not in self._files:
            refresh = "" if self.refresh is None else self.refresh(title)
            replaced = self.updating in ("failed", "all")
            kind = kind_of(self._origin.device)
            self._files[title] = self.store.accepted_on(
                title, kind, refresh=refresh, replaced=replaced
            )
        return self._files[title]

    def _stale(self, accepted: Accepted, calibrated: bool) -> list[str]:
        """Say why accepted errors are not those of this run; across weights these may differ."""
        # Without a calibration of its own, a file does not make a model be calibrated.
        origin = self.origin(calibrated and accepted.calibration is not None)
        if self.across_weights:
            origin = replace(origin, weights=accepted.weights)
        return accepted.stale(origin)

    def note_stale(self, titles: Mapping[str, bool]) -> list[str]:
        """Note which titles have stale errors: the first that asks for some is told of all.

        Each title comes with whether its mode is calibrated.
        """
        if self.updating is None:
            self.stale_titles = [
                title for title, of in titles.items() if self._sources_of(title, of)[1]
            ]
        return self.stale_titles

    def same_device(self, accepted: AcceptedErrors) -> bool:
        """Tell if all accepted errors were measured with the arithmetic of this device."""
        return not accepted.elsewhere

    # An update ------------------------------------------------------------------------------------

    def decide(
        self,
        title: str,
        suite: str,
        calibrated: bool,
        verdict: Verdict,
        which: Which,
        accept_plan: bool = False,
    ) -> Decision:
        """Return what an update would write for a verdict; nothing is noted yet."""
        decided = decide_update(verdict, which, accept_plan or self.accept_plan)
        values = {Key(suite, *entry): value for entry, value in decided.values.items()}
        gone, accepted = set(decided.removed), self.accepted(title, calibrated)
        entries = [
            key for key in accepted.values if key.suite == suite and (key.site, key.scope) in gone
        ]
        drops = tuple(key for key in entries if key not in accepted.foreign)
        # What another kind of device accepted is removed there only.
        absent = {(key.site, key.scope) for key in entries if key in accepted.foreign}
        remaining = decided.remaining + tuple(
            check
            for check in verdict.failed
            if check.limit.is_absent and (check.site, check.scope) in absent
        )
        return Decision(title, suite, calibrated, values, drops, remaining)

    def collect(self, decision: Decision, source: str = "") -> None:
        """Note what is to be written, once the test that measured it has passed."""
        for key, value in decision.values.items():
            before = self._sources.setdefault((decision.title, key), (value, source))
            if before[0] != value and before[1] != source:
                raise QgateError(
                    f"{source} and {before[1]} measured different errors under one name, {key} of "
                    f"{decision.title}: {brief(value)} and {brief(before[0])}. Give their sites, "
                    "or the files of their suites, different names. Nothing of them is written."
                )
        if self._update is None:
            self._update = Update(self.origin(calibrated=self.subject.is_calibrated))
        if decision.calibrated and self._update.origin.calibration is None:
            self._update.origin = self.origin(calibrated=True)
        for key, value in decision.values.items():
            self._update.set_accepted(decision.title, key, value)
        for key in decision.drops:
            self._update.drop(decision.title, key)
        if not decision.calibrated:
            self._update.without_calibration(decision.title)
        self._records_anew |= decision.anew

    def finish(self) -> Update | None:
        """Return what was collected, with the references where they are new or of other weights."""
        update, self._update = self._update, None
        if update is not None and (
            self._records_anew or self.store.origin() is None or self.misfits()
        ):
            for basis in self.subject.bases:
                update.set_reference(basis, self.subject.references(basis))
        return update

    def commit(self, dry_run: bool = False) -> list[StoredChange]:
        """Write what was collected and return what changed; a dry run writes nothing."""
        update = self.finish()
        if update is None:
            return []
        self.__dict__.pop("recorded", None)
        return self.store.preview(update) if dry_run else self.store.commit(update)


# Rows beside what was accepted for them -----------------------------------------------------------


def with_accepted(
    row: Measured,
    accepted: Mapping[str, float | str],
    elsewhere: Mapping[str, str] | None = None,
    kind: str = "",
) -> Measured:
    """Add what was accepted to a row; a text that was accepted is asked for.

    `elsewhere` has the devices of values of other arithmetic. Only those of another kind than this
    run's have the room that its own arithmetic needs.
    """
    if row.accepted is not None:
        raise QgateError(
            f"what was measured at {row.site} brings accepted errors of its own: leave `accepted` "
            "out, they come from the baseline."
        )
    texts = {name: value for name, value in accepted.items() if isinstance(value, str)}
    numbers = {name: value for name, value in accepted.items() if not isinstance(value, str)}
    now = {**dict.fromkeys(texts, NOT_QUANTIZED), **row.texts}
    devices = elsewhere or {}
    room = {
        name: size
        for name, size in row.device_room.items()
        if name in devices and kind_of(devices[name]) != kind
    }
    return replace(
        row, accepted=numbers or None, accepted_texts=texts, texts=now, elsewhere=devices,
        device_room=room,
    )  # fmt: skip
