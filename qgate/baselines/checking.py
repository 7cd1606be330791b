"""Problems of the files of a baseline, and accepted errors that no run measures any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qgate.baselines.accepted import FOLDER, Accepted, accepted_file, inspect_accepted, kind_in
from qgate.baselines.kinds import values_for
from qgate.baselines.manifest import (
    NAME,
    Manifest,
    edits_of,
    read_manifest,
    read_reference,
    reference_file,
)
from qgate.baselines.origin import Key, kind_of
from qgate.baselines.store import Store
from qgate.errors import QgateError
from qgate.storage.updates import EVERYTHING


def verify(store: Store) -> list[str]:
    """List everything that is wrong with a baseline, one sentence each."""
    folder = store.folder
    try:
        files = store.files.read(EVERYTHING)[0]
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
            problems += edits_of(files[NAME], str(folder / NAME))
        except QgateError as error:
            problems.append(str(error))
    if manifest is not None and manifest.origin.model != store.model:
        problems.append(f"{folder / NAME}: it is of model {manifest.origin.model!r}")
    references = {} if manifest is None else {reference_file(b): b for b in manifest.references}
    firsts: dict[str, Accepted] = {}
    # The first file of a mode comes before those beside it: a reader of the list knows it then.
    for name in sorted(files, key=lambda name: (kind_in(name) != "", name)):
        if name.startswith(f"{FOLDER}/") and name.endswith(".txt"):
            problems += _accepted_problems(store, name, files[name], manifest, firsts)
        elif name != NAME and name not in references:
            problems.append(f"{folder / name}: it is no file of this baseline")
    return problems + _reference_problems(store, files, manifest)


def _reference_problems(
    store: Store, files: Mapping[str, bytes], manifest: Manifest | None
) -> list[str]:
    problems = []
    for basis, records in ({} if manifest is None else manifest.references).items():
        file = reference_file(basis)
        path = str(store.folder / file)
        if file not in files:
            problems.append(f"{path}: it is missing, and the manifest lists it")
            continue
        try:
            read_reference(files[file], records, path)
        except QgateError as error:
            problems.append(str(error))
    return problems


def _accepted_problems(
    store: Store,
    name: str,
    data: bytes,
    manifest: Manifest | None,
    firsts: dict[str, Accepted],
) -> list[str]:
    """List what is wrong with a file; `firsts` are the first files of modes so far."""
    file = str(store.folder / name)
    try:
        accepted, problems = inspect_accepted(data, file)
    except QgateError as error:
        return [str(error)]
    if accepted is None:
        return problems
    if accepted_file(accepted.mode, accepted.kind) != name:
        of = f"mode {accepted.mode!r}{accepted.where}"
        problems.append(f"{file}: it is of {of}, whose file has another name")
    elif not accepted.kind:
        firsts[accepted.mode] = accepted
    elif (first := firsts.get(accepted.mode)) and kind_of(first.device) == accepted.kind:
        problems.append(
            f"{file} is not read: {first.file} has the values of {accepted.kind}. Remove {file}"
        )
    if accepted.model != store.model:
        problems.append(f"{file}: it is of model {accepted.model!r}")
    if not problems and data.replace(b"\r\n", b"\n") != accepted.to_bytes():
        problems.append(f"{file}: its lines are not in the order qgate writes them in")
    if manifest is not None:
        problems += [f"{file}: {sentence}" for sentence in accepted.stale(manifest.origin)]
    return problems


def unheld(
    store: Store, measured: Mapping[str, Collection[tuple[str, str, str]]]
) -> dict[str, list[str]]:
    """List suites with accepted errors that no comparison of a run was about, by mode.

    `measured` is that of `unused`; here suites that a mode did not run are looked at, too.
    """
    suites_of: dict[str, list[str]] = {}
    for mode, files in store.all_accepted(list(measured)).items():
        sites = measured[mode]
        keys = values_for(files.values())
        suites = {key.suite for key in keys if (key.suite, key.site, key.scope) not in sites}
        if suites:
            suites_of[mode] = sorted(suites)
    return suites_of


def unused(
    store: Store, measured: Mapping[str, Collection[tuple[str, str, str]]]
) -> dict[str, list[Key]]:
    """List accepted errors that a complete run of some suites did not measure, by mode.

    `measured` has, for every mode that ran, the (suite, site, scope) of all comparisons. A suite
    that a mode did not run is not looked at.
    """
    keys_of: dict[str, list[Key]] = {}
    for mode, files in store.all_accepted(list(measured)).items():
        sites = measured[mode]
        suites = {suite for suite, _, _ in sites}
        for key in values_for(files.values()):
            if key.suite in suites and (key.suite, key.site, key.scope) not in sites:
                keys_of.setdefault(mode, []).append(key)
    return keys_of
