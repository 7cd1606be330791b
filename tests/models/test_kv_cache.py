"""The small Llama with a cache computes what it computes without: in tokens, chunks or at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.models import llama
from qgate.models.kv_cache import PlainCache
from qgate.models.llama import Llama, LlamaConfig
from qgate.models.tiny import TINY
from tests.models.checkpoints import randomize

SIZES = {
    "tiny-llama": TINY.get("tiny-llama").make_config(),
    "one head for all": LlamaConfig(50, 32, 3, heads=4, kv_heads=1, d_ff=48),
    "a head each": LlamaConfig(50, 24, 2, 2, 2, 80, rope_base=100.0),
}
CHUNKS = {"tokens": [1] * 45, "whole": [45], "chunks": [16, 16, 13], "then tokens": [40, 1, 1, 3]}
# Float32 noise of another order of sums, as a share of the root mean square of the logits.
NOISE = 1e-5


def network(name: str = "tiny-llama", seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    model = Llama(SIZES[name]).eval()
    randomize(model)
    return model


def texts(made: Llama, seed: int = 0, rows: int = 2, count: int = 45) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(made.config.vocab_size, (rows, count), generator=generator)


def decoded(made: Llama, ids: Tensor, chunks: list[int]) -> Tensor:
    cache = made.new_cache()
    with torch.no_grad():
        return torch.cat([made(part, cache) for part in ids.split(chunks, 1)], 1)


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.square().mean().sqrt())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", SIZES)
def test_a_cache_changes_no_result(name: str, chunks: str, seed: int) -> None:
    model = network(name, seed)
    ids = texts(model, seed)
    with torch.no_grad():
        expected = model(ids)
    assert distance(decoded(model, ids, CHUNKS[chunks]), expected) < NOISE


def test_a_cache_that_is_reset_is_an_empty_one() -> None:
    model = network()
    first, second = texts(model, 1), texts(model, 2)
    cache = model.new_cache()
    with torch.no_grad():
        model(first, cache)
        for layer in cache:
            assert layer.length == 45
            layer.reset()
        assert torch.equal(model(second, cache), decoded(model, second, [45]))


@pytest.mark.parametrize("fault", ["late", "positions", "window", "swapped", "stale"])
def test_a_fault_of_the_cache_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    ids = texts(model)
    with torch.no_grad():
        expected = model(ids)
    write, attend = PlainCache.write, PlainCache.attend
    if fault == "late":
        monkeypatch.setattr("qgate.models.kv_cache.causal_mask", _mask_of(-1))
    elif fault == "positions":
        monkeypatch.setattr(llama.Attention, "rope", lambda self, x, _start: _rope(self, x, 0))
    elif fault == "window":
        monkeypatch.setattr("qgate.models.kv_cache.causal_mask", _mask_of(1))
    elif fault == "swapped":
        monkeypatch.setattr(PlainCache, "write", lambda self, k, v: write(self, v, k))
    else:

        def stale(self: PlainCache, queries: Tensor) -> Tensor:
            assert self.values is not None
            self.values = torch.cat([self.values[:, :, :1], self.values[:, :, 1:].flip(0)], 2)
            return attend(self, queries)

        monkeypatch.setattr(PlainCache, "attend", stale)
    assert distance(decoded(model, ids, [20, 25]), expected) > 100 * NOISE


_rope = llama.Attention.rope


def _mask_of(later: int) -> Callable[[int, int, torch.device], Tensor]:
    """Return masks that let each token see `later` tokens after it."""

    def mask(count: int, length: int, _device: torch.device) -> Tensor:
        return torch.ones(count, length).tril(length - count + later) > 0

    return mask


def test_a_cache_of_another_model_or_batch_is_refused() -> None:
    model, other = network(), network("a head each")
    ids = texts(model)
    with pytest.raises(QgateError, match=r"a cache of 2 layers does not fit a model of 5.*new_cac"):
        model(ids, other.new_cache())
    cache = model.new_cache()
    with torch.no_grad():
        model(ids, cache)
        with pytest.raises(QgateError, match="a cache of 2 sequences cannot take tokens of 1"):
            model(ids[:1], cache)
        cache[0].reset()
        with pytest.raises(QgateError, match=r"hold \[0, 45\] tokens"):
            model(ids, cache)
    with pytest.raises(QgateError, match="empty cache"):
        model.new_cache()[0].attend(torch.zeros(1, 4, 1, 32))
