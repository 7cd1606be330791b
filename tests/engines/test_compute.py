"""Figures against scipy and slow definitions, and faults that must show in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from qgate.engines import compute
from qgate.engines.compute import figures_of, values_of
from qgate.engines.record import TokenFigures
from qgate.engines.scored import Pair
from qgate.engines.scored import scored as sample_of
from qgate.errors import QgateError
from tests.engines import runs


def _figures(actual: runs.Scored, reference: runs.Scored) -> TokenFigures:
    return _figures_of(list(zip(*map(runs.samples_of, (actual, reference)), strict=True)))


def _figures_of(pairs: list[Pair]) -> TokenFigures:
    return figures_of(pairs, values_of(pairs))


def test_kl_is_that_of_scipy() -> None:
    b = runs.scored()
    a = runs.moved(b, 0.1)
    p, q = (torch.softmax(run.logits[:, :-1].double(), -1).numpy() for run in (b, a))
    expected = entropy(p, q, axis=-1)
    figures = _figures(a, b)
    assert figures.kl is not None
    assert figures.kl_spread is not None
    assert figures.kl.mean == pytest.approx(expected.mean(), rel=1e-10)
    assert figures.kl_spread.q99 == pytest.approx(np.quantile(expected, 0.99), rel=1e-10)
    assert figures.kl_spread.largest == pytest.approx(expected.max(), rel=1e-10)


def test_differences_ratios_and_flips_are_as_defined() -> None:
    b = runs.scored()
    a = runs.moved(b, 0.3)
    d = (a.logprobs - b.logprobs)[:, 1:].reshape(-1).numpy()
    figures = _figures(a, b)
    assert figures.tokens == runs.SAMPLES * (runs.TOKENS - 1)
    assert figures.unscored == runs.SAMPLES
    assert figures.difference.mean == pytest.approx(d.mean())
    assert figures.magnitude.largest == pytest.approx(np.abs(d).max())
    assert figures.k3.mean == pytest.approx((np.exp(d) - 1 - d).mean())
    assert figures.ratios == pytest.approx((np.exp(d.min()), np.exp(d.max())))
    assert figures.flips is not None
    assert figures.flips.mean == float((a.best != b.best).double().mean())
    assert figures.flips.mean > 0


def test_k3_of_drawn_tokens_estimates_kl() -> None:
    """Tokens drawn from the reference give the KL over the vocabulary in the mean."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 1, runs.VOCABULARY, generator=draw).expand(8, 4000, -1)
    p = torch.softmax(logits[0, 0], -1)
    ids = torch.multinomial(p, 32000, True, generator=draw).reshape(8, 4000)
    other = logits + 0.2 * torch.randn(runs.VOCABULARY, generator=draw)
    figures = _figures(runs.Scored(ids, other), runs.Scored(ids, logits))
    assert figures.kl is not None
    assert figures.k3.half_interval is not None
    assert abs(figures.k3.mean - figures.kl.mean) < 2 * figures.k3.half_interval
    assert figures.k3.half_interval < 0.1 * figures.kl.mean


@pytest.mark.parametrize("samples", [1, 24])
def test_intervals_hold_the_true_mean_as_often_as_they_say(samples: int) -> None:
    """Tokens of a sample share a shift, which an interval over single tokens would miss."""
    covered = 0
    trials = 200
    for seed in range(trials):
        draw = np.random.default_rng(seed)
        shift = draw.normal(size=(samples, 1)) if samples > 1 else 0.0
        d = 1e-2 * (draw.normal(size=(samples, 1024 // samples)) + shift)
        ids = np.zeros(d.shape[1], np.int64)
        pairs = [(sample_of("0", ids, row), sample_of("0", ids, 0 * row)) for row in d - 0.1]
        estimate = _figures_of(pairs).difference
        assert estimate.half_interval is not None
        covered += abs(estimate.mean + 0.1) <= estimate.half_interval
    assert 0.9 * trials <= covered <= 0.99 * trials


def test_chunks_of_logits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    b = runs.scored()
    a = runs.moved(b)
    whole = _figures(a, b)
    monkeypatch.setattr(compute, "AT_ONCE", 3 * runs.VOCABULARY)
    assert _figures(a, b) == whole


def test_equal_engines_are_equal_to_the_bit() -> None:
    figures = _figures(runs.scored(), runs.scored())
    assert figures.equal_share == 1
    assert figures.k3.mean == 0
    assert figures.carriers == ()
    assert figures.half_carried_by == 0


def test_a_token_that_carries_the_difference_is_listed_first() -> None:
    b = runs.scored()
    a = runs.moved(b, 1e-4)
    a.logits[4, 17, a.ids[4, 18]] += 3
    figures = _figures(a, b)
    first = figures.carriers[0]
    assert (first.sample, first.position, first.token) == ("4", 18, int(a.ids[4, 18]))
    assert first.share > 0.99
    assert figures.half_carried_by == 1
    assert figures.worst_samples[0].sample == "4"


def test_an_error_that_grows_along_the_sample_shows_in_second_halves() -> None:
    b = runs.scored()
    noise = torch.randn(b.logits.shape, generator=torch.Generator().manual_seed(1))
    growing = torch.arange(runs.TOKENS)[None, :, None] / runs.TOKENS * 0.2
    figures = _figures(runs.Scored(b.ids, b.logits + growing * noise), b)
    assert figures.second_half > 3 * figures.first_half


def test_infinite_log_probabilities_are_counted() -> None:
    b = runs.scored()
    a = runs.Scored(b.ids, b.logits.clone())
    a.logits[0, 3, a.ids[0, 4]] = -torch.inf
    assert _figures(a, b).not_finite == 1


def _other_vocabulary() -> tuple[runs.Scored, runs.Scored]:
    b = runs.scored()
    return runs.Scored(b.ids, b.logits[..., :-3]), runs.Scored(b.ids.clamp(max=40), b.logits)


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    a, _ = _other_vocabulary()
    with pytest.raises(QgateError, match="the ids are of another tokenizer"):
        _figures(a, a)


def test_vocabularies_of_other_sizes_are_refused() -> None:
    a, b = _other_vocabulary()
    a = runs.Scored(b.ids, a.logits)
    with pytest.raises(QgateError, match="logits of 47 and 50 tokens"):
        _figures(a, b)


def test_nothing_scored_by_both_is_refused() -> None:
    nothing = sample_of("0", np.zeros(4, np.int64))
    with pytest.raises(QgateError, match="no token has a log-probability from both"):
        _figures_of([(nothing, nothing)])
