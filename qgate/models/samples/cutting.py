"""Samples cut from rows of text, from one long text, and from rows of token ids.

What is drawn comes from a generator of its own, and every row is looked at once at most.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.models.samples.request import DataRequest, Tokenizer
from qgate.models.samples.text_files import Rows
from qgate.models.text import language_windows, windows

# Rows that are tokenized in search of long ones, per sample; then shorter ones must do.
_TRIES = 200


@dataclass
class CutSamples:
    """Rows of ids, each (1, tokens), with notes for the reader."""

    ids: list[Tensor]
    notes: list[str] = field(default_factory=list)


def row_beginnings(rows: Rows, tokenizer: Tokenizer, request: DataRequest, name: str) -> CutSamples:
    """Cut the beginning of randomly drawn rows, as a model reads a text: after the BOS.

    Short rows stay short. Rows without text are skipped.
    """
    ids_by_row: dict[int, Tensor] = {}
    empty = 0
    for at in _row_order(len(rows), request):
        text = rows[at]
        ids = None if text is None or not text.strip() else _first_ids(tokenizer, text, request, at)
        if ids is None or not len(ids):
            empty += 1
            continue
        ids_by_row[at] = ids
        if len(ids_by_row) == request.num_samples:
            break
    if not ids_by_row:
        raise QgateError(f"{name}: none of its {len(rows)} rows has any text.")
    cut = CutSamples([ids_by_row[at].unsqueeze(0) for at in sorted(ids_by_row)])
    if empty:
        cut.notes.append(f"{empty} of {empty + len(ids_by_row)} rows read were empty and left out.")
    _note_few(cut, request, f"{name} has no more rows with text")
    short = sum(ids.shape[-1] < request.length for ids in cut.ids)
    if short:
        cut.notes.append(
            f"{short} of {len(cut.ids)} samples are shorter than {request.length} tokens; nothing "
            "was put in the place of what they lack."
        )
    _note_bos(cut, tokenizer)
    return cut


def long_rows(rows: Rows, tokenizer: Tokenizer, request: DataRequest, name: str) -> CutSamples:
    """Cut a random window of each of the first long rows, in an order drawn by the seed.

    Where too few rows are long enough, shorter ones are read whole.
    """
    draw = random.Random(request.seed)
    order = array("q", range(len(rows)))
    draw.shuffle(order)
    long: list[Tensor] = []
    spare: list[Tensor] = []
    tokenized = read = 0
    for at in order:
        if len(long) == request.num_samples or tokenized >= _TRIES * request.num_samples:
            break
        read += 1
        text = rows[at]
        if text is None or not text.strip():
            continue
        # No token is shorter than a byte, so a text of fewer bytes is short without counting.
        short = len(text) * 4 < request.length
        if short and len(spare) >= request.num_samples:
            continue
        ids = _encode(tokenizer, text, at)
        tokenized += 1
        if len(ids) >= request.length:
            start = draw.randrange(len(ids) - request.length + 1)
            long.append(ids[start : start + request.length].clone())
        elif len(ids) and len(spare) < request.num_samples:
            spare.append(ids)
    fill = spare[: request.num_samples - len(long)]
    if not long and not fill:
        raise QgateError(f"{name}: none of its {len(rows)} rows has any text.")
    cut = CutSamples([ids.unsqueeze(0) for ids in [*long, *fill]])
    if fill:
        cut.notes.append(
            f"only {len(long)} of {read} rows read have {request.length} tokens; the other "
            f"{len(fill)} samples are shorter rows, read whole."
        )
    _note_few(cut, request, f"{name} has no more rows with text")
    cut.notes.append(_WINDOWS)
    return cut


_WINDOWS = "samples are windows from inside a text, without any BOS or other special token."


def one_text(text: str, tokenizer: Tokenizer, request: DataRequest, name: str) -> CutSamples:
    """Cut windows of one text that do not overlap, drawn by the seed."""
    cut = _windows_of(_encode(tokenizer, text, 0), request, name)
    cut.notes.append(_WINDOWS)
    return cut


def built_in_windows(tokenizer: Tokenizer, request: DataRequest) -> CutSamples:
    """Cut windows of the built-in language, which has as many as needed."""
    ids = language_windows(
        "evaluation", tokenizer.encode, request.num_samples, request.length, request.seed
    )
    return CutSamples(ids, [_WINDOWS])


def token_rows(rows: Sequence[Tensor], request: DataRequest, name: str) -> CutSamples:
    """Cut one long row into windows, or draw rows at random.

    A row shorter than `seq_len` is no sample; the default length does not refuse any.
    """
    least = request.seq_len if request.seq_len is not None else 0
    if len(rows) == 1 and not least <= len(rows[0]) <= request.length:
        cut = _windows_of(rows[0], request, name)
    else:
        full = [row for row in rows if len(row)]
        drawn_rows = sorted(_row_order(len(full), request)[: request.num_samples])
        cut = CutSamples([full[at][: request.length].unsqueeze(0) for at in drawn_rows])
        if len(full) < len(rows):
            cut.notes.append(f"{len(rows) - len(full)} of {len(rows)} rows are empty and left out.")
        _note_few(cut, request, f"{name} has no more rows")
        short = sum(row.shape[-1] < request.length for row in cut.ids)
        if short:
            cut.notes.append(
                f"{short} of {len(cut.ids)} samples are shorter than {request.length} tokens."
            )
    cut.notes.append("token ids are used as they are in the file, special tokens included.")
    return cut


def _windows_of(ids: Tensor, request: DataRequest, name: str) -> CutSamples:
    room = len(ids) // request.length
    if not room:
        raise QgateError(
            f"{name} has {len(ids)} tokens, fewer than the {request.length} of one sample. Ask for "
            f"--data.seq_len {max(len(ids), 1)} at most, or give more of it."
        )
    count = min(room, request.num_samples)
    cut = CutSamples(
        [window.clone() for window in windows(ids, count, request.length, request.seed)]
    )
    _note_few(
        cut, request, f"{name} has {len(ids)} tokens, {room} windows of {request.length} tokens"
    )
    return cut


def _row_order(count: int, request: DataRequest) -> Sequence[int]:
    """Return all rows in file order if they are few enough, else in an order drawn."""
    order = array("q", range(count))
    if count > request.num_samples:
        random.Random(request.seed).shuffle(order)
    return order


def _first_ids(tokenizer: Tokenizer, text: str, request: DataRequest, at: int) -> Tensor:
    """Return the first ids of a text, without reading all of a very long one.

    A margin keeps what is cut off from changing how the last of them are merged.
    """
    size = 64 * request.length + 4096
    while True:
        ids = _encode(tokenizer, text[:size], at, special=True)
        if size >= len(text) or len(ids) > request.length + 256:
            return ids[: request.length].clone()
        size *= 4


def _encode(tokenizer: Tokenizer, text: str, at: int, *, special: bool = False) -> Tensor:
    try:
        return tokenizer.encode(text, special=special)
    except UnicodeEncodeError as error:
        raise QgateError(
            f"row {at} of the text has half a character at position {error.start} (a lone "
            f"surrogate, {text[error.start]!a}), which is no text; repair the row."
        ) from None


def _note_few(cut: CutSamples, request: DataRequest, why: str) -> None:
    if len(cut.ids) < request.num_samples:
        cut.notes.append(
            f"{len(cut.ids)} samples are used, fewer than the {request.num_samples} asked for: "
            f"{why}."
        )


def _note_bos(cut: CutSamples, tokenizer: Tokenizer) -> None:
    if tokenizer.bos is None:
        cut.notes.append("samples are the beginnings of rows; the tokenizer has no BOS.")
        return
    counts = torch.tensor([int((ids == tokenizer.bos).sum()) for ids in cut.ids])
    leading = sum(int(ids[0, 0]) == tokenizer.bos for ids in cut.ids)
    name = repr(tokenizer.decode([tokenizer.bos])[0])
    if not leading:
        cut.notes.append(
            f"samples are the beginnings of rows, without the BOS {name}: the tokenizer puts none."
        )
        return
    cut.notes.append(f"each sample is the beginning of a row after one BOS, {name}.")
    more = int((counts > 1).sum())
    if more:
        cut.notes.append(f"{more} of {len(cut.ids)} samples have {name} in their text as well.")
