"""One call from a data source to samples, with what they are and what a reader should know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qgate.errors import QgateError
from qgate.models.samples import cutting
from qgate.models.samples.cutting import Cut
from qgate.models.samples.hub import KNOWN, from_hub
from qgate.models.samples.local_copies import read_local
from qgate.models.samples.request import DataRequest, check, parsed
from qgate.models.samples.text_files import check_file, format_of, read_rows
from qgate.models.samples.token_files import read_token_rows
from qgate.models.samples.tokenizing import Tokenizer


@dataclass(frozen=True, eq=False)
class Samples:
    """What a model is given.

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
        """Of all samples together."""
        return sum(ids.shape[-1] for ids in self.ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample: what a model must have positions for."""
        return max(ids.shape[-1] for ids in self.ids)


def read_samples(request: DataRequest, tokenizer: Tokenizer | None) -> Samples:
    """The samples of a request; without a tokenizer only `tokens:FILE` can be read."""
    check(request)
    kind, rest = parsed(request.source)
    if tokenizer is None and kind != "tokens":
        raise QgateError(
            f"data.source {request.source!r} is text, and there is no tokenizer to make token ids "
            "of it. Give ids instead: --data.source tokens:FILE.npy."
        )
    if tokenizer is None or kind == "tokens":
        cut, source = _from_tokens(request, rest)
    elif kind == "builtin":
        cut = cutting.built_in(tokenizer, request)
        source = "the built-in language of qgate"
    elif kind == "custom":
        cut, source = _from_file(request, rest, tokenizer)
    elif kind == "hf":
        cut, source = _from_data_set(request, rest, tokenizer)
    else:
        cut, source = _from_known(request, kind, tokenizer)
    size = f"{len(cut.ids)} samples, {sum(ids.shape[-1] for ids in cut.ids)} tokens"
    decode = None if tokenizer is None else tokenizer.decode
    return Samples(cut.ids, f"{source}; {size}", tuple(cut.notes), decode)


def check_ids(samples: Samples, vocabulary: int, name: str) -> None:
    """Refuse ids that the table of embeddings of a model does not have."""
    for at, ids in enumerate(samples.ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            raise QgateError(
                f"{name} takes token ids from 0 to {vocabulary - 1}, but sample {at} of "
                f"{samples.source} goes from {low} to {high}. Give ids that the tokenizer of this "
                "very model made."
            )


def _from_tokens(request: DataRequest, file: str) -> tuple[Cut, str]:
    path = Path(file).expanduser()
    rows, padding = read_token_rows(path)
    cut = cutting.token_rows(rows, request, repr(str(path)))
    if padding:
        cut.notes.append(f"{padding} negative ids at the end of rows were left out as padding.")
    return cut, f"token ids of {path}"


def _from_file(request: DataRequest, file: str, tokenizer: Tokenizer) -> tuple[Cut, str]:
    path = Path(file).expanduser()
    check_file(path)
    kind = format_of(path, request.format)
    rows = read_rows(path, kind, request.text_column)
    name = repr(str(path))
    if kind == "document":
        return cutting.one_text(str(rows[0]), tokenizer, request, name), str(path)
    return cutting.beginnings(rows, tokenizer, request, name), str(path)


def _from_data_set(request: DataRequest, name: str, tokenizer: Tokenizer) -> tuple[Cut, str]:
    """Rows of any data set, from a local copy where there is one."""
    place = Path(str(request.path if request.path is not None else name)).expanduser()
    if request.path is not None or place.exists():
        _check_there(place)
        rows, source, notes = read_local(place, request)
    else:
        rows, source = from_hub(
            name, request.text_column, subset=request.subset, split=request.split
        )
        notes = []
    cut = _cut_rows(request, rows, tokenizer, repr(source))
    cut.notes[:0] = notes
    return cut, source


def _from_known(request: DataRequest, kind: str, tokenizer: Tokenizer) -> tuple[Cut, str]:
    """A data set with a name: long rows, or one text of all rows together."""
    known = KNOWN[kind]
    notes: list[str] = []
    if request.path is not None:
        place = Path(request.path).expanduser()
        _check_there(place)
        rows, source, notes = read_local(place, request, known)
    else:
        subset = request.subset or known.subset
        split = request.split or known.split
        rows, source = from_hub(
            known.hub, request.text_column, subset=subset, split=split, known=known
        )
    if known.joined or request.format == "document":
        between = "\n" if request.path is not None and _plain(Path(request.path)) else "\n\n"
        text = between.join(row or "" for row in rows)
        cut = cutting.one_text(text, tokenizer, request, kind)
    else:
        cut = cutting.long_rows(rows, tokenizer, request, kind)
    cut.notes[:0] = notes
    return cut, f"{kind}: {source}"


def _cut_rows(
    request: DataRequest, rows: Sequence[str | None], tokenizer: Tokenizer, name: str
) -> Cut:
    if request.format == "document":
        text = "\n\n".join(row or "" for row in rows)
        return cutting.one_text(text, tokenizer, request, name)
    return cutting.beginnings(rows, tokenizer, request, name)


def _plain(path: Path) -> bool:
    """Whether rows are the lines of a text, which are joined as they were split."""
    return path.is_file() and format_of(path) == "text"


def _check_there(place: Path) -> None:
    try:
        there = place.exists()
    except OSError as error:
        raise QgateError(f"data.path {str(place)!r} cannot be read: {error.strerror}.") from None
    if not there:
        raise QgateError(f"data.path {str(place)!r}: there is no such file or folder.")
