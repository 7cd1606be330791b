"""Beginning a dump in a folder: alone, beside other ranks, after an earlier run, or not at all.

Ranks begin at any time and do not wait for each other. The first to come writes `dump.json`, the
others find it and check that it fits. A folder of a rank is made by one process only.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Literal

from qgate.dumps.layout import (
    PROBE,
    About,
    about,
    foreign_in,
    rank_name,
    ranks_in,
    read_about,
    remove_rank,
    write_about,
)
from qgate.errors import QgateError, unknown
from qgate.storage import places
from qgate.storage.folders import Folder, NotRemovedError
from qgate.storage.opening import writable_folder

Existing = Literal["refuse", "append", "overwrite"]
EXISTING: tuple[Existing, ...] = ("refuse", "append", "overwrite")


def check_store(place: places.Place | str) -> None:
    """Reach a store and see that it can be written, by an object that is put and taken away.

    A folder of this machine is looked at when a dump is begun in it.
    """
    folder = writable_folder(place)
    if folder.path is not None:
        return
    try:
        folder.try_writing(f"{PROBE}{uuid.uuid4().hex}")
    except NotRemovedError:
        pass
    except NotADirectoryError:
        raise QgateError(f"{str(folder.place)!r} is a file; a dump is a folder.") from None
    except OSError as error:
        raise QgateError(
            f"no dump can be written to {str(folder.place)!r}: {error.strerror or error}. Choose "
            "another folder."
        ) from None


def begin(
    folder: Folder, rank: int, world_size: int, header: Mapping[str, Any] | None, existing: Existing
) -> About:
    """Make the folder of a rank ready for its writer."""
    if existing not in EXISTING:
        raise unknown("existing", existing, EXISTING)
    wanted = about(world_size, header)
    shown = repr(str(folder.place))
    kind = folder.kind()
    if kind == "file":
        raise QgateError(f"{shown} is a file; a dump is a folder.")
    folder.make()
    found = read_about(folder)
    if found is None:
        _refuse_others_files(folder, existing)
    if existing == "overwrite":
        _remove_earlier(folder, rank, world_size)
        fits = found is not None and (found.world_size, found.header) == (
            wanted.world_size,
            wanted.header,
        )
        found = write_about(folder, wanted, replace=found is not None and not fits)
    elif found is None:
        found = write_about(folder, wanted)
    if existing != "overwrite":
        wanted.check_fits(found, folder, same_run=existing == "refuse")
    if not folder.inside(rank_name(rank)).fresh().begin() and existing == "refuse":
        raise QgateError(
            f"{shown} holds tensors of rank {rank} already: choose another folder, or append to "
            "the dump, or overwrite it. In one run every process needs its own rank."
        )
    return found


def _refuse_others_files(folder: Folder, existing: Existing) -> None:
    if folder.kind() == "nothing":
        return
    foreign, ranks = foreign_in(folder), ranks_in(folder)
    # `dump.json` is written before any rank's folder.
    if not (foreign or ranks) or read_about(folder.fresh()) is not None:
        return
    if foreign or existing != "overwrite":
        names = ", ".join([*foreign, *ranks.values()][:5])
        raise QgateError(
            f"{str(folder.place)!r} is not empty and no dump (it has {names}): choose another "
            "folder."
        )


def _remove_earlier(folder: Folder, rank: int, world_size: int) -> None:
    """What an earlier run left of this rank, and of those that this run does not have.

    The others may have begun by now: each removes its own, and readers leave out those that never
    do, by their `run`.
    """
    for number, name in ranks_in(folder).items():
        if number == rank or number >= world_size:
            remove_rank(folder.inside(name))
