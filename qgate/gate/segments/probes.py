"""Inputs of other shapes and values, at which every mode is held beside its samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qgate.hooks.tapping import tap_sites
from qgate.models.rows import fullest_row, is_text, row_count
from qgate.models.sites import Site

PROBE_SAMPLES, PROBE_TOKENS = 3, 77
"""A short batch of an odd length, which every mode also runs on; and one token alone."""
PROBES = (
    f"a batch of {PROBE_TOKENS} tokens each", "one token alone", "the first sample",
    "one row alone", "a text longer than the samples", "massive values",
)  # fmt: skip
TRAINING = "training mode"
_MASSIVE, _EVERY, _CHANNEL = 2.0**12, 4, 5
"""Massive values: times the root mean square or 1, in one channel of every fourth token."""
_OF_PRODUCT = 2.0**8
"""Times the root mean square or 1 that results of products get there, with either sign."""


@contextmanager
def massive_values(
    run: nn.Module, reference: nn.Module, first: Iterable[Site], products: Iterable[Site]
) -> Iterator[None]:
    """Give massive values to two models at the first site, and to one behind its products."""
    with (
        tap_sites(run, products, _with_massive_results, first=True, lenient=True),
        tap_sites(run, first, _with_massive, first=True, lenient=True),
        tap_sites(reference, first, _with_massive, first=True, lenient=True),
    ):
        yield


def _with_massive(_site: Site, tensor: Tensor) -> Tensor | None:
    """Return a tensor with massive values in one channel of some tokens; None for no numbers."""
    return _enlarged(tensor, _MASSIVE)


def _with_massive_results(_site: Site, tensor: Tensor) -> Tensor | None:
    """Return the result of a product with massive values of both signs in some tokens."""
    return _enlarged(tensor, _OF_PRODUCT, -_OF_PRODUCT)


def _enlarged(tensor: Tensor, *factors: float) -> Tensor | None:
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return None
    massive = tensor.clone()
    size = max(1.0, float(tensor.float().square().mean().sqrt()))
    for channel, factor in enumerate(factors, _CHANNEL):
        massive[..., ::_EVERY, min(channel, tensor.shape[-1] - 1)] = size * factor
    return massive


def several(samples: Sequence[Any]) -> Any:
    """Return the first few texts side by side, as long as the shortest; other samples one alone."""
    texts = [sample for sample in samples[:PROBE_SAMPLES] if is_text(sample)]
    if not texts:
        return samples[0]
    length = min(text.shape[1] for text in texts)
    return torch.cat([text[:, :length] for text in texts])


def probes(sample: Any) -> Iterator[tuple[Any, str]]:
    """Yield short samples made of a long one; one that is no text stays as it is."""
    if not is_text(sample):
        yield sample, PROBES[2]
        if row_count(sample) > 1:
            yield fullest_row(sample), PROBES[3]
        return
    count = min(PROBE_TOKENS, sample.shape[1])
    yield sample[:, :count], PROBES[0]
    yield sample[:1, :1], PROBES[1]


def massive_probe(sample: Any) -> Any:
    """Return the short sample that runs with massive values: of texts a batch, else one row."""
    short = [probe for probe, _ in probes(sample)]
    return short[0] if is_text(sample) else short[-1]
