"""The baseline of one model: read by anyone, changed by `commit` only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from qgate.baselines.accepted import FOLDER, Accepted, accepted_file, kind_in, read_accepted
from qgate.baselines.kinds import Files
from qgate.baselines.manifest import (
    NAME,
    Manifest,
    read_manifest,
    read_reference,
    reference_file,
)
from qgate.baselines.names import safe_name
from qgate.baselines.origin import Origin, kind_of
from qgate.baselines.rows import ReferenceTensor
from qgate.baselines.update import StoredChange, Update, applied
from qgate.errors import QgateError, unknown
from qgate.storage.updates import FileRules, LocalFiles, Read

LOCK_TIMEOUT_S = 60.0
BASELINES = FileRules(
    plural="baselines",
    singular="baseline",
    files=re.compile(
        r"manifest\.json|reference-[a-z0-9_]+\.safetensors|accepted/[a-z0-9._~-]+(@[a-z0-9_]+)?\.txt"
    ),
    first=NAME,
    verify="qgate baselines verify",
)


class Store:
    """Folder `ROOT/<model>/`; every call reads one whole state, from before or after an update."""

    def __init__(self, root: Path, model: str) -> None:
        if not model:
            raise QgateError("a baseline needs the name of a model.")
        self.model = model
        self.folder = root / safe_name(model)
        self.files = LocalFiles(self.folder, BASELINES)

    def exists(self) -> bool:
        """Tell if there is a manifest, whatever is in it."""
        return NAME in self.files.read(())[1]

    def origin(self) -> Origin | None:
        """Return what the references were made with."""
        manifest = self.manifest()
        return None if manifest is None else manifest.origin

    def bases(self) -> list[str]:
        """List the bases that references are kept in."""
        manifest = self.manifest()
        return [] if manifest is None else sorted(manifest.references)

    def reference(self, basis: str) -> dict[str, ReferenceTensor]:
        """Read the reference tensors of a basis by site, each the one in the manifest."""
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
        """Read the first accepted errors of a mode, stale or not: `Accepted.stale` says which."""
        return self.accepted_of([mode]).get(mode)

    def accepted_on(
        self, mode: str, kind: str, *, refresh: str = "", replaced: bool = False
    ) -> Files:
        """Read the first accepted errors of a mode, and those of a kind of device beside them.

        `refresh` and `replaced` are those of `read_accepted`.
        """
        files = self._read(accepted_file(mode), accepted_file(mode, kind))
        return self._accepted([mode], files, refresh, replaced).get(mode, {})

    def accepted_of(self, modes: Collection[str]) -> dict[str, Accepted]:
        """Read the first accepted errors of those modes that have some, from one moment."""
        files = self._read(*map(accepted_file, modes)) if modes else {}
        return {mode: of[""] for mode, of in self._accepted(modes, files).items() if "" in of}

    def all_accepted(self, modes: Collection[str] | None = None) -> Mapping[str, Files]:
        """Read the accepted errors of all kinds of devices, of some or all modes."""
        files = self._read(f"{FOLDER}/")
        return self._accepted(self._modes(files) if modes is None else modes, files)

    def modes(self) -> list[str]:
        """List the modes that have accepted errors."""
        return self._modes(self._read(f"{FOLDER}/"))

    def _modes(self, files: dict[str, bytes]) -> list[str]:
        return sorted(
            {
                read_accepted(data, str(self.folder / name)).mode
                for name, data in files.items()
                if name.endswith(".txt")
            }
        )

    def manifest(self) -> Manifest | None:
        """Read the manifest, if there is one."""
        return self._manifest(self._read(NAME))

    def commit(self, update: Update, timeout_s: float = LOCK_TIMEOUT_S) -> list[StoredChange]:
        """Write an update whole, or not at all, on top of what is there by then.

        Without a change the lock is not waited for, and nothing is written but what an update that
        was cut off has promised.
        """
        if update.origin.model != self.model:
            raise QgateError(f"an update of {update.origin.model!r} is not one of {self.model!r}.")
        if not self._planned(update, self.files.read)[0]:
            with contextlib.suppress(QgateError, OSError):  # it counts where it is, until next time
                self.files.finish()
            return []
        started = False

        def plan(read: Read) -> tuple[dict[str, bytes | None], list[StoredChange]]:
            nonlocal started
            started = True
            return self._planned(update, read)

        try:
            return self.files.change(plan, timeout_s)
        except OSError as error:
            raise self._failure(error, started) from None

    def tidy(self, timeout_s: float = LOCK_TIMEOUT_S) -> list[str]:
        """Finish updates that were cut off, remove what they left, and say what that was."""
        try:
            return self.files.settle(timeout_s)
        except OSError as error:
            raise self._failure(error, False) from None

    def preview(self, update: Update) -> list[StoredChange]:
        """Return what `commit` would change; nothing is written."""
        return self._planned(update, self.files.read)[1]

    def _failure(self, error: OSError, started: bool) -> QgateError:
        file = f" ({Path(error.filename).name})" if error.filename else ""
        text = f"the baselines in {str(self.folder)!r} could not be written: {error.strerror}{file}"
        if started and self.files.is_promised():
            return QgateError(
                f"{text}. The update is recorded and counts; the next one will move its files into "
                "place."
            )
        return QgateError(f"{text}. They are as they were: make room or the folder writable.")

    def _planned(
        self, update: Update, read_files: Read
    ) -> tuple[dict[str, bytes | None], list[StoredChange]]:
        modes, kind = update.modes(), kind_of(update.origin.device)
        selection = {NAME, *map(reference_file, update.references)}
        if update.everywhere:
            selection.add(f"{FOLDER}/")
        else:
            selection |= {accepted_file(mode, of) for mode in modes for of in ("", kind)}
        files = read_files(selection)[0]
        manifest = self._manifest(files)
        accepted = self._accepted(modes, files, replaced=True)
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

    def _read(self, *names: str) -> dict[str, bytes]:
        return self.files.read(names)[0]

    def _manifest(self, files: dict[str, bytes]) -> Manifest | None:
        if NAME not in files:
            return None
        manifest = read_manifest(files[NAME], str(self.folder / NAME))
        self._check(NAME, "model", manifest.origin.model, self.model)
        return manifest

    def _accepted(
        self,
        modes: Collection[str],
        files: dict[str, bytes],
        refresh: str = "",
        replaced: bool = False,
    ) -> Mapping[str, Files]:
        """Read the accepted errors of modes by mode and kind, of the files that are there."""
        by_mode: dict[str, dict[str, Accepted]] = {}
        kinds = sorted({"", *map(kind_in, files)})
        for mode, kind in ((mode, kind) for mode in modes for kind in kinds):
            file = accepted_file(mode, kind)
            if file in files:
                path = str(self.folder / file)
                accepted = read_accepted(files[file], path, refresh=refresh, replaced=replaced)
                self._check(file, "model", accepted.model, self.model)
                self._check(file, "mode", accepted.mode, mode)
                self._check(file, "kind", accepted.kind or "the first", kind or "the first")
                by_mode.setdefault(mode, {})[kind] = accepted
        return by_mode

    def _check(self, file: str, kind: str, name: str, expected: str) -> None:
        if name != expected:
            raise QgateError(
                f"{str(self.folder / file)!r} is of {kind} {name!r}, and not of {expected!r}: it "
                "was copied or renamed. Delete it, and record it with --update-baselines."
            )


def stored_models(root: Path) -> list[str]:
    """List the models that have a baseline under a root."""
    models = []
    for folder in folders(root):
        files, _ = LocalFiles(folder, BASELINES).read([NAME])
        if NAME in files:
            models.append(read_manifest(files[NAME], str(folder / NAME)).origin.model)
    return models


def folders(root: Path) -> list[Path]:
    """List the folders below a root, whatever is in them; none where there is no root."""
    return [entry for entry in sorted(root.iterdir()) if entry.is_dir()] if root.is_dir() else []
