"""Whether what is on disk is what was recorded, and removing what nothing uses any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qgate.baselines.accepted import FOLDER, accepted_file, inspect_accepted
from qgate.baselines.manifest import NAME, Manifest, read_manifest, read_reference, reference_file
from qgate.baselines.origin import Key
from qgate.baselines.store import Store
from qgate.baselines.update import StoredChange, Update
from qgate.errors import QgateError
from qgate.storage.transactions import EVERYTHING


def verify(store: Store) -> list[str]:
    """Everything that is wrong with a baseline, one sentence each."""
    folder = store.folder
    try:
        files, names = store.files.read(EVERYTHING)
        problems = [
            f"{folder / name}: it is the rest of an update that was cut off, which did not count; "
            "the next update removes it"
            for name in store.files.leftovers()
        ]
    except QgateError as error:
        return [str(error)]
    manifest = None
    if NAME not in files:
        problems.append(f"{folder / NAME}: it is missing, so there is no baseline")
    else:
        try:
            manifest = read_manifest(files[NAME], str(folder / NAME))
        except QgateError as error:
            problems.append(str(error))
    if manifest is not None and manifest.origin.model != store.model:
        problems.append(f"{folder / NAME}: it is of model {manifest.origin.model!r}")
    for name in names:
        if name.startswith(f"{FOLDER}/") and name.endswith(".txt"):
            problems += _accepted_problems(store, name, files[name], manifest)
        elif name != NAME and (manifest is None or name not in _reference_files(manifest)):
            problems.append(f"{folder / name}: it is no file of this baseline")
    return problems + _reference_problems(store, files, manifest)


def _reference_files(manifest: Manifest) -> list[str]:
    return [reference_file(basis) for basis in manifest.references]


def _reference_problems(
    store: Store, files: Mapping[str, bytes], manifest: Manifest | None
) -> list[str]:
    problems = []
    for basis, records in ({} if manifest is None else manifest.references).items():
        file = reference_file(basis)
        shown = str(store.folder / file)
        if file not in files:
            problems.append(f"{shown}: it is missing, and the manifest lists it")
            continue
        try:
            read_reference(files[file], records, shown)
        except QgateError as error:
            problems.append(str(error))
    return problems


def _accepted_problems(
    store: Store, name: str, data: bytes, manifest: Manifest | None
) -> list[str]:
    shown = str(store.folder / name)
    try:
        found, problems = inspect_accepted(data, shown)
    except QgateError as error:
        return [str(error)]
    if found is None:
        return problems
    if accepted_file(found.mode) != name:
        problems.append(f"{shown}: it is of mode {found.mode!r}, whose file has another name")
    if found.model != store.model:
        problems.append(f"{shown}: it is of model {found.model!r}")
    if not problems and found.to_bytes() != data.replace(b"\r\n", b"\n"):
        problems.append(f"{shown}: its lines are not in the order qgate writes them in")
    if manifest is not None:
        problems += [f"{shown}: {sentence}" for sentence in found.stale(manifest.origin)]
    return problems


def unused(
    store: Store, measured: Mapping[str, Collection[tuple[str, str, str]]]
) -> dict[str, list[Key]]:
    """Accepted errors that a complete run of some suites did not come across, by mode.

    `measured` has, for every mode that ran, the (suite, site, scope) of all comparisons. A suite
    that a mode did not run is not looked at.
    """
    found: dict[str, list[Key]] = {}
    held = store.accepted_of(list(measured))
    for mode, places in measured.items():
        accepted = held.get(mode)
        suites = {suite for suite, _, _ in places}
        for key in () if accepted is None else accepted.values:
            if key.suite in suites and (key.suite, key.site, key.scope) not in places:
                found.setdefault(mode, []).append(key)
    return found


def prune(
    store: Store,
    keep_modes: Collection[str],
    keep_keys: Mapping[str, Collection[Key]] | None = None,
) -> list[StoredChange]:
    """Remove the accepted errors of other modes, and of other keys in the modes of `keep_keys`.

    To keep nothing is not what anyone asks for, but what an empty selection looks like.
    """
    origin = store.origin()
    if origin is None:
        raise QgateError(f"there is no baseline of {store.model} in {str(store.folder)!r}.")
    empty = [mode for mode, keys in (keep_keys or {}).items() if not keys]
    if not keep_modes or empty:
        raise QgateError(
            f"pruning would keep nothing{' of ' + ', '.join(empty) if empty else ''}: name what is "
            "used, or delete the folder."
        )
    update = Update(origin)
    for mode, found in store.accepted_of(store.modes()).items():
        kept = (keep_keys or {}).get(mode) if mode in keep_modes else ()
        if kept is None:
            continue
        for key in found.values.keys() - set(kept):
            update.drop(mode, key)
    return store.commit(update)
