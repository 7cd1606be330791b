"""The baseline of one subject as a run sees it: what was accepted, and what an update collects.

Numbers of other weights, samples or calibrations cannot be held against each other: that is said
before anything is compared, and is an error and no failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.baselines import (
    Accepted,
    Candidate,
    Key,
    Origin,
    ReferenceTensor,
    Store,
    StoredChange,
    Update,
    accepted_file,
    brief,
    differences,
    drop_candidate,
    write_candidate,
)
from qgate.baselines.origin import REFERENCE_FIELDS
from qgate.errors import QgateError
from qgate.gate import Verdict, decide_update
from qgate.gate.checks import ACCEPTABLE, Check
from qgate.gate.updating import Which
from qgate.modes import Mode
from qgate.pipeline.gates.subjects import Subject

if TYPE_CHECKING:
    from qgate.storage.places import Place


@dataclass(frozen=True)
class AcceptedErrors:
    """The accepted errors of one file, as gates ask for them."""

    values: Mapping[Key, float | str] = field(default_factory=dict)
    device: str | None = None
    by_site: Mapping[tuple[str, str, str], dict[str, float | str]] = field(default_factory=dict)
    by_layer: Mapping[tuple[str, str], set[tuple[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What an update writes for one gate, and what fails all the same."""

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
    """Accepted errors are read once; what an update writes is collected until the end."""

    def __init__(self, subject: Subject, root: Place, updating: Which | None = None) -> None:
        self.subject = subject
        self.root = root
        self.updating = updating
        self._update: Update | None = None
        self._sources: dict[tuple[str, Key], tuple[float | str, str]] = {}
        self._origin: Origin | None = None
        self._looked: list[Origin | None] = []
        self._known: dict[str, AcceptedErrors] = {}
        self._records_anew = False

    @cached_property
    def store(self) -> Store:
        return Store(self.root, self.subject.name)

    @property
    def is_used(self) -> bool:
        """Whether anything was measured or held against it."""
        return self._origin is not None

    def origin(self, calibrated: bool = False) -> Origin:
        """What this run measures, and with what."""
        if self._origin is None:
            self._origin = self.subject.origin()
        if not calibrated:
            return self._origin
        return replace(self._origin, calibration=self.subject.calibration())

    # Before anything is compared ------------------------------------------------------------------

    def misfits(self) -> list[str]:
        """Why the stored references are not those of this run."""
        return self._misfits(self.store.origin())

    def _misfits(self, recorded: Origin | None) -> list[str]:
        return [] if recorded is None else differences(recorded, self.origin(), REFERENCE_FIELDS)

    def _recorded(self) -> Origin | None:
        """What was recorded when this run began: every test asks for it."""
        if not self._looked:
            self._looked.append(self.store.origin())
        return self._looked[0]

    def check(self) -> None:
        """Refuse to compare with a baseline of something else; an update replaces it instead.

        One of a dump never takes the place of one of a model, nor the other way round.
        """
        recorded = self._recorded()
        if recorded is not None and recorded.is_collected != self.origin().is_collected:
            kinds = ("a model", "a dump")
            there, here = kinds[recorded.is_collected], kinds[not recorded.is_collected]
            raise QgateError(
                f"the baseline {str(self.store.folder)!r} is of {there}, and what is measured is "
                f"{here}: give the dump another name (--dump-name)."
            )
        found = self._misfits(recorded) if self.updating in (None, "new") else []
        if found and self.updating == "new":
            raise QgateError(
                f"{'; '.join(found)}. --update-which new only adds: record the baseline again with "
                "--update-which failed or all."
            )
        if found:
            raise QgateError(
                f"{'; '.join(found)}. If that is meant, record the baseline again with "
                "--update-baselines; else run what it was made with "
                f"({self.store.folder})."
            )

    def title(self, mode: Mode) -> str:
        """What the accepted errors of a mode are called: those against FP32 by its name alone."""
        return self.subject.title(mode.name)

    def file(self, title: str) -> Place:
        return self.store.folder / accepted_file(title)

    def known(self, title: str, calibrated: bool) -> AcceptedErrors:
        """The accepted errors of that title, none where they were never recorded."""
        if title not in self._known:
            found = self.store.accepted(title)
            stale = [] if found is None else found.stale(self.origin(calibrated=calibrated))
            if stale and self.updating is None:
                mode = title.partition("@")[0]
                raise QgateError(
                    f"the accepted errors of mode {title} are stale: {'; '.join(stale)}. "
                    f"Refresh them with --mode {mode} --update-baselines."
                )
            sound = found is not None and not stale
            self._known[title] = self._indexed(found) if found and sound else AcceptedErrors()
        return self._known[title]

    def _indexed(self, accepted: Accepted) -> AcceptedErrors:
        by_site: dict[tuple[str, str, str], dict[str, float | str]] = {}
        by_layer: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for key, value in accepted.values.items():
            by_site.setdefault((key.suite, key.site, key.scope), {})[key.metric] = value
        for suite, site, scope in by_site:
            layer = self.subject.layer_of(site)
            by_layer.setdefault((suite, layer), set()).add((site, scope))
        return AcceptedErrors(accepted.values, accepted.device, by_site, by_layer)

    def same_device(self, known: AcceptedErrors) -> bool:
        """Whether the accepted errors were measured with the arithmetic of this device."""
        return known.device in (None, self.origin().device)

    def reference_tensors(self, basis: str) -> dict[str, ReferenceTensor]:
        """What the subject is compared with in a basis, as it is stored."""
        return self.subject.references(basis)

    # An update ------------------------------------------------------------------------------------

    def decide(
        self, title: str, suite: str, calibrated: bool, verdict: Verdict, which: Which
    ) -> Decision:
        """What an update would write for a verdict; nothing is noted yet."""
        decided = decide_update(verdict, which)
        values = {Key(suite, *place): value for place, value in decided.values.items()}
        gone = set(decided.removed)
        drops = tuple(
            key
            for key in self.known(title, calibrated).values
            if key.suite == suite and (key.site, key.scope) in gone
        )
        return Decision(title, suite, calibrated, values, drops, decided.remaining)

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
        update = self._collected()
        for key, value in decision.values.items():
            update.set_accepted(decision.title, key, value)
        for key in decision.drops:
            update.drop(decision.title, key)
        if not decision.calibrated:
            update.without_calibration(decision.title)
        self._records_anew |= decision.anew

    def finish(self) -> Update | None:
        """What was collected, with the references where they are new or of other weights."""
        update = self._update
        if update is None:
            return None
        if self._records_anew or self.store.origin() is None or self.misfits():
            for basis in self.subject.bases:
                update.set_reference(basis, self.reference_tensors(basis))
        self._update = None
        return update

    def commit(self, dry_run: bool = False) -> list[StoredChange]:
        """Write what was collected, and return what changed; or only say what would."""
        update = self.finish()
        if update is None:
            return []
        self._looked.clear()
        return self.store.preview(update) if dry_run else self.store.commit(update)

    def propose(
        self, folder: Path, decision: Decision, failed: Sequence[Check], source: str
    ) -> None:
        """Leave what a failing gate measured for `qgate baselines accept`.

        It is what an update would have written; what no update accepts is there with the reason.
        """
        values = dict(decision.values)
        barred: dict[Key, str] = {}
        for check in failed:
            if check.kind in ACCEPTABLE or check.value is None or not check.metric:
                continue
            key = Key(decision.suite, check.site, check.scope, check.metric)
            values[key] = check.value
            barred[key] = f"{check.kind}: {check.reason or 'limit broken'}"
        if values or decision.drops:
            origin = self.origin(decision.calibrated)
            made = Candidate(origin, decision.title, source, values, barred, decision.calibrated)
            write_candidate(folder, replace(made, gone=decision.drops))

    def withdraw(self, folder: Path, decision: Decision, source: str) -> None:
        """Take back what a gate left when it failed, now that it passes."""
        drop_candidate(folder, self.subject.name, decision.title, source)

    def _collected(self) -> Update:
        if self._update is None:
            self._update = Update(self.origin(calibrated=self.subject.is_calibrated))
        return self._update
