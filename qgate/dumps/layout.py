"""Names of the files in a dump's folder, and `dump.json`, its manifest.

  dump.json                              version, settings, number of ranks
  rank00000/index.jsonl                  a record per line, and when writing began and ended
  rank00000/index-000000.jsonl           the same in parts, as a store of objects has it
  rank00000/tensors-000000.safetensors   values and counts

Names of tensors and modules are in the index only: no file is called after one.

Ranks begin a dump at any time and do not wait for each other. The first to come writes `dump.json`,
the others find it and check that it fits. A folder of a rank is made by one process only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict, get_args

from qgate._version import __version__
from qgate.errors import QgateError, unknown
from qgate.records import Meta, validate
from qgate.records.plain_data import plain
from qgate.storage import locations
from qgate.storage.access import writable_folder
from qgate.storage.folders import Folder, NotRemovedError

KIND = "dump"
# 2: hashes are XXH3 instead of SHA-256, and the index of a rank may be in parts.
VERSION = 2
MOST_RANKS = 1_000_000
MANIFEST = "dump.json"
_DIGEST = "digest"
INDEX = "index.jsonl"
RUN = "run"
"""The setting that tells runs apart: the same on all ranks of one, another on the next."""
SESSION = "session"
"""Settings of the session that began the dump; one that appends to it may have others."""
Existing = Literal["refuse", "append", "overwrite"]

PROBE = ".qgate-probe-"
"""Start of the name of an object that proves that a store can be written to."""
SHARD = re.compile(r"tensors-([0-9]{6,})\.safetensors")
_UNFINISHED = re.compile(r"\.tensors-[0-9]{6,}\.safetensors\.part")
_INDEX_PART = re.compile(r"index-([0-9]{6,})\.jsonl")
_RANK = re.compile(r"rank([0-9]{5,})")
_OURS = re.compile(
    rf"{re.escape(MANIFEST)}|\.{re.escape(MANIFEST)}\..*|{re.escape(PROBE)}.*|{_RANK.pattern}"
)
_WAYS_OUT = "Choose another folder, or overwrite it."


def rank_name(rank: int) -> str:
    return f"rank{rank:05d}"


def shard_name(number: int) -> str:
    return f"tensors-{number:06d}.safetensors"


def unfinished_name(shard: str) -> str:
    """Name a shard while it is being written."""
    return f".{shard}.part"


def index_part_name(number: int) -> str:
    return f"index-{number:06d}.jsonl"


def _numbered(pattern: re.Pattern[str], names: Iterable[str]) -> dict[int, str]:
    matches = filter(None, map(pattern.fullmatch, names))
    return dict(sorted((int(match[1]), match[0]) for match in matches))


def ranks_in(folder: Folder) -> dict[int, str]:
    """Return the names of the folders of ranks, by rank."""
    return _numbered(_RANK, (n for n, is_folder in folder.names().items() if is_folder))


def shards_in(home: Folder) -> dict[int, str]:
    """Return the names of the finished shards of one rank, by number."""
    return _numbered(SHARD, home.names())


def index_parts_in(home: Folder) -> dict[int, str]:
    """Return the names of the parts of an index, by number."""
    return _numbered(_INDEX_PART, home.names())


def unfinished_in(home: Folder) -> list[str]:
    """List the shards that are being written, or were when their writer ended."""
    return [name for name in home.names() if _UNFINISHED.fullmatch(name)]


def remove_ranks(folder: Folder, world_size: int = 0, rank: int = -1) -> None:
    """Remove the files of a dump in folders of ranks: of `rank`, and from `world_size` on."""
    for number, name in ranks_in(folder).items():
        if number != rank and number < world_size:
            continue
        home = folder.inside(name)
        with contextlib.suppress(FileNotFoundError):  # another rank may be at it too
            parts, shards = index_parts_in(home).values(), shards_in(home).values()
            files = INDEX, *parts, *shards, *unfinished_in(home)
            folder.remove(*(f"{name}/{file}" for file in files))
        home.remove_empty()


# dump.json -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DumpManifest:
    """Content of `dump.json`; the header holds the settings of the collector.

    is_edited   its digest is not that of the rest, so that somebody changed the file
    """

    world_size: int
    header: dict[str, object]
    made_qgate: str = __version__
    created: str = ""
    is_edited: bool = False

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
        return json.dumps({**record, _DIGEST: _digest_of(record)}, indent=1, allow_nan=False) + "\n"

    def check_fits(self, other: DumpManifest, folder: Folder, *, same_run: bool) -> None:
        """Refuse another rank, or a later session, that writes into a dump of other settings."""
        clash = f"{str(folder.location)!r} is a dump with other settings"
        if self.world_size != other.world_size:
            raise QgateError(
                f"{clash}: of {other.world_size} ranks, not {self.world_size}. {_WAYS_OUT}"
            )
        for name in sorted(self.header.keys() | other.header.keys()):
            ours, theirs = self.header.get(name), other.header.get(name)
            if ours != theirs and (same_run or name not in (RUN, SESSION)):
                raise QgateError(f"{clash}: its {name} is {theirs!r}, not {ours!r}. {_WAYS_OUT}")


def _digest_of(record: Mapping[str, object]) -> str:
    """Hash a manifest without its digest."""
    rest = {name: value for name, value in record.items() if name != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


class _ManifestFile(TypedDict):
    """Content of `dump.json` beside its kind and version."""

    world_size: Annotated[int, Meta(ge=0, le=MOST_RANKS)]
    header: dict[str, object]
    made_qgate: str
    created: str


def read_manifest(folder: Folder) -> DumpManifest | None:
    """Read `dump.json`; None where there is none."""
    path = folder.at(MANIFEST)
    try:
        record = json.loads(folder.read(MANIFEST).decode())
        kind, version = record["qgate"], record["version"]
        if kind != KIND or type(version) is not int:
            raise ValueError("it is no description of a dump")
        if version != VERSION:
            raise QgateError(
                f"{str(path)!r} is of version {version}, and this qgate reads version {VERSION}: "
                f"read it with qgate {record.get('made_qgate') or 'of its time'}, or collect again."
            )
        validate(record, _ManifestFile)
        is_edited = record.get(_DIGEST) != _digest_of(record)
        fields = {name: record[name] for name in _ManifestFile.__annotations__}
        return DumpManifest(**fields, is_edited=is_edited)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise QgateError(
            f"{str(path)!r} cannot be used: {why}. If the folder is a dump, restore that file; "
            "its tensors are whole and can be read as safetensors."
        ) from None


# Beginning -------------------------------------------------------------------------------------


def check_store(path: locations.Location | str) -> None:
    """Refuse a place that cannot be written to; in a store an object is put and removed."""
    folder = writable_folder(path)
    try:
        folder.try_writing(f"{PROBE}{uuid.uuid4().hex}")
    except NotRemovedError:
        pass
    except NotADirectoryError:
        raise QgateError(f"{str(folder.location)!r} is a file; a dump is a folder.") from None
    except OSError as error:
        raise QgateError(
            f"no dump can be written to {str(folder.location)!r}: {error.strerror or error}. "
            "Choose another folder."
        ) from None


def begin(
    folder: Folder, rank: int, world_size: int, header: Mapping[str, Any] | None, existing: Existing
) -> DumpManifest:
    """Prepare the folder of a rank for its writer, and return the dump's manifest.

    The dump may be new, of other ranks of this run, or of an earlier run; `existing` decides.
    """
    if existing not in get_args(Existing):
        raise unknown("existing", existing, get_args(Existing))
    manifest = DumpManifest(world_size, plain(dict(header or {})))
    name = repr(str(folder.location))
    if folder.kind() == "file":
        raise QgateError(f"{name} is a file; a dump is a folder.")
    folder.make()
    earlier = read_manifest(folder)
    if earlier is None:
        _refuse_foreign_files(folder, existing)
    if existing == "overwrite":
        # The other ranks may have begun by now: each removes its own, and readers leave out those
        # that never do, by their `run`.
        remove_ranks(folder, world_size, rank)
        fits = earlier and (earlier.world_size, earlier.header) == (world_size, manifest.header)
        earlier = _write_manifest(folder, manifest, replace=fits is False)
    else:
        earlier = earlier or _write_manifest(folder, manifest)
        manifest.check_fits(earlier, folder, same_run=existing == "refuse")
    if not folder.inside(rank_name(rank)).fresh().begin() and existing == "refuse":
        raise QgateError(
            f"{name} holds tensors of rank {rank} already: choose another folder, or append to "
            "the dump, or overwrite it. In one run every process needs its own rank."
        )
    return earlier


def _refuse_foreign_files(folder: Folder, existing: Existing) -> None:
    if folder.kind() == "nothing":
        return
    foreign = [name for name in folder.names() if not _OURS.fullmatch(name)]
    ranks = ranks_in(folder)
    # `dump.json` is written before any rank's folder.
    if not (foreign or ranks) or read_manifest(folder.fresh()) is not None:
        return
    if foreign or existing != "overwrite":
        names = ", ".join([*foreign, *ranks.values()][:5])
        raise QgateError(
            f"{str(folder.location)!r} is not empty and no dump (it has {names}): choose another "
            "folder."
        )


def _write_manifest(
    folder: Folder, manifest: DumpManifest, *, replace: bool = False
) -> DumpManifest:
    """Write `dump.json` if there is none, or replace it; return what it says then."""
    with contextlib.suppress(FileExistsError):
        if replace or MANIFEST not in folder.names():
            folder.put(MANIFEST, manifest.to_text().encode(), new=not replace)
    written = read_manifest(folder.fresh())
    if written is None:
        raise QgateError(f"{str(folder.at(MANIFEST))!r} was removed while the dump was begun.")
    return written
