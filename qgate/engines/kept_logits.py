"""Logits of a reference in about 1 % of their bytes, enough for the KL of other logits to them.

With d = log q - log p, the KL of logits q to a reference p is the sum over the vocabulary of
p (exp(d) - 1 - d). Of each position the most likely tokens are kept, and their terms are exact. The
others stand for themselves by draws: tokens drawn in proportion to p, whose mean of
exp(d) - 1 - d, times the probability of all that were not kept, is right in the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from qgate.engines.compute import AT_ONCE
from qgate.engines.scored import KeptRows, ScoredSample, scored
from qgate.errors import QgateError
from qgate.storage.access import write_bytes
from qgate.storage.locations import user_location

KIND = "kept"
"""First part of the names of the tensors in a file."""
ENDING = ".safetensors"
_LEVELS = (1 << 16) - 1
_SHORT_IDS = 1 << 16
_FIXED = 16
"""Bytes of a position beside its kept tokens: id, log-probability, range and rest."""
_DRAWN = 1 / 3
"""Share of the kept tokens that are drawn."""
_SMALL, _FEWEST = 1000, 2
_ANEW = "write it again with qgate engines --keep-reference."


def kept_count(vocabulary: int) -> int:
    """Return how many tokens of a position are kept: 1 % of float16 logits, 25 % of few."""
    plain = 2 * vocabulary
    budget = max(plain // 100, min(plain // 4, _SMALL // 2))
    id_bytes = 4 if vocabulary <= _SHORT_IDS else 6
    return min(vocabulary, max(_FEWEST, (budget - _FIXED) // id_bytes))


def keep_logits(path: str, samples: Sequence[ScoredSample], seed: int = 0) -> None:
    """Write the logits of samples to a file that `qgate engines` reads in place of them."""
    if not path.endswith(ENDING):
        raise QgateError(f"kept logits are a file that ends in {ENDING}, not {path!r}.")
    generator = np.random.default_rng(seed)
    parts = [_kept(sample, generator) for sample in samples]
    if len({int(part["sizes"][0]) for part in parts}) != 1:
        raise QgateError("the samples have logits of several vocabularies: keep them one by one.")
    tensors = {f"{KIND}_{name}": torch.cat([part[name] for part in parts]) for name in parts[0]}
    write_bytes(user_location(path), save({**tensors, f"{KIND}_sizes": parts[0]["sizes"]}))


def _kept(sample: ScoredSample, generator: np.random.Generator) -> dict[str, Tensor]:
    if sample.logits is None:
        raise QgateError(f"sample {sample.name!r} has no logits to keep; give a file of logits.")
    if len(sample) < 2:
        raise QgateError(f"sample {sample.name!r} has one token, and no logits that predict it.")
    vocabulary = sample.logits(1, 2).shape[-1]
    step = max(1, AT_ONCE // vocabulary)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(1, len(sample), step):
        stop = min(len(sample), start + step)
        logs = torch.log_softmax(sample.logits(start, stop).double(), -1)
        if not logs.isfinite().all():
            raise QgateError(
                f"sample {sample.name!r} has logits that are not finite: cut padding of the "
                "vocabulary off, or give the logits before they are masked."
            )
        ids, rest = _chosen(logs, generator)
        own = logs.gather(1, torch.from_numpy(sample.ids[start:stop, None]))[:, 0]
        parts.append((ids, *_levels(logs.gather(1, ids)), rest.float(), own.float()))
    ids, levels, ranges, rest, own = (torch.cat(column) for column in zip(*parts, strict=True))
    return {
        "lengths": torch.tensor([len(sample)]),
        "tokens": torch.from_numpy(sample.ids).int(),
        "ids": ids.to(torch.uint16 if vocabulary <= _SHORT_IDS else torch.int32),
        "levels": levels,
        "ranges": ranges,
        "rest": rest,
        "logprobs": own,
        "sizes": torch.tensor([vocabulary, _top(vocabulary)]),
    }


def _top(vocabulary: int) -> int:
    count = kept_count(vocabulary)
    return count if count == vocabulary else count - max(1, int(count * _DRAWN))


def _chosen(logs: Tensor, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Choose tokens of each row, and return with them the probability of those that are no top."""
    vocabulary = logs.shape[-1]
    top, count = _top(vocabulary), kept_count(vocabulary)
    ids = logs.topk(top, -1).indices
    other_shares = logs.exp().scatter(1, ids, 0.0)
    other_mass = other_shares.sum(1)
    draws = count - top
    if not draws:
        return ids, other_mass
    # Evenly spaced from a random start: each token is drawn as often as its probability asks.
    start = torch.from_numpy(generator.random((len(logs), 1)))
    places = (start + torch.arange(draws)) / draws * other_mass[:, None]
    sampled_ids = torch.searchsorted(other_shares.cumsum(1), places, right=True)
    # Where rounding leads behind the last token of all, that with the most probability stands in.
    sampled_ids = sampled_ids.where(sampled_ids < vocabulary, other_shares.argmax(1, keepdim=True))
    return torch.cat([ids, sampled_ids], 1), other_mass


def _levels(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities as levels of 16 bits between 0 and the range of their row."""
    ranges = (-logprobs.amin(1)).float()
    spacing = ranges.double().clamp_min(torch.finfo(torch.float32).tiny) / _LEVELS
    levels = (-logprobs / spacing[:, None]).round().clamp(0, _LEVELS)
    return levels.to(torch.uint16), ranges


def are_kept(tensors: Mapping[str, Tensor]) -> bool:
    """Tell if a file holds kept logits."""
    return f"{KIND}_ids" in tensors


def kept_samples(spec: str, tensors: Mapping[str, Tensor]) -> Iterator[ScoredSample]:
    """Read samples of kept logits; tensors that do not fit each other are refused."""
    parts = {key.removeprefix(f"{KIND}_"): tensor for key, tensor in tensors.items()}
    names = ("lengths", "tokens", "ids", "levels", "ranges", "rest", "logprobs", "sizes")
    if lacking := [f"{KIND}_{part}" for part in names if part not in parts]:
        raise QgateError(f"{spec!r} lacks {', '.join(lacking)}: {_ANEW}")
    lengths, ids = parts["lengths"].reshape(-1).tolist(), parts["ids"].long()
    vocabulary, top = (int(size) for size in parts["sizes"].reshape(-1).tolist()[:2])
    rows = [length - 1 for length in lengths]
    fits = ids.dim() == 2 and ids.shape == parts["levels"].shape and min(rows, default=0) > 0
    fits = fits and all(
        parts[part].shape == (sum(rows),) for part in ("ranges", "rest", "logprobs")
    )
    fits = fits and len(ids) == sum(rows) and parts["tokens"].shape == (sum(lengths),)
    if not (fits and 0 < top <= ids.shape[1] and ids.min() >= 0 and ids.max() < vocabulary):
        raise QgateError(f"{spec!r} holds tensors that do not fit each other: {_ANEW}")
    spacing = parts["ranges"].double() / _LEVELS
    logprobs = -parts["levels"].double() * spacing[:, None]
    columns = [part.split(rows) for part in (ids, logprobs, parts["rest"], parts["logprobs"])]
    for number, (tokens, of_ids, of_tokens, rest, own) in enumerate(
        zip(parts["tokens"].long().split(lengths), *columns, strict=True)
    ):
        kept = KeptRows(of_ids.numpy(), of_tokens.numpy(), top, rest.double().numpy(), vocabulary)
        logs = torch.cat([torch.tensor([torch.nan]).double(), own.double()])
        yield scored(str(number), tokens.numpy(), logs.numpy(), kept=kept)
