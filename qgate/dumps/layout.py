"""What a dump's folder looks like: the names of its files, and `dump.json`, which says what it is.

  dump.json                              version, settings, number of ranks
  rank00000/index.jsonl                  a record per line, and when writing began and ended
  rank00000/index-000000.jsonl           the same in parts, as a store of objects has it
  rank00000/tensors-000000.safetensors   values and counts

Names of tensors and modules are in the index only: no file is called after one.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from qgate._version import __version__
from qgate.dumps.records import plain
from qgate.errors import QgateError
from qgate.storage.folders import Folder

KIND = "dump"
# 2: hashes are XXH3 instead of SHA-256, and the index of a rank may be in parts.
VERSION = 2
MOST_RANKS = 1_000_000
ABOUT = "dump.json"
INDEX = "index.jsonl"
RUN = "run"
"""The setting that tells runs apart: the same on all ranks of one, another on the next."""
SESSION = "session"
"""Settings of the session that began the dump; one that appends to it may have others."""

PROBE = ".qgate-probe-"
"""What a name begins with that is put into a store to see whether it can be written."""
SHARD = re.compile(r"tensors-([0-9]{6,})\.safetensors")
_UNFINISHED = re.compile(r"\.tensors-[0-9]{6,}\.safetensors\.part")
_INDEX_PART = re.compile(r"index-([0-9]{6,})\.jsonl")
_RANK = re.compile(r"rank([0-9]{5,})")
_OURS = re.compile(
    rf"{re.escape(ABOUT)}|\.{re.escape(ABOUT)}\..*|{re.escape(PROBE)}.*|{_RANK.pattern}"
)


def rank_name(rank: int) -> str:
    return f"rank{rank:05d}"


def shard_name(number: int) -> str:
    return f"tensors-{number:06d}.safetensors"


def unfinished_name(shard: str) -> str:
    """What a shard is called while it is being written."""
    return f".{shard}.part"


def index_part_name(number: int) -> str:
    return f"index-{number:06d}.jsonl"


def ranks_in(folder: Folder) -> dict[int, str]:
    """The names of the folders of ranks, by rank."""
    found = [
        (_RANK.fullmatch(name), name) for name, is_folder in folder.names().items() if is_folder
    ]
    listed = {int(match[1]): name for match, name in found if match}
    return {rank: listed[rank] for rank in sorted(listed)}


def shards_in(home: Folder) -> dict[int, str]:
    """The names of the finished shards of one rank, by number."""
    return _numbered(SHARD, home)


def index_parts_in(home: Folder) -> dict[int, str]:
    """The names of the parts of an index, by number."""
    return _numbered(_INDEX_PART, home)


def _numbered(pattern: re.Pattern[str], home: Folder) -> dict[int, str]:
    found = [(pattern.fullmatch(name), name) for name in home.names()]
    listed = {int(match[1]): name for match, name in found if match}
    return {number: listed[number] for number in sorted(listed)}


def unfinished_in(home: Folder) -> list[str]:
    """Shards that are being written, or were when their writer ended."""
    return [name for name in home.names() if _UNFINISHED.fullmatch(name)]


def foreign_in(folder: Folder) -> list[str]:
    """What lies in a folder and is no part of a dump."""
    return [name for name in folder.names() if not _OURS.fullmatch(name)]


def remove_rank(home: Folder) -> None:
    """Remove what a dump has put into the folder of a rank, and nothing else."""
    with contextlib.suppress(FileNotFoundError):  # another rank may be at it too
        parts, shards = index_parts_in(home).values(), shards_in(home).values()
        home.remove(INDEX, *parts, *shards, *unfinished_in(home))
    home.remove_empty()


# dump.json -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class About:
    """What `dump.json` says; the header is the settings of whoever collected."""

    world_size: int
    header: dict[str, Any]
    made_qgate: str = __version__
    created: str = ""

    @property
    def run(self) -> str:
        return str(self.header.get(RUN, ""))

    def to_text(self) -> str:
        record = {
            "qgate": KIND,
            "version": VERSION,
            "made_qgate": self.made_qgate,
            "created": self.created or datetime.now(UTC).isoformat(timespec="seconds"),
            "world_size": self.world_size,
            "header": self.header,
        }
        return json.dumps(record, indent=1, allow_nan=False) + "\n"

    def check_fits(self, other: About, folder: Folder, *, same_run: bool) -> None:
        """That another rank, or a later session, writes into the dump of the same settings."""
        where = f"{str(folder.place)!r} is a dump with other settings"
        if self.world_size != other.world_size:
            raise QgateError(
                f"{where}: of {other.world_size} ranks, not {self.world_size}. {_WAYS_OUT}"
            )
        for name in sorted(self.header.keys() | other.header.keys()):
            mine, found = self.header.get(name), other.header.get(name)
            if mine != found and (same_run or name not in (RUN, SESSION)):
                raise QgateError(f"{where}: its {name} is {found!r}, not {mine!r}. {_WAYS_OUT}")


_WAYS_OUT = "Choose another folder, or overwrite it."


def about(world_size: int, header: Mapping[str, Any] | None) -> About:
    return About(world_size, plain(dict(header or {})))


def read_about(folder: Folder) -> About | None:
    """What the folder is a dump of; None where there is no `dump.json`."""
    path = folder.at(ABOUT)
    try:
        record = json.loads(folder.read(ABOUT).decode())
        kind, version = record["qgate"], record["version"]
        if kind != KIND or type(version) is not int:
            raise ValueError("it is no description of a dump")
        if version > VERSION:
            made = record.get("made_qgate") or "of its time"
            raise QgateError(
                f"{str(path)!r} is of version {version}, and this qgate reads versions up to "
                f"{VERSION}: read it with qgate {made} or newer."
            )
        found = About(
            record["world_size"], record["header"], record["made_qgate"], record["created"]
        )
        size = found.world_size
        if (
            type(size) is not int
            or not 0 <= size <= MOST_RANKS
            or not isinstance(found.header, dict)
        ):
            raise ValueError(f"world_size is no number up to {MOST_RANKS}, or header no object")
        return found
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise QgateError(
            f"{str(path)!r} cannot be used: {why}. If the folder is a dump, restore that file; "
            "its tensors are whole and can be read as safetensors."
        ) from None


def write_about(folder: Folder, made: About, *, replace: bool = False) -> About:
    """Write `dump.json` if nobody has yet, or in place of another; what is there afterwards."""
    with contextlib.suppress(FileExistsError):
        if replace or ABOUT not in folder.names():
            folder.put(ABOUT, made.to_text().encode(), new=not replace)
    found = read_about(folder.fresh())
    if found is None:
        raise QgateError(f"{str(folder.at(ABOUT))!r} was removed while the dump was begun.")
    return found
