"""Relations of families with recurrent states: chunks, padding and decoding with their caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate.models.recurrent.mixers import CacheView
from qgate.modes.attention.core import QuantizedCache
from qgate.testing import RelationFailure, check_relations
from tests.models.families import STATES, model_of
from tests.modes.test_cache_of_decoders import decoder
from tests.shares import always, share, slow_file

pytestmark = slow_file

cache_utils = pytest.importorskip("transformers.cache_utils")
BRIEF = ("chunked", "stepwise", "padded left", "warm prefix", "reused cache", "decoded")
CONTINUES_ANEW = {"Mamba", "FalconMamba", "Jamba"}
"""Families whose code in transformers begins a chunk of several tokens with an empty state."""
TURNS_ANEW = {"Bamba"}
"""Families whose positions begin anew with each call."""


@share(10, by=("mode",))
@pytest.mark.parametrize("mode", ["fp32", "state-int8", "state-fp8-stochastic"])
@pytest.mark.parametrize("family", STATES)
def test_requests_with_a_cache_agree(family: str, mode: str) -> None:
    def check() -> Any:
        return check_relations(model_of(family, tokens=100), mode=mode, relations=[*BRIEF])

    if family in TURNS_ANEW or (family in CONTINUES_ANEW and mode == "fp32"):
        with pytest.raises(RelationFailure, match="chunked: "):
            check()
        return
    report = check()
    unsupported = {"padded left"} if "stochastic" in mode else set()
    assert {*report.agreed} == {*BRIEF} - unsupported
    assert unsupported <= report.left_out.keys()


Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[str, str, Plant]] = {}


def fault(mode: str, words: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (mode, words, plant)
        return plant

    return register


def _states(patch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    """Call `change(original, layer, x, …)` where a layer of a cache is written."""
    layer = cache_utils.LinearAttentionLayer
    original = getattr(layer, name)
    patch.setattr(layer, name, lambda *args, **named: change(original, *args, **named))


@fault("state-int8", r"layers\.0\.mixer\.norm:input is")
def state_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    _states(
        patch, "update_recurrent_state",
        lambda original, layer, x, *more, **named: original(layer, x.bfloat16(), *more, **named),
    )  # fmt: skip


@fault("state-int8", r"layers\.0\.mixer\.norm:input is")
def window_of_inputs_lost(patch: pytest.MonkeyPatch) -> None:
    _states(
        patch, "update_conv_state",
        lambda original, layer, x, *more, **named: original(layer, 0 * x, *more, **named),
    )  # fmt: skip


def _next_layer(self: CacheView, *args: Any) -> Any:
    """Read what the layer before wrote."""
    other = CacheView(self._cache, max(0, self._layer - 1))
    return _READ(other, *args)


_READ = CacheView.state


@fault("state-int8", r"layers\.1\.mixer\.norm:input is")
def cache_of_the_layer_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheView, "state", _next_layer)


@fault("state-fp8-stochastic", r"layers\.0\.mixer\.(short_conv|scan)\.store:output")
def tokens_counted_from_the_chunk(patch: pytest.MonkeyPatch) -> None:
    def state(self: CacheView, *args: Any) -> Any:
        read = _READ(self, *args)
        read.length = 0
        return read

    patch.setattr(CacheView, "state", state)


@fault("fp32", r"layers\.0\.mixer\.norm:input is")
def state_not_kept_by_plain_code(patch: pytest.MonkeyPatch) -> None:
    _states(
        patch, "update_recurrent_state",
        lambda original, layer, x, *more, **named: original(layer, 0 * x, *more, **named),
    )  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_cache_is_red_and_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, words, plant = FAULTS[name]
    model = model_of("Mamba2", tokens=100)
    plant(monkeypatch)
    with pytest.raises(RelationFailure, match=f"decoded: .*{words}"):
        check_relations(model, mode=mode, relations=["decoded"])


@share(3)
@pytest.mark.parametrize("kind", ["Qwen3", "Mistral", "Qwen2-windowed"])
def test_requests_in_a_cache_mode_agree(kind: str, tmp_path: Path) -> None:
    relations = [name for name in BRIEF if name != "padded left"]
    report = check_relations(decoder(tmp_path, kind), mode="kv-int8", relations=relations)
    assert {*report.agreed} == {*relations}


@always
def test_a_cache_mode_that_forgets_the_prefill_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(tmp_path, "Qwen3")
    attend = QuantizedCache.attend

    def forgetful(self: QuantizedCache, queries: torch.Tensor) -> torch.Tensor:
        if queries.shape[2] == 1:
            for memory in self._memory:
                memory[:, :, : self.length - 1] = 0
        return attend(self, queries)

    monkeypatch.setattr(QuantizedCache, "attend", forgetful)
    words = r"decoded: model\.layers\.0\.self_attn\.core\.output:input is .* token by token"
    with pytest.raises(RelationFailure, match=words):
        check_relations(model, mode="kv-int8", relations=["decoded"])
