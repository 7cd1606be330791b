"""What a dump's folder looks like: the names of its files, and `dump.json`, which says what it is.

  dump.json                              version, settings, number of ranks
  rank00000/index.jsonl                  a record per line, and when writing began and ended
  rank00000/tensors-000000.safetensors   values and counts

Names of tensors and modules are in the index only: no file is called after one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qgate._version import __version__
from qgate.dumps.records import plain
from qgate.errors import QgateError
from qgate.files import replacing

KIND = "dump"
VERSION = 1
ABOUT = "dump.json"
INDEX = "index.jsonl"
RUN = "run"
SESSION = "session"
"""Settings of the session that began the dump; one that appends to it may have others."""
"""The setting that tells runs apart: the same on all ranks of one, another on the next."""

SHARD = re.compile(r"tensors-([0-9]{6,})\.safetensors")
_UNFINISHED = re.compile(r"\.tensors-[0-9]{6,}\.safetensors\.part")
_RANK = re.compile(r"rank([0-9]{5,})")


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:05d}"


def shard_name(number: int) -> str:
    return f"tensors-{number:06d}.safetensors"


def unfinished_name(shard: str) -> str:
    """What a shard is called while it is being written."""
    return f".{shard}.part"


def ranks_in(folder: Path) -> dict[int, Path]:
    """The folders of ranks, by rank."""
    found = [(_RANK.fullmatch(path.name), path) for path in folder.iterdir()]
    listed = {int(match[1]): path for match, path in found if match and path.is_dir()}
    return {rank: listed[rank] for rank in sorted(listed)}


def shards_in(folder: Path) -> dict[int, Path]:
    """The finished shards of one rank, by number."""
    found = [(SHARD.fullmatch(path.name), path) for path in folder.iterdir()]
    listed = {int(match[1]): path for match, path in found if match}
    return {number: listed[number] for number in sorted(listed)}


def unfinished_in(folder: Path) -> list[Path]:
    """Shards that are being written, or were when their writer ended."""
    return sorted(path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name))


def foreign_in(folder: Path) -> list[str]:
    """What lies in a folder and is no part of a dump."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    known = re.compile(rf"{re.escape(ABOUT)}|\.{re.escape(ABOUT)}\..*|{_RANK.pattern}")
    return [name for name in names if not known.fullmatch(name)]


def remove_rank(folder: Path) -> None:
    """Remove what a dump has put into the folder of a rank, and nothing else."""
    with contextlib.suppress(FileNotFoundError):  # another rank may be at it too
        for path in (folder / INDEX, *shards_in(folder).values(), *unfinished_in(folder)):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


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

    def check_fits(self, other: About, folder: Path, *, same_run: bool) -> None:
        """That another rank, or a later session, writes into the dump of the same settings."""
        where = f"{str(folder)!r} is a dump with other settings"
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


def read_about(folder: Path) -> About | None:
    """What the folder is a dump of; None where there is no `dump.json`."""
    path = folder / ABOUT
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        kind, version = record["qgate"], record["version"]
        if kind != KIND or type(version) is not int:
            raise ValueError("it is no description of a dump")
        if version > VERSION:
            raise QgateError(
                f"{str(path)!r} is of version {version}, and this qgate reads version {VERSION}: "
                "update qgate."
            )
        found = About(
            record["world_size"], record["header"], record["made_qgate"], record["created"]
        )
        if type(found.world_size) is not int or not isinstance(found.header, dict):
            raise ValueError("world_size is no number, or header no object")
        return found
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise QgateError(
            f"{str(path)!r} cannot be used: {why}. If the folder is a dump, restore that file; "
            "its tensors are whole and can be read as safetensors."
        ) from None


def write_about(folder: Path, made: About, *, replace: bool = False) -> About:
    """Write `dump.json` if nobody has yet, or in place of another; what is there afterwards."""
    path = folder / ABOUT
    if replace:
        with replacing(path) as neighbor:
            neighbor.write_text(made.to_text(), encoding="utf-8")
    elif not path.exists():
        with _neighbor(path, made.to_text()) as neighbor:
            try:
                os.link(neighbor, path)
            except FileExistsError:
                pass
            except OSError:  # a file system without links: all ranks write the same
                neighbor.replace(path)
    found = read_about(folder)
    if found is None:
        raise QgateError(f"{str(path)!r} was removed while the dump was begun.")
    return found


@contextlib.contextmanager
def _neighbor(path: Path, text: str) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    written = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        written.chmod(0o666 & ~mask)
        yield written
    finally:
        written.unlink(missing_ok=True)
