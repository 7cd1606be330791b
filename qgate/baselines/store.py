"""The baseline of one model: read by anyone, changed by `commit` only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.baselines._reading import check_version
from qgate.baselines.accepted import (
    FOLDER,
    VERSION,
    VERSION_WITH_KIND,
    Accepted,
    accepted_file,
    kind_in,
    migrated,
    read_accepted,
    version_of,
)
from qgate.baselines.kinds import Files
from qgate.baselines.manifest import (
    NAME,
    Manifest,
    read_manifest,
    read_reference,
    reference_file,
    with_digest,
)
from qgate.baselines.manifest import VERSION as MANIFEST_VERSION
from qgate.baselines.names import safe_name
from qgate.baselines.origin import Origin, kind_of
from qgate.baselines.rows import ReferenceTensor
from qgate.baselines.update import StoredChange, Update, applied
from qgate.errors import QgateError, unknown
from qgate.storage import access
from qgate.storage.access import folders_in, open_files
from qgate.storage.updates import EVERYTHING, FileRules, Read
from qgate.text import counted

if TYPE_CHECKING:
    from qgate.storage.locations import Location

LOCK_TIMEOUT_S = 60.0
BASELINES = FileRules(
    plural="baselines",
    singular="baseline",
    files=re.compile(
        r"manifest\.json|reference-[a-z0-9_]+\.safetensors|accepted/[a-z0-9._~-]+(@[a-z0-9_]+)?\.txt"
    ),
    first=NAME,
    check_version=check_version,
    verify="qgate baselines verify",
    migrate="qgate baselines migrate --baselines {} --model {}",
)


class Store:
    """Folder `ROOT/<model>/`; every call reads one whole state, from before or after an update.

    The root is a path, or the `location_of` a URL.
    """

    def __init__(self, root: Location, model: str) -> None:
        if not model:
            raise QgateError("a baseline needs the name of a model.")
        self.model = model
        self.folder: Location = root / safe_name(model)
        self.files = open_files(self.folder, BASELINES, model)

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
        if modes is None:
            files = self._read(f"{FOLDER}/")
            return self._accepted(self._modes(files), files)
        # Where nothing can be listed, as with HTTP, only the first ones are known.
        files, names = self.files.read([accepted_file(mode) for mode in modes])
        if kinds := {*map(kind_in, names)} - {""}:
            files |= self._read(*(accepted_file(mode, kind) for mode in modes for kind in kinds))
        return self._accepted(modes, files)

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

    def migrate(self) -> tuple[int, list[str]]:
        """Give files in a bucket its layout, and files of earlier versions this one.

        Returns how many files changed their layout, and a sentence for each that was written anew.
        """
        try:
            count = self.files.migrate()
            if not self._migrated(self.files.read)[0]:
                return count, []
            return count, self.files.change(self._migrated, LOCK_TIMEOUT_S)
        except OSError as error:
            raise self._failure(error, False) from None

    def _migrated(self, read: Read) -> tuple[dict[str, bytes | None], list[str]]:
        """Return files of earlier versions in this one, and what happens to each."""
        contents: dict[str, bytes | None] = {}
        sentences = []
        files = read({NAME, f"{FOLDER}/"}, None)[0]
        head = files.pop(NAME, None)
        if head and (written := with_digest(head, str(self.folder / NAME))):
            contents[NAME] = written
            sentences.append(f"{NAME}: version 1 -> {MANIFEST_VERSION}")
        for name, data in sorted(files.items()):
            version = version_of(data)
            is_current = version in (VERSION, VERSION_WITH_KIND)
            if version is None or is_current or not BASELINES.files.fullmatch(name):
                continue
            accepted, other = migrated(data, str(self.folder / name))
            contents[name] = accepted.to_bytes() if accepted.values else None
            sentences.append(f"{name}: version {version} -> {VERSION}")
            if other:
                sentences[-1] += (
                    f", without {counted(len(other), 'entry')} that meant something else in "
                    f"version {version}, such as {other[0]}: record them with --update-baselines"
                )
        return contents, sentences

    def copy_to(self, root: Location) -> tuple[int, list[str]]:
        """Write all files below another root, in its layout; return as `migrate` does."""
        other = Store(root, self.model)
        files = self._read(*EVERYTHING)
        renewed, sentences = self._migrated(self.files.read)
        contents: dict[str, bytes | None] = {
            name: data for name, data in files.items() if BASELINES.files.fullmatch(name)
        }
        contents |= renewed

        def plan(read: Read) -> tuple[dict[str, bytes | None], tuple[int, list[str]]]:
            if read((), None)[1]:
                raise QgateError(
                    f"there is a baseline of {self.model} in {str(other.folder)!r} already: choose "
                    "another place, or remove it."
                )
            return contents, (len(contents), sentences)

        try:
            return other.files.change(plan, LOCK_TIMEOUT_S)
        except OSError as error:
            raise other._failure(error, False) from None

    def preview(self, update: Update) -> list[StoredChange]:
        """Return what `commit` would change; nothing is written."""
        return self._planned(update, self.files.read)[1]

    def _failure(self, error: OSError, started: bool) -> QgateError:
        file = f" ({Path(error.filename).name})" if error.filename else ""
        text = f"the baselines in {str(self.folder)!r} could not be written: {error.strerror}{file}"
        try:
            promised = started and self.files.is_promised()
        except Exception:
            return QgateError(
                f"{text}. Whether the update counts could not be asked: look with "
                "`qgate baselines list`, or run it again."
            )
        if promised:
            return QgateError(
                f"{text}. The update is recorded and counts; the next one will move its files into "
                "place."
            )
        return QgateError(f"{text}. They are as they were: {self.files.remedy}.")

    def _planned(
        self, update: Update, read_files: Read
    ) -> tuple[dict[str, bytes | None], list[StoredChange]]:
        modes, kind = update.modes(), kind_of(update.origin.device)
        files, names = read_files(
            {NAME, *map(accepted_file, modes), *(accepted_file(mode, kind) for mode in modes)}, None
        )
        if update.everywhere:
            beside = {accepted_file(mode, kind_in(name)) for mode in modes for name in names}
            files |= read_files(beside, None)[0]
        files |= read_files({reference_file(basis) for basis in update.references}, [])[0]
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


def stored_models(root: Location) -> list[str]:
    """List the models that have a baseline under a root."""
    models = []
    for folder in folders(root):
        files, _ = open_files(folder, BASELINES, folder.name).read([NAME])
        if NAME in files:
            models.append(read_manifest(files[NAME], str(folder / NAME)).origin.model)
    return models


def folders(root: Location) -> list[Location]:
    return folders_in(root, BASELINES.plural)


def check_root(root: Location, writing: bool) -> None:
    """Reach a store before anything is computed; for an update, see that one could be written."""
    access.check_root(root, BASELINES.plural, writing)
