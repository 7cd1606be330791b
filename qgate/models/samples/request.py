"""Requests for samples, the sources they can name, and the tokenizer that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qgate.errors import QgateError, unknown
from qgate.models.text import byte_ids

if TYPE_CHECKING:
    from torch import Tensor

# How the forms with a colon are written, and what they read.
SOURCES = {
    "builtin": "the held-out text of this package",
    "pile": "the validation part of the Pile (mit-han-lab/pile-val-backup)",
    "wikitext2": "the training part of WikiText-2 (Salesforce/wikitext)",
    "c4": "the first English training file of C4 (allenai/c4)",
    "redpajama": "RedPajama (togethercomputer/RedPajama-Data-1T-Sample)",
    "custom:FILE": "a file: a row of text per line, JSON, JSON lines, CSV or Parquet",
    "hf:NAME": "a data set of the Hugging Face hub, or a local folder of one",
    "tokens:FILE.npy": "rows of token ids, in .npy, .pt or .safetensors",
}
FORMATS = {
    "text": "one sample per line",
    "document": "the whole file is one text, which is cut in windows",
    "json": "a JSON array of texts or objects",
    "jsonl": "one JSON text or object per line",
    "csv": "a table with a header",
    "parquet": "a table",
}


@dataclass(frozen=True)
class DataRequest:
    """The text that a model is given, and how much of it.

    seq_len      tokens of a sample; not given: 512 for the built-in text, 1024 for any other, and
                 not more than `most`, if that is given
    seed         draws the rows and windows, from a generator of its own
    path         a local copy, file or folder, of a data set that has a name
    format       one of FORMATS; not given: by the ending of the file
    text_column  the field of JSON, CSV, Parquet and data sets that has the text
    subset, split  which part of a data set; not given: validation, else test, else train
    """

    source: str = "builtin"
    num_samples: int = 64
    seq_len: int | None = None
    seed: int = 0
    path: str | Path | None = None
    format: str | None = None
    text_column: str = "text"
    subset: str | None = None
    split: str | None = None
    most: int | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens of a full sample."""
        if self.seq_len is not None:
            return self.seq_len
        usual = 512 if parse_source(self.source)[0] == "builtin" else 1024
        return usual if self.most is None else min(usual, self.most)


def parse_source(source: str) -> tuple[str, str]:
    """Return the kind of a source and what follows its colon."""
    text = str(source).strip()
    kind, colon, location = text.partition(":")
    kind, location = kind.strip().lower(), location.strip()
    forms = {name.partition(":")[0]: ":" in name for name in SOURCES}
    if kind not in forms or forms[kind] != bool(colon):
        own = f" A file of yours is custom:{text}." if _looks_like_a_file(text) else ""
        error = unknown("data source", source, SOURCES)
        raise QgateError(f"{error}{own}")
    if colon and not location:
        form = next(name for name in SOURCES if name.startswith(f"{kind}:"))
        raise QgateError(f"data source {source!r} names nothing after the colon; write {form}.")
    return kind, location


def check(request: DataRequest) -> None:
    """Refuse a request that no source could answer."""
    kind, _ = parse_source(request.source)
    for name, value, low in (
        ("num_samples", request.num_samples, 1),
        ("seq_len", request.length, 1),
        ("seed", request.seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise QgateError(
                f"data.{name} {value!r} is not allowed; it is a whole number from {low}."
            )
    if request.format is not None and request.format not in FORMATS:
        raise unknown("data.custom.format", request.format, FORMATS)
    if request.path is not None and kind in ("builtin", "custom", "tokens"):
        raise QgateError(
            f"data.path {str(request.path)!r} is a local copy of pile, wikitext2, c4, redpajama or "
            f"hf:NAME, but data.source is {request.source!r}. For a file of your own, give "
            "--data.source custom:FILE."
        )
    for name, part in (("subset", request.subset), ("split", request.split)):
        if part is not None and kind in ("builtin", "custom", "tokens"):
            raise QgateError(
                f"data.{name} {part!r} has no meaning for data.source {request.source!r}; it is "
                "for data sets: pile, wikitext2, c4, redpajama, hf:NAME."
            )


def _looks_like_a_file(text: str) -> bool:
    try:
        return bool(text) and (Path(text).suffix != "" or Path(text).exists())
    except (OSError, ValueError):
        return False


class Tokenizer(Protocol):
    """A tokenizer, such as `qgate.models.huggingface.tokenizer` returns."""

    @property
    def bos(self) -> int | None:
        """Return the id of the token that begins a text, if there is one."""

    def encode(self, text: str, *, special: bool = False) -> Tensor:
        """Return one row of ids; `special` adds the tokens that a model expects around a text.

        Among that is the BOS, exactly once, where the tokenizer has one.
        """

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""


class ByteTokenizer:
    """A tokenizer of one token per byte, as the tiny models read text."""

    bos: int | None = None

    def encode(self, text: str, *, special: bool = False) -> Tensor:  # noqa: ARG002
        return byte_ids(text)

    def decode(self, ids: Sequence[int]) -> list[str]:
        return [chr(k) if 32 <= k < 127 or k == 10 else f"\\x{k:02x}" for k in map(int, ids)]
