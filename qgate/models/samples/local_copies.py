"""A local copy of a data set: a file, a folder of files, or what the datasets library saved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qgate.errors import QgateError
from qgate.models.samples.hub import SPLITS, NamedDataset, from_disk
from qgate.models.samples.request import DataRequest
from qgate.models.samples.text_files import Rows, format_of, is_known, read_rows

# Text in memory from one folder: the first files of a large one are plenty for statistics.
_MOST_BYTES = 2**28
_NO_DATA = re.compile(
    r"^(dataset_infos?|dataset_dict|state|config|metadata|croissant|readme|license)\b", re.I
)


def read_local(
    place: Path, request: DataRequest, known: NamedDataset | None = None
) -> tuple[Rows, str, list[str]]:
    """Rows, what was read, and what a reader should know.

    A subset is a folder of that name, a split is a part of the names of files or folders. A known
    data set has its own usual ones.
    """
    splits = (*([known.split] if known is not None else ()), *SPLITS)
    if not place.is_dir():
        kind = format_of(place, request.format)
        return read_rows(place, kind, request.text_column), str(place), []
    if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
        column, where = from_disk(place, request.text_column, request.split, splits)
        return column, where, []
    root = _subset(place, request.subset, None if known is None else known.subset)
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file()
        and is_known(file)
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
        and not _NO_DATA.match(file.name)
    )
    if not files:
        raise QgateError(
            f"the folder {str(root)!r} has no file to read: .parquet, .jsonl, .json, .csv or .txt."
        )
    chosen = _split(root, files, request.split, splits)
    chosen = _one_format(root, chosen, request.format)
    folders = {file.parent for file in chosen}
    if len(folders) > 1 and request.subset is None:
        names = ", ".join(sorted(str(folder.relative_to(root)) for folder in folders)[:20])
        raise QgateError(
            f"the folder {str(root)!r} has files in {names}, which may be different data sets. "
            "Name one with --data.subset, or give its folder."
        )
    return _together(root, chosen, request)


def _together(root: Path, files: list[Path], request: DataRequest) -> tuple[Rows, str, list[str]]:
    rows: list[Rows] = []
    size = 0
    for file in files:
        rows.append(read_rows(file, format_of(file, request.format), request.text_column))
        size += file.stat().st_size
        if size > _MOST_BYTES:
            break
    names = ", ".join(str(file.relative_to(root)) for file in files[: min(len(rows), 3)])
    more = f" and {len(rows) - 3} more files" if len(rows) > 3 else ""
    left = len(files) - len(rows)
    notes = [f"{left} of {len(files)} files in {str(root)!r} were not read."] if left else []
    together = rows[0] if len(rows) == 1 else [row for part in rows for row in part]
    return together, f"{root} ({names}{more})", notes


def _subset(place: Path, asked: str | None, usual: str | None) -> Path:
    if asked is None:
        return place / usual if usual is not None and (place / usual).is_dir() else place
    if not (place / asked).is_dir() or ".." in Path(asked).parts:
        there = sorted(child.name for child in place.iterdir() if child.is_dir())
        raise QgateError(
            f"the folder {str(place)!r} has no subset {asked!r}; its folders are "
            f"{', '.join(there) or 'none'}."
        )
    return place / asked


def _split(root: Path, files: list[Path], asked: str | None, usual: Sequence[str]) -> list[Path]:
    """The files of a split; where none was asked for and no name tells one, all of them."""
    for name in [asked] if asked is not None else usual:
        inside = re.compile(rf"(^|[^A-Za-z0-9]){re.escape(name)}([^A-Za-z0-9]|$)")
        found = [file for file in files if inside.search(str(file.relative_to(root)))]
        if found:
            return found
    if asked is None:
        return files
    raise QgateError(
        f"no file in {str(root)!r} is named after the split {asked!r}; there are "
        f"{', '.join(str(file.relative_to(root)) for file in files[:20])}."
    )


def _one_format(root: Path, files: list[Path], given: str | None) -> list[Path]:
    formats = {format_of(file) for file in files}
    if len(formats) > 1 and given is None:
        formats -= {"text"}
    if len(formats) > 1 and given is None:
        raise QgateError(
            f"the folder {str(root)!r} has files of several formats: {', '.join(sorted(formats))}. "
            "Say which with --data.custom.format."
        )
    wanted = {"text"} if given == "document" else {given} if given is not None else formats
    found = [file for file in files if format_of(file) in wanted]
    if not found:
        raise QgateError(
            f"the folder {str(root)!r} has no file of the format {given!r}, only of "
            f"{', '.join(sorted(formats))}."
        )
    return found
