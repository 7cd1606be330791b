"""Ways to compute the same tokens: alone, beside others, padded, cut, in chunks, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.models import Model
from qgate.models.long_texts import reads_ids_alone
from qgate.models.rows import MASK, map_tensors, row_count, token_ids
from qgate.relations.caches import NO_CACHE, CachedRequest, TextCalls
from qgate.relations.record import LEFT
from qgate.relations.recording import Pass, Span

TOKENS = 133
"""Tokens of a row: beyond a tile of 128, and the size of no usual dimension."""
ROWS = 3
"""Rows of different text; one more shares its beginning with the first."""
TILES = (16, 32, 64, 128)
_CHUNKS = (16, 17, 48, 64)
_STEPS, _NEAR = 24, 3
_NO_MASK = "the model takes no attention_mask: where padding is cannot be said"
_NO_POSITIONS = "later tokens change earlier outputs, and positions are the model's own"
_PADDING = 29
_NO_ORDER = "later tokens change earlier outputs: no prefix stands for itself"
_NO_TOKENS = "the samples are no token ids"
_TOO_SHORT = "a sample has {} tokens: too few to cut"


@dataclass(frozen=True)
class Way:
    """One way to compute tokens that were recorded: its relation, words, and calls."""

    relation: str
    words: str
    calls: Callable[[], Iterator[Pass]]


@dataclass(frozen=True)
class WholeRows:
    """Rows that are computed at once, which every way is compared with."""

    sample: Any
    rows: int
    tokens: int

    @property
    def whole(self) -> Pass:
        """Return the call that computes all of them."""
        spans = tuple(Span(row, 0, row, 0, self.tokens) for row in range(self.rows))
        return Pass(self.sample, self.rows, self.tokens, spans)

    def first(self, _tokens: int) -> Pass:
        """Return the call that computes the first tokens of all of them."""
        return self.whole

    def some(self, rows: Sequence[int], sample: Any = None) -> Pass:
        """Return the call that computes some rows in an order; None is a row not looked at."""
        index = torch.tensor(list(rows))
        if sample is None:
            sample = map_tensors(
                self.sample,
                lambda x: x.index_select(0, index.to(x.device)) if len(x) == self.rows else x,
            )
        spans = tuple(Span(at, 0, row, 0, self.tokens) for at, row in enumerate(rows))
        return Pass(sample, len(rows), self.tokens, spans)


@dataclass(frozen=True)
class TextRows(WholeRows):
    """Rows of token ids of one length; the last begins with the first `shared` of row 0."""

    shared: int = 0
    spare: Tensor | None = None

    def first(self, tokens: int) -> Pass:
        tokens = min(tokens, self.tokens)
        spans = tuple(Span(row, 0, row, 0, tokens) for row in range(self.rows))
        return Pass(self.sample[:, :tokens], self.rows, tokens, spans)


def rows_of(model: Model) -> WholeRows:
    """Cut the rows of a model's samples that all ways compute."""
    listed = [token_ids(sample) for sample in model.inputs]
    if any(ids is None for ids in listed) or not reads_ids_alone(model):
        return _joined(model)
    text = torch.cat([ids.reshape(-1) for ids in listed if ids is not None])
    longest = max(ids.shape[1] for ids in listed if ids is not None)
    tokens = min(TOKENS, longest)
    # Rows of one text begin at other places of it, where there is too little for rows of their own.
    starts = [(row * tokens) % max(1, len(text) - tokens + 1) for row in range(ROWS)]
    starts = starts if len({*starts}) == ROWS else [0] * ROWS
    cut = torch.stack([text[start : start + tokens].roll(7 * k) for k, start in enumerate(starts)])
    shared = tokens // 2 + 1
    joint = torch.cat([cut[0, :shared], cut[1, shared:]])
    generator = torch.Generator().manual_seed(0)
    spare = text[torch.randint(len(text), (4, tokens), generator=generator)]
    return TextRows(torch.cat([cut, joint[None]]), ROWS + 1, tokens, shared, spare)


def _joined(model: Model) -> WholeRows:
    """Put the first samples of one shape side by side; of others the first stands alone."""
    first = model.inputs[0]
    alike = [sample for sample in model.inputs[:ROWS] if _shapes(sample) == _shapes(first)]
    if row_count(first) > 1 or len(alike) < 2:
        return WholeRows(first, row_count(first), 1)
    parts: list[list[Tensor]] = []
    for sample in alike:
        tensors: list[Tensor] = []
        map_tensors(sample, lambda x, tensors=tensors: tensors.append(x) or x)  # type: ignore[misc]
        parts.append(tensors)
    columns = iter(zip(*parts, strict=True))
    joined = map_tensors(first, lambda _x: torch.cat(next(columns)))
    return WholeRows(joined, row_count(joined), 1)


def _shapes(sample: Any) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    map_tensors(sample, lambda x: shapes.append(tuple(x.shape)) or x)  # type: ignore[func-returns-value]
    return shapes


def ways_of(
    model: Model, rows: WholeRows, is_causal: bool, left_out: dict[str, str]
) -> Iterator[Way]:
    """List the ways to compute the rows; those that a model cannot be asked are noted."""
    if rows.rows > 1:
        yield from _of_rows(rows)
    else:
        left_out["alone, others, permuted"] = "the samples have one row and other shapes"
    if not isinstance(rows, TextRows):
        left_out["padded, prefix, chunked, stepwise"] = _NO_TOKENS
        return
    calls = TextCalls.of(model)
    yield Way("others", "beside 4 rows of other text", lambda: _beside(rows))
    if rows.tokens < 2:
        left_out["padded, prefix, chunked, stepwise"] = _TOO_SHORT.format(rows.tokens)
        return
    if is_causal or calls.has_mask:
        padded = _padded if is_causal else _padded_whole
        words = "with padding behind it"
        yield Way("padded right", words, lambda: padded(rows, calls, is_left=False))
    else:
        left_out["padded right"] = _NO_MASK
    if not is_causal:
        left_out[LEFT] = _NO_POSITIONS
    elif calls.has_mask:
        yield Way(LEFT, "with padding before it", lambda: _padded(rows, calls, is_left=True))
    else:
        left_out[LEFT] = _NO_MASK
    if not is_causal:
        left_out["prefix, chunked, stepwise"] = _NO_ORDER
        return
    for length in _lengths(rows.tokens):
        yield prefix(rows, length)
    if calls.keeps_cache:
        yield from _with_cache(rows, calls)
    else:
        left_out["chunked, stepwise, warm prefix, reused cache"] = NO_CACHE


def _of_rows(rows: WholeRows) -> Iterator[Way]:
    count = rows.rows
    for row in range(count):
        yield Way("alone", f"as row {row} alone", lambda row=row: iter([rows.some([row])]))  # type: ignore[misc]
    pair = [count - 1, 0]
    yield Way("others", "beside one other row", lambda: iter([rows.some(pair)]))
    many = [row % count for row in range(2 * count + 1)]
    yield Way("others", f"in a batch of {len(many)}", lambda: iter([rows.some(many)]))
    order = [*range(1, count), 0]
    yield Way("permuted", "with rows in another order", lambda: iter([rows.some(order)]))
    back = list(reversed(range(count)))
    yield Way("permuted", "with rows in reverse order", lambda: iter([rows.some(back)]))


def _beside(rows: TextRows) -> Iterator[Pass]:
    assert rows.spare is not None
    sample = torch.cat([rows.spare[:2], rows.sample[:2], rows.spare[2:]])
    spans = tuple(Span(2 + row, 0, row, 0, rows.tokens) for row in range(2))
    yield Pass(sample, len(sample), rows.tokens, spans)


def _lengths(tokens: int) -> list[int]:
    near = {1, tokens - 1, *(tile + step for tile in TILES for step in (-1, 0, 1))}
    return sorted(length for length in near if 0 < length < tokens)


def prefix(rows: TextRows, length: int) -> Way:
    """Return the way to compute the first tokens of all rows without those behind them."""
    words = f"as the first {length} of its tokens"
    return Way("prefix", words, lambda: iter([rows.first(length)]))


def _padded_whole(rows: TextRows, calls: TextCalls, *, is_left: bool) -> Iterator[Pass]:  # noqa: ARG001
    """Put padding behind whole rows: a part of one stands for itself only if later tokens do not.

    Positions are left to the model, which may count them from another number than zero.
    """
    assert rows.spare is not None
    padding = rows.spare[: rows.rows, : max(1, min(_PADDING, rows.tokens))]
    ids = torch.cat([rows.sample, padding], 1)
    mask = torch.ones_like(ids)
    mask[:, rows.tokens :] = 0
    spans = tuple(Span(row, 0, row, 0, rows.tokens) for row in range(rows.rows))
    yield Pass({calls.names[0]: ids, MASK: mask}, rows.rows, ids.shape[1], spans)


def _padded(rows: TextRows, calls: TextCalls, *, is_left: bool) -> Iterator[Pass]:
    """Pad rows of several lengths with other text to the longest one."""
    assert rows.spare is not None
    tokens = rows.tokens
    lengths = [tokens, max(1, tokens - 5), max(1, tokens // 2 + 1), max(1, tokens // 8)]
    ids = rows.spare[: len(lengths)].clone()
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    spans = []
    for row, length in enumerate(lengths[: rows.rows]):
        start = tokens - length if is_left else 0
        ids[row, start : start + length] = rows.sample[row, :length]
        mask[row, start : start + length] = True
        spans.append(Span(row, start, row, 0, length))
    yield Pass(calls.padded(ids, mask), len(ids), tokens, tuple(spans))


# With a cache -------------------------------------------------------------------------------------


def _with_cache(rows: TextRows, calls: TextCalls) -> Iterator[Way]:
    every = list(range(rows.rows))
    for size in _CHUNKS:
        if size < rows.tokens:
            borders = range(0, rows.tokens, size)
            words = f"in chunks of {size} tokens"
            yield Way("chunked", words, pieces(rows, calls, every, borders))
    odd = [0, 1, 31, 33, 64, 127]
    odd = [start for start in odd if start < rows.tokens]
    yield Way("chunked", f"in chunks from tokens {odd}", pieces(rows, calls, every, odd))
    steps = [start for start in range(rows.tokens) if _is_stepped(start)]
    yield Way("stepwise", "token by token", pieces(rows, calls, every, steps))
    half = rows.tokens // 2 + 1
    later = [0, *range(half, min(half + _STEPS, rows.tokens))]
    words = f"token by token after a prefill of {half}"
    yield Way("stepwise", words, pieces(rows, calls, [0], later))
    yield Way("warm prefix", "behind a prefix computed once", lambda: _warm(rows, calls))
    yield Way("reused cache", "in turn with another request", lambda: _in_turn(rows, calls))


def _is_stepped(start: int) -> bool:
    """Tell if a token is a call of its own: the first ones, and those about borders of tiles."""
    return start < _STEPS or any(-_NEAR <= start - tile <= _NEAR for tile in TILES)


def pieces(
    rows: TextRows,
    calls: TextCalls,
    listed: Sequence[int],
    starts: Sequence[int],
    stop: int | None = None,
) -> Callable[[], Iterator[Pass]]:
    """Cut rows into pieces that begin at `starts`, each called with the cache of those before.

    The last piece ends at `stop`, or with the rows.
    """

    def passes() -> Iterator[Pass]:
        request = CachedRequest(calls)
        ends = [*list(starts)[1:], rows.tokens if stop is None else stop]
        for start, end in zip(starts, ends, strict=True):
            yield from _piece(request, rows, listed, start, end)

    return passes


def _piece(
    request: CachedRequest, rows: TextRows, listed: Sequence[int], start: int, end: int
) -> Iterator[Pass]:
    ids = rows.sample[list(listed), start:end]
    spans = tuple(Span(at, 0, row, start, end - start) for at, row in enumerate(listed))
    with request.watch():
        yield Pass(request.sample(ids), len(listed), end - start, spans)


def _warm(rows: TextRows, calls: TextCalls) -> Iterator[Pass]:
    """Compute a prefix that two rows share once, and each of them behind a copy of its cache."""
    prefix = CachedRequest(calls)
    yield from _piece(prefix, rows, [0], 0, rows.shared)
    for row in (rows.rows - 1, 0):
        yield from _piece(prefix.fork(), rows, [row], rows.shared, rows.tokens)


def _in_turn(rows: TextRows, calls: TextCalls) -> Iterator[Pass]:
    """Compute two requests piece by piece in turn, and a third one when both are done."""
    step = max(1, rows.tokens // 4)
    starts = range(0, rows.tokens, step)
    requests = [CachedRequest(calls), CachedRequest(calls)]
    for start in starts:
        end = min(start + step, rows.tokens)
        for row, request in enumerate(requests):
            yield from _piece(request, rows, [row], start, end)
    yield from _piece(CachedRequest(calls), rows, [2], 0, rows.tokens)
