"""Updates: the changes that a run or command asks for, and the files that they lead to."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from qgate.baselines.accepted import Accepted, accepted_file, order
from qgate.baselines.kinds import Files
from qgate.baselines.manifest import (
    NAME,
    Manifest,
    records_of,
    reference_bytes,
    reference_file,
)
from qgate.baselines.origin import REFERENCE_FIELDS, Key, Origin, differences, kind_of
from qgate.baselines.rows import ReferenceTensor
from qgate.errors import QgateError
from qgate.metrics import METRICS


@dataclass(frozen=True)
class StoredChange:
    """One entry of one file, before and after; None where it does not exist.

    An accepted error has a mode and a key, and the kind of device that its file is of where that is
    one beside the first.
    """

    file: str
    entry: str
    old: float | str | None
    new: float | str | None
    mode: str = ""
    key: Key | None = None
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.entry}: {brief(self.old)} -> {brief(self.new)}"


def brief(value: float | str | None) -> str:
    """Write a stored value for a list of changes."""
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else value[:60]


class Update:
    """Changes asked for by one run, whose origin says what the new numbers belong to.

    They go into the files of its kind of device, those of `everywhere` into the files of all kinds.
    It holds changes, not contents, so that what another run wrote meanwhile is kept.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.references: dict[str, dict[str, ReferenceTensor]] = {}
        self.values: dict[str, dict[Key, float | str]] = {}
        self.drops: dict[str, set[Key]] = {}
        self.uncalibrated: set[str] = set()
        self.everywhere = False

    def set_reference(self, basis: str, tensors: Mapping[str, ReferenceTensor]) -> None:
        """Set all reference tensors of a basis by site, in forward order."""
        reference_file(basis)
        if not tensors:
            raise QgateError(f"the references of basis {basis!r} are no tensor at all.")
        copied = {}
        for site, tensor in tensors.items():
            _check_tensor(f"the reference of {site!r} in basis {basis!r}", site, tensor)
            copied[site] = replace(tensor, values=np.array(tensor.values, order="C"))
        self.references[basis] = copied

    def set_accepted(self, mode: str, key: Key, value: float | str) -> None:
        """Accept the error or the text of a key; the last call for a key counts."""
        name = f"the error of mode {mode}, {' '.join(key)},"
        is_text = isinstance(value, str) and bool(value) and METRICS.find(key[-1]).textual
        plain = value if is_text else self._number(name, value)
        if not mode or len(key) != 4 or not all(isinstance(part, str) for part in key):
            raise QgateError(f"{name} needs a mode, and suite, site, scope and metric as texts.")
        self.drops.get(mode, set()).discard(Key(*key))
        self.values.setdefault(mode, {})[Key(*key)] = plain

    def _number(self, name: str, value: object) -> float:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise QgateError(f"{name} is {value!r}, not a number.")
        try:
            plain = float(value)
        except OverflowError:
            plain = math.inf
        if not math.isfinite(plain):
            raise QgateError(f"{name} is {plain}, which is never accepted: fix what makes it.")
        return plain

    def drop(self, mode: str, key: Key) -> None:
        """Remove the accepted error of a key; nothing happens where there is none."""
        self.values.get(mode, {}).pop(Key(*key), None)
        self.drops.setdefault(mode, set()).add(Key(*key))

    def without_calibration(self, mode: str) -> None:
        """Say that a mode has no calibrated scales: another calibration does not make it stale."""
        self.uncalibrated.add(mode)

    def leave_out(self, mode: str) -> bool:
        """Take back what was asked for of a mode, also at some device or length; False if nothing.

        References stay: they are of no mode.
        """
        names = [name for name in self.modes() if name.partition("@")[0] == mode]
        for name in names:
            self.values.pop(name, None)
            self.drops.pop(name, None)
        return bool(names)

    def modes(self) -> list[str]:
        """List the modes whose accepted errors may change."""
        changes = [*self.values.items(), *self.drops.items()]
        return sorted({mode for mode, entries in changes if entries})


def _check_tensor(name: str, site: str, tensor: ReferenceTensor) -> None:
    if not site or site == "__metadata__":
        raise QgateError(f"{site!r} is no name of a site that references can be stored under.")
    if tensor.values.dtype != np.float32 or tensor.values.shape != tensor.stored_shape:
        raise QgateError(
            f"{name} is of {tensor.values.dtype} and shape {tensor.values.shape}; float32 and "
            f"{tensor.stored_shape} are stored."
        )
    if not tensor.values.size:
        raise QgateError(f"{name} has no values, so nothing could be compared with it.")
    bad = int(np.count_nonzero(~np.isfinite(tensor.values)))
    if bad:
        raise QgateError(f"{name} has {bad} values that are not finite, which is never stored.")


def applied(
    update: Update,
    manifest: Manifest | None,
    accepted: Mapping[str, Files],
    damaged: Collection[str] = (),
) -> tuple[dict[str, bytes | None], list[StoredChange]]:
    """Return the files to write (None: to remove) and the changes that are in them.

    References in `damaged` bases are written again though the manifest does not change.
    """
    files: dict[str, bytes | None] = {}
    changes: list[StoredChange] = []
    new = _manifest(update, manifest)
    if new is not None and new != manifest:
        changes += _manifest_changes(manifest, new)
        files[NAME] = new.to_bytes()
        before = {} if manifest is None else manifest.references
        for basis in sorted({*before, *new.references}):
            if before.get(basis) != new.references.get(basis):
                files[reference_file(basis)] = (
                    reference_bytes(update.references[basis]) if basis in new.references else None
                )
    for basis in update.references.keys() & set(damaged):
        file = reference_file(basis)
        if file not in files:
            files[file] = reference_bytes(update.references[basis])
            changes.append(StoredChange(file, "all tensors", "damaged", "restored"))
    for mode in update.modes():
        stored = accepted.get(mode, {})
        after = _accepted_files(update, mode, stored)
        for kind in dict.fromkeys([*stored, *after]):
            old, now = stored.get(kind), after.get(kind)
            if now != old:
                file = accepted_file(mode, kind)
                files[file] = now.to_bytes() if now is not None and now.values else None
                changes += _accepted_changes(mode, kind, old, now)
    return files, changes


def _manifest(update: Update, manifest: Manifest | None) -> Manifest | None:
    """Return the manifest after an update; unchanged references keep their origin."""
    now = update.origin
    if not update.references and not any(update.values.values()):
        return manifest
    if manifest is None:
        if not (update.references or now.is_collected):
            raise QgateError(
                f"there is no baseline of {now.model} to accept errors against: record its "
                "references first, with --update-baselines."
            )
        bases = {basis: records_of(tensors) for basis, tensors in update.references.items()}
        return Manifest(now, bases)
    other = differences(manifest.origin, now, REFERENCE_FIELDS)
    is_replaced = now.is_collected and now.kind == manifest.origin.kind
    if other and not (update.references or is_replaced):
        raise QgateError(
            f"nothing was accepted: {'; '.join(other)}. Record the references again, with "
            "--update-baselines."
        )
    references = {} if other else dict(manifest.references)
    references |= {basis: records_of(tensors) for basis, tensors in update.references.items()}
    if other or references != manifest.references:
        calibration = now.calibration
        if not other and calibration is None:
            calibration = manifest.origin.calibration
        return Manifest(replace(now, calibration=calibration), references)
    if now.calibration is not None:
        return Manifest(replace(manifest.origin, calibration=now.calibration), references)
    return manifest


def _accepted_files(update: Update, mode: str, before: Files) -> dict[str, Accepted | None]:
    """Return the accepted errors of a mode after an update, by the kind that their file is of.

    Where the first file is of another kind of device, its lines stay and a file beside it changes,
    unless the first lines are of other weights or samples: then they go, whatever their device is.
    """
    after: dict[str, Accepted | None] = dict(before)
    if update.everywhere:
        return after | {kind: _accepted(update, mode, old, kind) for kind, old in before.items()}
    own = kind_of(update.origin.device)
    first, beside = before.get(""), before.get(own)
    if first is None or _is_replaced(update, mode, first):
        kind = "" if beside is None or _is_replaced(update, mode, beside) else own
    else:
        kind = "" if kind_of(first.device) == own else own
    after[kind] = _accepted(update, mode, before.get(kind), kind)
    if kind == "" and beside is not None and after[kind] != first:
        after[own] = None  # the first file has the values of this kind now
    return after


def _is_replaced(update: Update, mode: str, old: Accepted) -> bool:
    """Tell if new values of an update are of other weights, samples or calibration."""
    new = _new(update, mode, old.kind)
    return bool(new.values) and replace(
        old, values={}, device=new.device, edited=frozenset()
    ) != replace(new, values={})


def _new(update: Update, mode: str, kind: str) -> Accepted:
    now = update.origin
    calibration = None if mode in update.uncalibrated else now.calibration
    values = dict(update.values.get(mode, {}))
    return Accepted(
        now.model, mode, now.weights, now.inputs, calibration, now.device, values, kind=kind
    )


def _accepted(update: Update, mode: str, old: Accepted | None, kind: str) -> Accepted | None:
    """Return the accepted errors after an update; those of other weights or samples go."""
    changed = update.values.get(mode, {})
    drops = update.drops.get(mode, set())
    if old is not None and not changed:
        _check_edited(old, drops)
    if not changed:
        if old is None or not drops & old.values.keys():
            return old
        return replace(old, values={k: v for k, v in old.values.items() if k not in drops})
    new = _new(update, mode, kind)
    if old is None or _is_replaced(update, mode, old):
        return new
    _check_edited(old, {*changed, *drops})
    values = {key: value for key, value in old.values.items() if key not in drops} | changed
    if values == old.values and not old.edited:
        return old
    alone = values.keys() == changed.keys() or old.device == new.device
    device = new.device if alone else f"{kind_of(new.device)}-mixed"
    return replace(new, device=device, values=values)


def _check_edited(old: Accepted, replaced: Collection[Key]) -> None:
    """Refuse an update that leaves lines which were edited by hand in a file."""
    edited = sorted(old.edited - set(replaced), key=order)
    if edited:
        raise QgateError(
            f"nothing was written: in {old.file} {len(edited)} lines were edited or "
            f"are of another file, such as that of {edited[0]}, and this run did not measure them. "
            f"Restore the file from version control, or measure all that mode {old.mode} accepts."
        )


def _manifest_changes(old: Manifest | None, new: Manifest) -> list[StoredChange]:
    def entries(manifest: Manifest | None) -> dict[str, str]:
        if manifest is None:
            return {}
        names = ("model", "weights", "inputs", "calibration", "samples", "seqlen", "device")
        of_origin = {name: getattr(manifest.origin, name) for name in names}
        hashes = {
            f"{basis} {site}": record.sha256
            for basis, tensors in manifest.references.items()
            for site, record in tensors.items()
        }
        entries = of_origin | hashes
        return {name: str(value) for name, value in entries.items() if value is not None}

    return _compared(NAME, entries(old), entries(new))


def _accepted_changes(
    mode: str, kind: str, old: Accepted | None, new: Accepted | None
) -> list[StoredChange]:
    def header(accepted: Accepted | None) -> dict[str, float | str]:
        if accepted is None or not accepted.values:
            return {}
        names = ("weights", "inputs", "calibration", "device")
        return {name: getattr(accepted, name) or "none" for name in names}

    file = accepted_file(mode, kind)
    before, after = (accepted.values if accepted else {} for accepted in (old, new))
    changes = _compared(file, header(old), header(new), kind)
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key), after.get(key)
        if was != now:
            changes.append(StoredChange(file, str(key), was, now, mode, key, kind))
    return changes


def _compared(
    file: str, old: Mapping[str, float | str], new: Mapping[str, float | str], kind: str = ""
) -> list[StoredChange]:
    names = list(dict.fromkeys([*old, *new]))
    pairs = [(name, old.get(name), new.get(name)) for name in names]
    return [StoredChange(file, name, was, now, kind=kind) for name, was, now in pairs if was != now]
