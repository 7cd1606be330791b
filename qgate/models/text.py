"""Windows of token ids: cut from given ones, or from as much built-in text as they need."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.models import language

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


# Tokens at the end of a text that more text could change, so they are in no window.
_UNSETTLED = 64


def byte_ids(text: str) -> Tensor:
    """Return one token per byte of the text in UTF-8."""
    import torch

    if not text:
        return torch.empty(0, dtype=torch.long)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def windows(ids: Tensor, samples: int, seqlen: int, seed: int = 0) -> list[Tensor]:
    """Cut `samples` windows of `seqlen` tokens, (1, seqlen) each, that do not overlap.

    They are the first of one shuffled order per seed, so more samples keep those there were.
    """
    check_numbers(samples, seqlen)
    room = len(ids) // seqlen
    if samples > room:
        raise QgateError(
            f"{samples} samples of {seqlen} tokens are more than the text has: it is {len(ids)} "
            f"tokens long, enough for {room} of that length. Ask for fewer or shorter ones, or "
            "give a longer text."
        )
    order = list(range(room))
    random.Random(seed).shuffle(order)
    return [ids[k * seqlen : (k + 1) * seqlen].unsqueeze(0) for k in order[:samples]]


def language_windows(
    part: language.Part,
    encode: Callable[[str], Tensor],
    samples: int,
    seqlen: int,
    seed: int = 0,
) -> list[Tensor]:
    """Cut `samples` windows of `seqlen` tokens, (1, seqlen) each, from the built-in language.

    More samples keep those there were. Another seed gives other text.
    """
    check_numbers(samples, seqlen)
    needed = samples * seqlen
    size = needed + _UNSETTLED
    ids = encode(language.text(part, size, seed))
    while len(ids) < needed + _UNSETTLED:
        size *= 2
        ids = encode(language.text(part, size, seed))
    return [ids[k * seqlen : (k + 1) * seqlen].unsqueeze(0) for k in range(samples)]


def check_numbers(samples: int, seqlen: int) -> None:
    """Refuse a number of samples or a length that is no whole number from 1."""
    for name, number in (("samples", samples), ("seqlen", seqlen)):
        if number < 1:
            raise QgateError(f"{name} {number} is not allowed; it is a whole number from 1.")


def check_vocabulary(ids: Tensor, rows: int, name: str, source: str) -> None:
    """Refuse ids that the table of embeddings of a model does not have."""
    low, high = int(ids.min()), int(ids.max())
    if not 0 <= low <= high < rows:
        raise QgateError(
            f"{name} takes token ids from 0 to {rows - 1}, but {source} from {low} to {high}. Give "
            "ids that the tokenizer of this very model made."
        )
