"""Reading of samples: from a data source to token ids, with notes for the reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qgate.errors import QgateError
from qgate.models.samples import cutting
from qgate.models.samples.cutting import CutSamples
from qgate.models.samples.hub import NAMED_DATASETS, SPLITS, NamedDataset, from_disk, from_hub
from qgate.models.samples.request import DataRequest, Tokenizer, check, parse_source
from qgate.models.samples.text_files import Rows, check_file, format_of, has_known_ending, read_rows
from qgate.models.samples.token_files import read_token_rows
from qgate.models.text import check_vocabulary


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a model.

    ids     one tensor (1, tokens) of int64 per sample, of different lengths, without any padding
    source  what was used, in words
    notes   what a reader should know of it: sentences
    decode  token ids to the text of each; None where only ids are known
    """

    ids: list[Tensor]
    source: str
    notes: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], list[str]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Count the tokens of all samples together."""
        return sum(ids.shape[-1] for ids in self.ids)

    @property
    def longest(self) -> int:
        """Count the tokens of the longest sample, which a model must have positions for."""
        return max(ids.shape[-1] for ids in self.ids)


def read_samples(request: DataRequest, tokenizer: Tokenizer | None) -> Samples:
    """Read the samples of a request; without a tokenizer only `tokens:FILE` can be read."""
    check(request)
    kind, location = parse_source(request.source)
    if tokenizer is None and kind != "tokens":
        raise QgateError(
            f"data.source {request.source!r} is text, and there is no tokenizer to make token ids "
            "of it. Give ids instead: --data.source tokens:FILE.npy."
        )
    if tokenizer is None or kind == "tokens":
        cut, source = _from_tokens(request, location)
    elif kind == "builtin":
        cut = cutting.built_in_windows(tokenizer, request)
        source = "the built-in language of qgate"
    elif kind == "custom":
        cut, source = _from_file(request, location, tokenizer)
    else:
        cut, source = _from_data_set(request, kind, location, tokenizer)
    size = f"{len(cut.ids)} samples, {sum(ids.shape[-1] for ids in cut.ids)} tokens"
    decode = None if tokenizer is None else tokenizer.decode
    return Samples(cut.ids, f"{source}; {size}", tuple(cut.notes), decode)


def check_ids(samples: Samples, vocabulary: int, name: str) -> None:
    """Refuse ids that the table of embeddings of a model does not have."""
    for at, ids in enumerate(samples.ids):
        check_vocabulary(ids, vocabulary, name, f"sample {at} of {samples.source} goes")


def _from_tokens(request: DataRequest, file: str) -> tuple[CutSamples, str]:
    path = Path(file).expanduser()
    rows, padding = read_token_rows(path)
    cut = cutting.token_rows(rows, request, repr(str(path)))
    if padding:
        cut.notes.append(f"{padding} negative ids at the end of rows were left out as padding.")
    return cut, f"token ids of {path}"


def _from_file(request: DataRequest, file: str, tokenizer: Tokenizer) -> tuple[CutSamples, str]:
    path = Path(file).expanduser()
    check_file(path)
    kind = format_of(path, request.format)
    rows = read_rows(path, kind, request.text_column)
    name = repr(str(path))
    if kind == "document":
        return cutting.one_text(str(rows[0]), tokenizer, request, name), str(path)
    return cutting.row_beginnings(rows, tokenizer, request, name), str(path)


def _from_data_set(
    request: DataRequest, kind: str, location: str, tokenizer: Tokenizer
) -> tuple[CutSamples, str]:
    """Read a data set, any or one with a name, from a local copy where there is one."""
    named = NAMED_DATASETS.get(kind)
    given = request.path if request.path is not None or named is not None else location
    path = None if given is None else Path(given).expanduser()
    notes: list[str] = []
    if path is not None and (request.path is not None or path.exists()):
        rows, source, notes = read_local(path, request, named)
    elif named is None:
        rows, source = from_hub(
            location, request.text_column, subset=request.subset, split=request.split
        )
    else:
        subset, split = request.subset or named.subset, request.split or named.split
        rows, source = from_hub(
            named.hub, request.text_column, subset=subset, split=split, named=named
        )
    label = repr(source) if named is None else kind
    if request.format == "document" or (named is not None and named.joined):
        # The lines of a text file are joined as they were split.
        is_file = path is not None and path.is_file() and has_known_ending(path)
        is_text = path is not None and is_file and format_of(path) == "text"
        text = ("\n" if is_text else "\n\n").join(row or "" for row in rows)
        cut = cutting.one_text(text, tokenizer, request, label)
    elif named is None:
        cut = cutting.row_beginnings(rows, tokenizer, request, label)
    else:
        cut = cutting.long_rows(rows, tokenizer, request, label)
    cut.notes[:0] = notes
    return cut, source if named is None else f"{kind}: {source}"


# Text in memory from one folder: the first files of a large one are plenty for statistics.
_MOST_BYTES = 2**28
_NO_DATA = re.compile(
    r"^(dataset_infos?|dataset_dict|state|config|metadata|croissant|readme|license)\b", re.I
)


def read_local(
    path: Path, request: DataRequest, named: NamedDataset | None = None
) -> tuple[Rows, str, list[str]]:
    """Return the rows of a local copy, its name, and notes for the reader.

    A subset is a folder of that name, a split is a part of the names of files or folders. A
    named data set has its own defaults.
    """
    try:
        exists = path.exists()
    except OSError as error:
        raise QgateError(f"data.path {str(path)!r} cannot be read: {error.strerror}.") from None
    if not exists:
        raise QgateError(f"data.path {str(path)!r}: there is no such file or folder.")
    splits = (*([named.split] if named is not None else ()), *SPLITS)
    if not path.is_dir():
        kind = format_of(path, request.format)
        return read_rows(path, kind, request.text_column), str(path), []
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        column, where = from_disk(path, request.text_column, request.split, splits)
        return column, where, []
    root = _subset(path, request.subset, None if named is None else named.subset)
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file()
        and has_known_ending(file)
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
    return _read_files(root, chosen, request)


def _read_files(root: Path, files: list[Path], request: DataRequest) -> tuple[Rows, str, list[str]]:
    rows: list[Rows] = []
    size = 0
    for file in files:
        rows.append(read_rows(file, format_of(file, request.format), request.text_column))
        size += file.stat().st_size
        if size > _MOST_BYTES:
            break
    names = ", ".join(str(file.relative_to(root)) for file in files[: min(len(rows), 3)])
    more = f" and {len(rows) - 3} more files" if len(rows) > 3 else ""
    unread = len(files) - len(rows)
    notes = [f"{unread} of {len(files)} files in {str(root)!r} were not read."] if unread else []
    joined = rows[0] if len(rows) == 1 else [row for part in rows for row in part]
    return joined, f"{root} ({names}{more})", notes


def _subset(folder: Path, subset: str | None, usual: str | None) -> Path:
    if subset is None:
        return folder / usual if usual is not None and (folder / usual).is_dir() else folder
    if not (folder / subset).is_dir() or ".." in Path(subset).parts:
        folders = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise QgateError(
            f"the folder {str(folder)!r} has no subset {subset!r}; its folders are "
            f"{', '.join(folders) or 'none'}."
        )
    return folder / subset


def _split(root: Path, files: list[Path], split: str | None, usual: Sequence[str]) -> list[Path]:
    """Return the files of a split; all files where none was asked for and no name tells one."""
    for name in [split] if split is not None else usual:
        inside = re.compile(rf"(^|[^A-Za-z0-9]){re.escape(name)}([^A-Za-z0-9]|$)")
        matches = [file for file in files if inside.search(str(file.relative_to(root)))]
        if matches:
            return matches
    if split is None:
        return files
    raise QgateError(
        f"no file in {str(root)!r} is named after the split {split!r}; there are "
        f"{', '.join(str(file.relative_to(root)) for file in files[:20])}."
    )


def _one_format(root: Path, files: list[Path], format_name: str | None) -> list[Path]:
    formats = {format_of(file) for file in files}
    if len(formats) > 1 and format_name is None:
        formats -= {"text"}
    if len(formats) > 1 and format_name is None:
        raise QgateError(
            f"the folder {str(root)!r} has files of several formats: {', '.join(sorted(formats))}. "
            "Say which with --data.custom.format."
        )
    chosen = "text" if format_name == "document" else format_name
    allowed = formats if chosen is None else {chosen}
    matches = [file for file in files if format_of(file) in allowed]
    if not matches:
        raise QgateError(
            f"the folder {str(root)!r} has no file of the format {format_name!r}, only of "
            f"{', '.join(sorted(formats))}."
        )
    return matches
