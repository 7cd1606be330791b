"""Faults planted in a quantized cache are red, and named; healthy caches are green."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import models, modes, quantize
from qgate.gate.measured import Measured
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.serving.cache_rows import ServedCaches
from qgate.models import Model
from qgate.modes.attention import core as core_module
from qgate.modes.attention.casting import StoredSide
from qgate.modes.attention.core import Attend, AttentionCore, QuantizedCache
from tests.gate.benches import first_layers
from tests.shares import share, slow_file

pytestmark = slow_file

CACHE_MODES = [mode.name for mode in modes.select("kv-*", "other")]
WAYS = {"cache:decode", "cache:prefill", "cache:chunked_prefill", "o_proj:input"}


def load(seed: int = 0) -> tuple[Model, modes.Calibration]:
    sampling = models.Sampling(samples=3, seqlen=96, calib_samples=4, calib_seqlen=96, seed=seed)
    model = first_layers(models.load("tiny-llama", sampling=sampling), 2)
    return model, modes.measure(model, modes.CalibrationSettings())


@pytest.fixture(scope="module")
def loaded() -> tuple[Model, modes.Calibration]:
    return load()


def rows_of(loaded: tuple[Model, modes.Calibration], name: str) -> list[Measured]:
    model, scales = loaded
    mode = modes.find_mode(name, "other")
    mode_scales = scales if mode.calibrated else None
    quantized = modes.apply(mode, model, mode_scales)
    run = ServedCaches(quantized)
    with torch.no_grad(), run.watch():
        quantized.model(torch.cat(list(model.inputs)))
    order = {site.name: number for number, site in enumerate(model.sites())}
    return run.rows(model, ModelSites(order, model.layer_of))


def findings(rows: list[Measured]) -> dict[str, str]:
    """Return by site, without its layer, the words of the first layer that is red there."""
    listed: dict[str, str] = {}
    for row in rows:
        leaf = re.split(r"\.(?:self_attn|mixer|mamba|linear_attn|conv)\.", row.site)[1]
        wrong = [conformance.about for conformance in row.conformance if conformance.share]
        value = row.value("relative_mse@worst_token")
        if row.scope == "isolated" and not (value is not None and value <= row.floor):
            wrong.append((row.why or {})["isolated"])
        if row.scope == "local" and row.ideal is not None:
            assert row.values["relative_mse"] is not None
        if wrong:
            listed.setdefault(leaf, wrong[0])
    return listed


@share(12)
@pytest.mark.parametrize("name", CACHE_MODES)
def test_a_healthy_cache_is_green(name: str, loaded: tuple[Model, modes.Calibration]) -> None:
    rows = rows_of(loaded, name)
    assert findings(rows) == {}
    layers = 2
    assert len(rows) == layers * (2 + len(WAYS))
    for row in rows:
        if row.scope == "isolated":
            assert row.value("relative_mse@worst_token") <= 0.1 * row.floor, row.site  # type: ignore[operator]
        else:
            assert row.ideal is not None
            assert row.values["relative_mse"] == pytest.approx(row.ideal["relative_mse"], rel=1e-5)


@share(16)
@pytest.mark.parametrize("seed", range(1, 5))
def test_other_texts_are_green(seed: int) -> None:
    other = load(seed)
    for name in ("kv-fp8", "kv-fp8-prerope", "kv-int8", "kv-nvfp4"):
        assert findings(rows_of(other, name)) == {}


Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[str, Plant, str, set[str]]] = {}


def fault(mode: str, words: str, *sites: str) -> Callable[[Plant], Plant]:
    """Register a fault with the mode it is planted in, its words, and the sites that are red."""

    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (mode, plant, words, set(sites))
        return plant

    return register


def _changed(patch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[..., Any]) -> None:
    """Put `change(original, self, …)` in the place of a method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args: change(original, self, *args))


def _of_keys(self: StoredSide) -> bool:
    return getattr(self, "is_keys", False)


def _cast(patch: pytest.MonkeyPatch, change: Callable[[StoredSide, Tensor], Tensor]) -> None:
    """Cast keys by a function of the cast and the tensor."""
    original, before = StoredSide.forward, AttentionCore.__init__

    def init(self: AttentionCore, *args: Any, **named: Any) -> None:
        before(self, *args, **named)
        self.keys.is_keys = True  # type: ignore[assignment]

    patch.setattr(AttentionCore, "__init__", init)
    patch.setattr(
        StoredSide, "forward",
        lambda self, x: change(self, x) if _of_keys(self) else original(self, x),
    )  # fmt: skip


_FORWARD = StoredSide.forward


@fault("kv-fp8-head", "keys have the scale of another head", "cache:keys")
def wrong_heads_scale(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda side, x: _FORWARD(side, x.flip(1)).flip(1))


@fault("kv-fp8", "have a scale of 1, the calibrated one is forgotten", "cache:keys")
def forgotten_scale(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _side, x: quantize(x, "fp8_e4m3"))


@fault("kv-fp8-token", "keys have the scale of the first token", "cache:keys")
def scale_of_the_first_token(patch: pytest.MonkeyPatch) -> None:
    def cast(_side: StoredSide, x: Tensor) -> Tensor:
        scale = x[:, :, :1].abs().amax(-1, keepdim=True) / 448
        parts = [
            quantize(x[b, h], "fp8_e4m3", scale=float(scale[b, h]))
            for b in range(len(x)) for h in range(x.shape[1])
        ]  # fmt: skip
        return torch.stack(parts).view(x.shape)

    # Decoding makes a scale of each token, as each is the first of its own chunk.
    _cast(patch, cast)


@fault("kv-int8", "keys have one scale for all tokens", "cache:keys")
def one_scale_for_a_chunk(patch: pytest.MonkeyPatch) -> None:
    def cast(_side: StoredSide, x: Tensor) -> Tensor:
        return torch.stack([quantize(of, "int8", granularity="tensor") for of in x])

    _cast(patch, cast)


@fault("kv-int4-rotated", "keys are not rotated before they are quantized", "cache:keys")
def not_rotated(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _s, x: quantize(x, "int4", granularity="block", block=32, axis=-1))


@fault("kv-turbo3", "keys are not rotated before they are quantized", "cache:keys")
def neither_rotated(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _s, x: quantize(x, "lloyd3"))


@fault("kv-turbo3-qjl", "keys are not what the definition stores", "cache:keys")
def residual_signs_forgotten(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _s, x: quantize(x, "lloyd2", rotation=[1] * x.shape[-1]))


@fault("kv-nf4", "keys are not what the definition stores", "cache:keys")
def levels_of_another_book(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _s, x: quantize(x, "bnb_fp4"))


@fault("kv-fp8-prerope", "keys are quantized after RoPE, before RoPE is meant", "cache:keys")
def after_rope(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttentionCore, "sources", lambda self, keys, start: self.rope(keys, start))


@fault("kv-fp8", "keys are quantized before RoPE, after RoPE is meant", "cache:keys")
def before_rope(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttentionCore, "sources", lambda _self, keys, _start: keys)


@fault("kv-fp8", "keys are turned by the position after their own", "cache:keys")
def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttentionCore, "sources", lambda self, keys, start: self.rope(keys, start + 1))


@fault("kv-fp8", "keys and values are swapped", "cache:keys", "cache:values", *WAYS)
def swapped(patch: pytest.MonkeyPatch) -> None:
    _changed(patch, QuantizedCache, "store", lambda f, s, k, v, *exact: f(s, v, k, *exact))


@fault("kv-fp8", "are stored one token late", "cache:keys", *WAYS)
def one_token_late(patch: pytest.MonkeyPatch) -> None:
    def store(original: Any, self: QuantizedCache, k: Tensor, v: Tensor, *exact: Tensor) -> None:
        start = self.length
        original(self, k, v, *exact)
        memory = self._memory[0]
        end = self.length
        previous = memory[:, :, max(0, start - 1) : start].clone()
        delayed = getattr(self, "_last", previous) if start else k[:, :, :1]
        memory[:, :, start:end] = torch.cat([delayed, k], 2)[:, :, : end - start]
        self._last = k[:, :, -1:].clone()  # type: ignore[attr-defined]

    _changed(patch, QuantizedCache, "store", store)


@fault("kv-fp8", "queries do not see their own token: the cache is one token late", *WAYS)
def read_before_written(patch: pytest.MonkeyPatch) -> None:
    def late(_o: Any, self: Attend, q: Tensor, k: Tensor, v: Tensor, *exact: Any) -> Tensor:
        count, length = q.shape[2], k.shape[2]
        visible = torch.ones(count, length).tril(length - count - 1) > 0
        visible[0, 0] |= length == count
        return _ATTEND(self, q, k, v, *exact, visible=visible)

    _changed(patch, Attend, "forward", late)


_ATTEND = Attend.forward


def _kept(sinks: int, window: int) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = core_module.exact_mask
        patch.setattr(
            core_module, "exact_mask",
            lambda c, *a: original(
                replace(c, sinks=c.sinks + sinks, window=c.window + window), *a
            ),
        )  # fmt: skip

    return plant


for _name, _steps, _words in (
    ("window_short", (0, -1), "the window of tokens that stay as they are is one token short"),
    ("window_long", (0, 1), "the window of tokens that stay as they are is one token long"),
    ("no_window", (0, -32), "no window of tokens stays as it is"),
    ("sinks_dropped", (-4, 0), "the sinks are quantized, they stay as they are"),
    ("one_sink_dropped", (-1, 0), "one sink is missing"),
):
    FAULTS[_name] = ("kv-mxfp4", _kept(*_steps), _words, WAYS)


@fault("kv-int8", "are those of the request before, which the cache served", "cache:keys")
def stale_entry(patch: pytest.MonkeyPatch) -> None:
    """A token at a page border is not written: what an earlier request left there is read."""

    def store(original: Any, self: QuantizedCache, *sides: Tensor) -> None:
        start = self.length
        old = [m[:, :, 16:17].clone() for m in self._memory]
        original(self, *sides)
        if old and start <= 16 < self.length and old[0].shape[2] and len(old[0]) == len(sides[0]):
            self._memory[0][:, :, 16:17] = old[0]

    _changed(patch, QuantizedCache, "store", store)


@fault("kv-fp8", "keys are those of another request of the batch", "cache:keys")
def other_request(patch: pytest.MonkeyPatch) -> None:
    def read(original: Any, self: QuantizedCache, queries: Tensor) -> Tensor:
        keys = self._memory[0]
        self._memory[0] = keys.roll(1, 0)
        try:
            return original(self, queries)  # type: ignore[no-any-return]
        finally:
            self._memory[0] = keys

    _changed(patch, QuantizedCache, "read", read)


@fault("kv-fp8", "a query reads 79 tokens where 77 were written: token 15 twice", "cache:keys")
def chunk_border_written_twice(patch: pytest.MonkeyPatch) -> None:
    def write(original: Any, self: QuantizedCache, keys: Tensor, values: Tensor) -> None:
        original(self, keys, values)
        # The last token of a chunk of 16 is the first of the next one, too.
        if keys.shape[2] == 16:
            last = [memory[:, :, self.length - 1 : self.length].clone() for memory in self._memory]
            self.store(*last)

    _changed(patch, QuantizedCache, "write", write)


@fault("kv-int4", "queries read the tokens of their own chunk unquantized", "cache:prefill")
def prefill_reads_raw_tokens(patch: pytest.MonkeyPatch) -> None:
    def attend(
        original: Any, self: AttentionCore, q: Tensor, k: Tensor, v: Tensor, *exact: Any
    ) -> Tensor:
        raw = getattr(self, "raw", None)
        if raw is None or q.shape[2] == 1 or raw[0].shape[2] != q.shape[2]:
            return original(self, q, k, v, *exact)  # type: ignore[no-any-return]
        start = k.shape[2] - q.shape[2]
        k, v = (
            torch.cat([side[:, :, :start], of], 2) for side, of in zip((k, v), raw, strict=True)
        )
        return original(self, q, k, v, *exact)  # type: ignore[no-any-return]

    def write(original: Any, self: QuantizedCache, keys: Tensor, values: Tensor) -> None:
        object.__setattr__(self.core, "raw", (self.core.rope(keys, self.length), values))
        original(self, keys, values)

    _changed(patch, AttentionCore, "_attend", attend)
    _changed(patch, QuantizedCache, "write", write)


@fault("kv-fp8", "keys are those of another head", *WAYS)
def wrong_group_of_queries(patch: pytest.MonkeyPatch) -> None:
    _changed(patch, Attend, "forward", lambda f, s, q, k, v, *exact: f(s, q, k.flip(1), v, *exact))


@fault("kv-fp8", "scores are not divided by the root of the width", *WAYS)
def no_scaling(patch: pytest.MonkeyPatch) -> None:
    def attend(original: Any, self: Attend, *args: Any) -> Tensor:
        self.scaling = 1.0
        return original(self, *args)  # type: ignore[no-any-return]

    _changed(patch, Attend, "forward", attend)


@fault("kv-fp8", "keys are not quantized", "cache:keys")
def not_quantized(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _side, x: x)


@share(16)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_and_named(
    name: str, loaded: tuple[Model, modes.Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, plant, words, sites = FAULTS[name]
    plant(monkeypatch)
    red = findings(rows_of(loaded, mode))
    assert sites <= red.keys(), red
    assert any(words in text for text in red.values()), red
