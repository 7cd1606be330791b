"""The baseline of one model: read by anyone, changed by `commit` only."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.baselines.accepted import FOLDER, Accepted, accepted_file, read_accepted
from qgate.baselines.manifest import NAME, Manifest, read_manifest, read_reference, reference_file
from qgate.baselines.names import safe_name
from qgate.baselines.origin import Origin
from qgate.baselines.places import files_of, folders
from qgate.baselines.rows import ReferenceTensor
from qgate.baselines.update import StoredChange, Update, applied
from qgate.errors import QgateError, unknown

if TYPE_CHECKING:
    from qgate.storage.places import Place

LOCK_TIMEOUT_S = 60.0


class Store:
    """`ROOT/<model>/`; every call reads one whole state, of before or of after an update.

    The root is a path, or what `place_of` makes of a URL.
    """

    def __init__(self, root: Place, model: str) -> None:
        if not model:
            raise QgateError("a baseline needs the name of a model.")
        self.model = model
        self.folder: Place = root / safe_name(model)
        self.files = files_of(self.folder, model)

    def exists(self) -> bool:
        """Whether there is a manifest, whatever is in it."""
        return NAME in self.files.read(())[1]

    def origin(self) -> Origin | None:
        """What the references were made with."""
        manifest = self.manifest()
        return None if manifest is None else manifest.origin

    def bases(self) -> list[str]:
        """The bases that references are kept in."""
        manifest = self.manifest()
        return [] if manifest is None else sorted(manifest.references)

    def reference(self, basis: str) -> dict[str, ReferenceTensor]:
        """The reference tensors of a basis by site, each the one the manifest says it is."""
        file = reference_file(basis)
        files = self._read(NAME, file)
        manifest = self._manifest(files)
        if manifest is None:
            raise QgateError(
                f"there is no baseline of {self.model} in {str(self.folder)!r}: record one with "
                "--update-baselines."
            )
        if basis not in manifest.references:
            raise unknown(f"basis in the baseline of {self.model}", basis, manifest.references)
        if file not in files:
            raise QgateError(
                f"{str(self.folder / file)!r} is missing: restore it from version control, or "
                "record it again with --update-baselines."
            )
        return read_reference(files[file], manifest.references[basis], str(self.folder / file))

    def accepted(self, mode: str) -> Accepted | None:
        """The accepted errors of a mode, stale or not: `Accepted.stale` says which."""
        return self._accepted(mode, self._read(accepted_file(mode)))

    def accepted_of(self, modes: Collection[str]) -> dict[str, Accepted]:
        """The accepted errors of those of the modes that have some, from one moment."""
        files = self._read(*map(accepted_file, modes)) if modes else {}
        read = {mode: self._accepted(mode, files) for mode in modes}
        return {mode: found for mode, found in read.items() if found is not None}

    def modes(self) -> list[str]:
        """The modes that have accepted errors."""
        files = self._read(f"{FOLDER}/")
        read = [
            read_accepted(files[name], str(self.folder / name))
            for name in files
            if name.endswith(".txt")
        ]
        return sorted(accepted.mode for accepted in read)

    def manifest(self) -> Manifest | None:
        """The manifest, if there is one."""
        return self._manifest(self._read(NAME))

    def commit(self, update: Update, timeout_s: float = LOCK_TIMEOUT_S) -> list[StoredChange]:
        """Write an update whole, or not at all, on top of what is there by then.

        Without a change the lock is not waited for, and nothing is written but what an update that
        was cut off has promised.
        """
        if update.origin.model != self.model:
            raise QgateError(f"an update of {update.origin.model!r} is not one of {self.model!r}.")
        if not self._planned(update)[0]:
            with contextlib.suppress(QgateError, OSError):  # it counts where it is, until next time
                self._settle(0)
            return []
        started = False
        try:
            with self.files.changing(timeout_s):
                started = True
                files, changes = self._planned(update)
                if files:
                    self.files.replace(files)
                return changes
        except OSError as error:
            raise self._failure(error, started) from None

    def tidy(self, timeout_s: float = LOCK_TIMEOUT_S) -> list[str]:
        """Finish updates that were cut off, remove what they left, and say what that was."""
        found = self.files.leftovers()
        try:
            self._settle(timeout_s)
        except OSError as error:
            raise self._failure(error, False) from None
        return found

    def _settle(self, timeout_s: float) -> None:
        if self.files.is_unfinished():
            with self.files.changing(timeout_s):
                pass

    def preview(self, update: Update) -> list[StoredChange]:
        """What `commit` would change; nothing is written."""
        return self._planned(update)[1]

    def _failure(self, error: OSError, started: bool) -> QgateError:
        file = f" ({Path(error.filename).name})" if error.filename else ""
        what = f"the baselines in {str(self.folder)!r} could not be written: {error.strerror}{file}"
        try:
            promised = started and self.files.is_promised()
        except Exception:
            return QgateError(
                f"{what}. Whether the update counts could not be asked: look with "
                "`qgate baselines list`, or run it again."
            )
        if promised:
            return QgateError(
                f"{what}. The update is recorded and counts; the next one will move its files into "
                "place."
            )
        return QgateError(f"{what}. They are as they were: {self.files.remedy}.")

    def _planned(self, update: Update) -> tuple[dict[str, bytes | None], list[StoredChange]]:
        modes = {mode: accepted_file(mode) for mode in update.modes()}
        needed = {NAME, *modes.values(), *(reference_file(basis) for basis in update.references)}
        files = self._read(*needed)
        manifest = self._manifest(files)
        read = {mode: self._accepted(mode, files) for mode in modes}
        accepted = {mode: found for mode, found in read.items() if found is not None}
        damaged = [
            basis
            for basis in update.references
            if manifest is not None
            and basis in manifest.references
            and not self._is_sound(basis, manifest, files)
        ]
        return applied(update, manifest, accepted, damaged)

    def _is_sound(self, basis: str, manifest: Manifest, files: dict[str, bytes]) -> bool:
        file = reference_file(basis)
        try:
            read_reference(files.get(file, b""), manifest.references[basis], file)
        except QgateError:
            return False
        return True

    def _read(self, *wanted: str) -> dict[str, bytes]:
        return self.files.read(wanted)[0]

    def _manifest(self, files: dict[str, bytes]) -> Manifest | None:
        if NAME not in files:
            return None
        found = read_manifest(files[NAME], str(self.folder / NAME))
        self._check(NAME, "model", found.origin.model, self.model)
        return found

    def _accepted(self, mode: str, files: dict[str, bytes]) -> Accepted | None:
        file = accepted_file(mode)
        if file not in files:
            return None
        found = read_accepted(files[file], str(self.folder / file))
        self._check(file, "model", found.model, self.model)
        self._check(file, "mode", found.mode, mode)
        return found

    def _check(self, file: str, what: str, found: str, wanted: str) -> None:
        if found != wanted:
            raise QgateError(
                f"{str(self.folder / file)!r} is of {what} {found!r}, and not of {wanted!r}: it "
                "was copied or renamed. Delete it, and record it with --update-baselines."
            )


def stored_models(root: Place) -> list[str]:
    """The models that have a baseline under a root."""
    found = []
    for folder in folders(root):
        files, _ = files_of(folder, folder.name).read([NAME])
        if NAME in files:
            found.append(read_manifest(files[NAME], str(folder / NAME)).origin.model)
    return found
