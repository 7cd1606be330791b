"""Texts that are longer than any sample, decoded with a cache and read in one pass.

One pass over the long text is recorded. Behind prefills of several lengths, up to the context that
the model declares, tokens are decoded one by one; so is a batch of padded rows. A model without a
cache reads beginnings of the text instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.models import Model, Site
from qgate.models.long_texts import LONG
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.models.rows import token_ids
from qgate.relations.caches import CachedRequest, TextCalls
from qgate.relations.compute import ModelRelations
from qgate.relations.generating import generated_calls, generates
from qgate.relations.record import DECODED, LEFT, REPEAT, RelationReport
from qgate.relations.recording import Pass, Recording, Span, record
from qgate.relations.ways import TextRows, Way, pieces, prefix

_MOST_BYTES = 2**29
"""Bytes of tensors of the long text that are kept to compare with."""
_STEPS, _MANY_STEPS, _TILE = 3, 16, 64
_OF_STATES = _TILE + 5
"""Tokens for a mode of states, which rounds them after each token and takes seconds for many."""
_OTHERS = 16
_FEW, _PADDED, _PADDING = 33, 24, 7
_LONG_PADDED = 133
_ROWS, _OF_ROW = 9, 12
"""Rows of a batch that decodes together, and the tokens of its prefill."""
_PROMPT, _CHUNK = 17, 33
_BETWEEN = (200, 700)
"""Lengths of beginnings of the text: between those of samples, tiles and the text itself."""
_SHARED_SCALES = "the mode has scales of a whole call, which tell requests and lengths apart"
_NO_TEXT = "the samples are no token ids, or later tokens change earlier outputs"
_CHUNKED = "chunked"
_OF_TEXT = frozenset({"others", "prefix", DECODED, _CHUNKED})
_OF_ROWS = frozenset({"alone", "padded right"})
_PADDED_WAYS = frozenset({"padded right", LEFT})


def check_briefly(relations: ModelRelations, text: Tensor | None) -> RelationReport:
    """Compare the few ways that every run compares: a long text, or a row beside others.

    Scales of a whole call are no failure where a mode declares them, or declares nothing.
    """
    mode = relations.quantized.mode
    relations.may_share_scales = mode.own and not (mode.stands_for or mode.meant)
    if not (mode.causal and (mode.meant is None or mode.meant.causal)):
        relations.report.left_out["others, decoded, prefix"] = _SHARED_SCALES
        return relations.check(frozenset({REPEAT}))
    if text is None or not relations.is_causal:
        return relations.check(_OF_ROWS)
    along = DecodingRelations(relations, text)
    report = along.check(_OF_TEXT)
    relations.noise = along.noise
    calls = TextCalls.of(relations.base)
    # A model with a cache decodes behind padding.
    if calls.has_mask and not calls.keeps_cache and not relations.leaves_out_left():
        report.add(relations.check(_PADDED_WAYS))
    return report


def check_all(
    relations: ModelRelations, text: Tensor | None, chosen: frozenset[str]
) -> RelationReport:
    """Compare the ways of the relations asked for, those along a long text at last."""
    report, short = relations.report, chosen - {DECODED}
    if DECODED not in chosen:
        return relations.check(short)
    if text is None or not relations.is_causal:
        report.left_out[DECODED] = _NO_TEXT
        return relations.check(short)
    if short:
        relations.check(short)
    report.add(DecodingRelations(relations, text).check(frozenset({DECODED})))
    return report


class DecodingRelations(ModelRelations):
    """Relations of a model in a mode along a long text of token ids.

    What a mode of attention gives for a whole text it decodes token by token. There a prefill with
    a cache is recorded, and the beginning of the text is read without one.
    """

    is_long = True

    def __init__(self, relations: ModelRelations, text: Tensor) -> None:
        quantized, base = relations.quantized, relations.base
        if quantized.mode.states is not None:
            text = text[:, :_OF_STATES]
        super().__init__(quantized, base, bitwise=relations.bitwise, rows=_rows_of(text))
        self._noise = relations._noise
        self.may_share_scales = relations.may_share_scales
        self._calls = TextCalls.of(self.model)
        self._decodes = quantized.mode.attention is not None and self._calls.keeps_cache
        self.excuses_reference = relations.excuses_reference and not self._decodes
        self.sites = self._sites_that_fit()

    def _record(self) -> Recording:
        try:
            return self._record_rows()
        except LENGTH_REFUSALS as error:
            longest = max(
                ids.shape[1] for x in self.base.inputs if (ids := token_ids(x)) is not None
            )
            if longest >= self.rows.tokens:
                raise
            cause = type(error.__cause__ or error).__name__
            self.report.left_out[f"a text of {self.rows.tokens} tokens"] = f"refused: {cause}"
            assert isinstance(self.rows, TextRows)
            self.rows = _rows_of(torch.cat([self.rows.sample, _spare_of(self.rows)])[:, :longest])
            return self._record_rows()

    def _record_rows(self) -> Recording:
        rows = self.rows
        spans = (Span(0, 0, 0, 0, rows.tokens),)
        whole = Pass(self._sample(rows.sample), rows.rows, rows.tokens, spans)
        return record(self.model, self.sites, whole, is_long=True)

    def _sample(self, ids: Tensor) -> Any:
        """Return the sample of what is called one pass over a text."""
        return CachedRequest(self._calls).sample(ids) if self._decodes else ids

    def _ways(self) -> Iterator[Way]:
        _ = self.recording  # of fewer tokens, where a model refuses so many
        rows, calls = self.rows, self._calls
        assert isinstance(rows, TextRows)
        few, borders = min(_FEW, rows.tokens), _borders(rows.tokens)
        yield self._beside_others(few)
        yield from self._beginnings([few, *_BETWEEN])
        if not calls.keeps_cache:
            for border in borders:
                yield prefix(rows, border + 1)
            return
        last = [rows.tokens - 1] if rows.tokens < LONG else []
        for first in sorted({1, *(border - 1 for border in borders), *last}):
            stop = min(first + (_MANY_STEPS if first == 1 else _STEPS), rows.tokens)
            words = f"token by token behind a prefill of {first}"
            starts = [0, *range(first, stop)]
            yield Way(DECODED, words, pieces(rows, calls, [0], starts, stop))
        if rows.tokens > _PROMPT + _CHUNK:
            yield self._chunk(calls)
        if rows.tokens > _OF_ROW + _STEPS:
            words = f"token by token in a batch of {_ROWS}"
            yield Way(DECODED, words, lambda: _decode_batch(rows, calls))
        if not calls.has_mask or self.leaves_out_left():
            return
        for tokens in (_PADDED, _LONG_PADDED):
            if rows.tokens > tokens + _STEPS:
                words = f"token by token in a batch, a row behind {_PADDING} tokens of padding"
                words += f" in a prefill of {tokens}" * (tokens > _PADDED)
                yield Way(DECODED, words, lambda n=tokens: _decode_padded(rows, calls, n))  # type: ignore[misc]
        if generates(calls) and rows.tokens > _PADDED + _STEPS:
            words = f"by generate(), greedily, a row behind {_PADDING} tokens of padding"
            yield Way(
                DECODED, words, lambda: _decode_padded(rows, calls, _PADDED, by_generate=True)
            )

    def _chunk(self, calls: TextCalls) -> Way:
        """Return the way to read a piece of several tokens behind those in a cache."""
        assert isinstance(self.rows, TextRows)
        words = f"a piece of {_CHUNK} tokens behind a prefill of {_PROMPT}"
        passes = pieces(self.rows, calls, [0], [0, _PROMPT], _PROMPT + _CHUNK)
        return Way(_CHUNKED, words, passes)

    def _compare(self, way: Way, model: Model | None = None) -> None:
        """Compare a way; code of the reference that begins a piece anew is no fault of a mode."""
        count = len(self.report.disagreements)
        super()._compare(way, model)
        disagreements = self.report.disagreements
        if way.relation == _CHUNKED and len(disagreements) > count and not self._base_continues():
            del disagreements[count:]
            self.report.left_out[_CHUNKED] = "the reference begins a piece of a text anew"

    def _base_continues(self) -> bool:
        """Tell if the reference gives for a piece behind a cache what one pass gives."""
        assert isinstance(self.rows, TextRows)
        whole = self.rows.first(_PROMPT + _CHUNK)
        return self.reference_agrees(self._chunk(TextCalls.of(self.base)), whole)

    def _beside_others(self, few: int) -> Way:
        rows = self.rows
        assert isinstance(rows, TextRows)
        spare = torch.cat([_spare_of(rows).roll(few * row, 1) for row in range(_OTHERS)])
        batch = torch.cat([spare[:, :few], rows.sample[:, :few]])
        beside = Pass(self._sample(batch), len(batch), few, (Span(_OTHERS, 0, 0, 0, few),))
        words = f"as the first {few} tokens beside {_OTHERS} rows of other text"
        return Way("others", words, lambda: iter([beside]))

    def _beginnings(self, lengths: Sequence[int]) -> Iterator[Way]:
        """List beginnings of the text, which a mode that decodes reads without a cache."""
        rows = self.rows
        assert isinstance(rows, TextRows)
        for length in lengths:
            if self._decodes and length <= rows.tokens:
                words = f"without a cache, in one pass of {length} tokens"
                yield Way(DECODED, words, lambda length=length: iter([rows.first(length)]))  # type: ignore[misc]
            elif not self._decodes and _FEW < length < rows.tokens:
                yield prefix(rows, length)

    @torch.no_grad()  # with gradients each weight would be quantized anew to be looked at
    def _sites_that_fit(self) -> list[Site]:
        """Return the sites whose tensors are kept: those of some layers, where all are too many."""
        layers, network = self.model.layers, self.model.module
        features: dict[str, int] = {}
        for site in self.sites:
            if site.port != "output":
                continue
            weight = getattr(network.get_submodule(site.module), "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2:
                layer = self.model.layer_of(site.module)
                features[layer] = features.get(layer, 0) + sum(weight.shape)
        most = 4 * self.rows.tokens * 2 * max(features.values(), default=1)
        count = max(2, _MOST_BYTES // most)
        if count >= len(layers):
            return self.sites
        step = (len(layers) - 1) / (count - 1)
        fitting = {"", *(layers[round(number * step)] for number in range(count))}
        count = len(layers) + 1 - len(fitting)
        self.report.left_out[f"a long text, in {count} of {len(layers)} layers"] = (
            "their tensors take too much memory"
        )
        return [site for site in self.sites if self.model.layer_of(site.module) in fitting]


def _rows_of(text: Tensor) -> TextRows:
    """Return the first row of a long text as rows, and other text beside it."""
    return TextRows(text[:1], 1, text.shape[1], 0, text[1:])


def _borders(tokens: int) -> list[int]:
    """Return powers of two within a text: a small one, and the largest."""
    powers = [2**k for k in range(2, 20) if 2**k < tokens - 1]
    return sorted({min(_TILE, powers[-1]), powers[-1]}) if powers else [max(1, tokens - 1)]


def _decode_padded(
    rows: TextRows, calls: TextCalls, tokens: int, *, by_generate: bool = False
) -> Iterator[Pass]:
    """Prefill two beginnings of the text, the shorter one behind padding, and decode both."""
    lengths = [tokens, tokens - _PADDING]
    ids = rows.sample[:, :tokens].repeat(2, 1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    ids[1, :_PADDING], mask[1, :_PADDING] = _spare_of(rows)[0, :_PADDING], False
    ids[1, _PADDING:] = rows.sample[0, : lengths[1]]
    spans = [Span(0, 0, 0, 0, lengths[0]), Span(1, _PADDING, 0, 0, lengths[1])]
    following = torch.stack([rows.sample[0, n : n + _STEPS + 1] for n in lengths])
    generated = generated_calls(calls, ids, mask, following) if by_generate else []
    request = CachedRequest(calls)
    for step in range(_STEPS + 1):
        sample = request.sample(ids, mask)
        if by_generate:
            sample = {**generated[step], calls.past: request.cache}
        with request.watch():
            yield Pass(sample, 2, ids.shape[1], tuple(spans))
        at = [length + step for length in lengths]
        ids = rows.sample[0, at].unsqueeze(1)
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        spans = [Span(row, 0, 0, token, 1) for row, token in enumerate(at)]


def _decode_batch(rows: TextRows, calls: TextCalls) -> Iterator[Pass]:
    """Decode the beginning of the text as the first and the last of several rows."""
    end = _OF_ROW + _STEPS
    spare = torch.cat([_spare_of(rows).roll(end * row, 1) for row in range(_ROWS - 2)])
    ids = torch.cat([rows.sample, spare, rows.sample])[:, :end]
    request = CachedRequest(calls)
    for start, stop in ((0, _OF_ROW), *((at, at + 1) for at in range(_OF_ROW, end))):
        spans = tuple(Span(row, 0, 0, start, stop - start) for row in (0, _ROWS - 1))
        with request.watch():
            yield Pass(request.sample(ids[:, start:stop]), _ROWS, stop - start, spans)


def _spare_of(rows: TextRows) -> Tensor:
    assert rows.spare is not None
    return rows.spare
