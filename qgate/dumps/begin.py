"""Beginning a dump in a folder: alone, beside other ranks, after an earlier run, or not at all.

Ranks begin at any time and do not wait for each other. The first to come writes `dump.json`, the
others find it and check that it fits. A folder of a rank is made by one process only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from qgate.dumps.layout import (
    About,
    about,
    foreign_in,
    rank_folder,
    ranks_in,
    read_about,
    remove_rank,
    write_about,
)
from qgate.errors import QgateError, unknown

Existing = Literal["refuse", "append", "overwrite"]
EXISTING: tuple[Existing, ...] = ("refuse", "append", "overwrite")


def begin(
    folder: Path, rank: int, world_size: int, header: Mapping[str, Any] | None, existing: Existing
) -> About:
    """Make the folder of a rank ready for its writer."""
    if existing not in EXISTING:
        raise unknown("existing", existing, EXISTING)
    wanted = about(world_size, header)
    if folder.exists() and not folder.is_dir():
        raise QgateError(f"{str(folder)!r} is a file; a dump is a folder.")
    folder.mkdir(parents=True, exist_ok=True)
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
    home = rank_folder(folder, rank)
    try:
        home.mkdir()
    except FileExistsError:
        if existing == "refuse":
            raise QgateError(
                f"{str(folder)!r} holds tensors of rank {rank} already: choose another folder, or "
                "append to the dump, or overwrite it. In one run every process needs its own rank."
            ) from None
    return found


def _refuse_others_files(folder: Path, existing: Existing) -> None:
    foreign, ranks = foreign_in(folder), ranks_in(folder)
    if not (foreign or ranks) or read_about(folder) is not None:  # written before any rank's folder
        return
    if foreign or existing != "overwrite":
        names = ", ".join([*foreign, *(path.name for path in ranks.values())][:5])
        raise QgateError(
            f"{str(folder)!r} is not empty and no dump (it has {names}): choose another folder."
        )


def _remove_earlier(folder: Path, rank: int, world_size: int) -> None:
    """What an earlier run left of this rank, and of those that this run does not have.

    The others may have begun by now: each removes its own, and readers leave out those that never
    do, by their `run`.
    """
    for number, home in ranks_in(folder).items():
        if number == rank or number >= world_size:
            remove_rank(home)
