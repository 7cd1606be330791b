"""Read logits or log-probabilities with their token ids from .npz, .safetensors and .pt files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from qgate.dumps import read_tensors
from qgate.engines.kept_logits import are_kept, kept_samples
from qgate.engines.scored import EngineRun, FloatArray, LogitRows, ScoredSample, scored
from qgate.errors import QgateError

ENDINGS = (".npz", ".safetensors", ".pt", ".pth")
TOKENS = ("tokens", "input_ids", "token_ids", "ids")
LOGITS = ("logits",)
LOGPROBS = ("logprobs", "log_probs", "logprob")
LENGTHS = ("lengths", "attention_mask")
KEYS = (
    "tokens (or input_ids, token_ids) and logits or logprobs, of one or two axes before the "
    "vocabulary; of ragged samples tokens.0, logits.0, tokens.1 …"
)


def read_logit_file(spec: str) -> EngineRun:
    """Read the samples of one file; tensors are mapped where the kind of file allows it."""
    tensors = {tensor.key or "": tensor.tensor for tensor in read_tensors(spec)}
    samples: list[ScoredSample] = []
    for number, part in _numbered(tensors):
        samples += _samples(spec, number, part)
    return EngineRun(spec, tuple(samples))


def _numbered(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Split `logits.0`, `tokens.0`, `logits.1` … by number; without numbers all are one part."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"(.*?)[._](\d+)", key)
        name, number = (match[1], match[2]) if match else (key, "")
        parts.setdefault(number, {})[name] = tensor
    yield from sorted(parts.items(), key=lambda part: (len(part[0]), part[0]))


def _pick(tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor | None:
    return next((tensors[name] for name in names if name in tensors), None)


def _samples(spec: str, number: str, tensors: Mapping[str, Tensor]) -> Iterator[ScoredSample]:
    if are_kept(tensors):
        yield from kept_samples(spec, tensors)
        return
    tokens, logits = _pick(tensors, TOKENS), _pick(tensors, LOGITS)
    logprobs, lengths = _pick(tensors, LOGPROBS), _pick(tensors, LENGTHS)
    if tokens is None or (logits is None and logprobs is None):
        listed = ", ".join(sorted(tensors)[:8]) or "nothing"
        lacks = "token ids" if tokens is None else "logits"
        raise QgateError(f"{spec!r} has no {lacks}: it holds {listed}. It should hold {KEYS}.")
    if tokens.is_floating_point() or tokens.dim() not in (1, 2):
        raise QgateError(
            f"{spec!r}: token ids are {str(tokens.dtype)[6:]} of shape {list(tokens.shape)}; "
            "they are integers, one row per sample."
        )
    ids = tokens.reshape(-1, tokens.shape[-1]).long()
    for name, values in (("logits", logits), ("logprobs", logprobs)):
        if values is not None:
            _check_shape(spec, name, values, ids)
    counts = _counts(spec, ids, lengths)
    for index, (row, count) in enumerate(zip(ids, counts, strict=True)):
        yield scored(
            number or str(index),
            row[:count].numpy(),
            None if logprobs is None else _logprobs(logprobs, index, count, len(row)),
            None if logits is None else _reader(logits, index),
        )


def _check_shape(spec: str, name: str, values: Tensor, ids: Tensor) -> None:
    """Refuse values that have no row for each token, or for each but the first."""
    samples, tokens = ids.shape
    lead = list(values.shape[:-1] if name == "logits" else values.shape)
    allowed = [[samples, tokens], [samples, tokens - 1]]
    allowed += [[tokens], [tokens - 1]] if samples == 1 else []
    if not values.is_floating_point() or lead not in allowed:
        raise QgateError(
            f"{spec!r}: {name} are {str(values.dtype)[6:]} of shape {list(values.shape)}, and "
            f"token ids have shape {list(ids.shape)}; {name} are floats with one row per token."
        )


def _counts(spec: str, rows: Tensor, lengths: Tensor | None) -> list[int]:
    """Return the number of tokens of each sample, from lengths or from a mask to the right."""
    if lengths is None:
        return [rows.shape[1]] * len(rows)
    if lengths.shape == rows.shape:
        mask = lengths.bool()
        counts: list[int] = mask.sum(1).tolist()
        if not all(bool(row[:count].all()) for row, count in zip(mask, counts, strict=True)):
            raise QgateError(f"{spec!r}: attention_mask has padding before tokens; pad behind.")
        return counts
    listed: list[int] = lengths.reshape(-1).tolist()
    if len(listed) != len(rows) or not all(0 < count <= rows.shape[1] for count in listed):
        raise QgateError(
            f"{spec!r}: lengths are {listed[:8]}, of {len(rows)} samples of {rows.shape[1]} tokens."
        )
    return listed


def _logprobs(values: Tensor, index: int, count: int, tokens: int) -> FloatArray:
    """Return a sample's log-probabilities; those of all tokens but the first are moved by one."""
    row = values.reshape(-1, values.shape[-1])[index].double()
    first = row.new_full((tokens - len(row),), torch.nan)
    return torch.cat([first, row])[:count].numpy()


def _reader(logits: Tensor, index: int) -> LogitRows:
    """Return a reader of the rows that predict tokens: each row predicts the token after it."""
    sample = logits[index] if logits.dim() == 3 else logits

    def rows(start: int, stop: int) -> Tensor:
        return sample[start - 1 : stop - 1]

    return rows
