"""Faults planted in quantized recurrent states are red, and named; healthy states are green."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import modes
from qgate.gate.measured import Measured
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.serving import state_traces
from qgate.gate.serving.state_rows import ServedMixers
from qgate.models import Model
from qgate.models.mamba import network, scanning
from qgate.models.mamba.scanning import Scan
from qgate.models.mamba.state import MixerState
from qgate.modes.states import planning
from qgate.modes.states.casting import StoredState
from tests.gate.state_models import small_mamba
from tests.gate.test_cache_faults import findings
from tests.shares import share, slow_file

pytestmark = slow_file

STATE_MODES = [mode.name for mode in modes.select("state-*", "mamba")]
WAYS = {"decode", "prefill", "chunked_prefill", "output"}


@pytest.fixture(scope="module")
def model() -> Model:
    return small_mamba()


def rows_of(model: Model, name: str) -> list[Measured]:
    quantized = modes.apply(modes.find_mode(name, "mamba"), model)
    run = ServedMixers(quantized)
    with torch.no_grad(), run.watch():
        quantized.model(torch.cat(list(model.inputs)))
    order = {site.name: number for number, site in enumerate(model.sites())}
    return run.rows(model, ModelSites(order, model.layer_of))


@share(12)
@pytest.mark.parametrize("name", STATE_MODES)
def test_healthy_states_are_green(name: str, model: Model) -> None:
    rows = rows_of(model, name)
    assert findings(rows) == {}
    assert len(rows) == 2 * 2 * (1 + len(WAYS))
    for row in rows:
        if row.scope == "isolated":
            assert row.value("relative_mse@worst_token") <= 0.1 * row.floor, row.site  # type: ignore[operator]
        else:
            assert row.ideal is not None
            assert row.values["relative_mse"] == pytest.approx(row.ideal["relative_mse"], rel=1e-5)


CLEAN = {1: (1, 40), 2: (7, 2, 3), 3: (40, 1), 4: (5,)}


@share(8)
@pytest.mark.parametrize("threads", CLEAN)
def test_clean_runs_are_green(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights, texts, threads and chunks."""
    monkeypatch.setattr(state_traces, "_CHUNKS", CLEAN[threads])
    other, before = small_mamba(seed=threads), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in STATE_MODES[threads::4]:
            assert findings(rows_of(other, name)) == {}
    finally:
        torch.set_num_threads(before)


Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[str, Plant, str, set[str]]] = {}
SCAN, CONV = (f"{part}:stored_state" for part in ("scan", "conv1d"))
SERVED = ("decode", "prefill", "chunked_prefill")


def fault(mode: str, words: str, *sites: str) -> Callable[[Plant], Plant]:
    """Register a fault with the mode it is planted in, its words, and the sites that are red."""

    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (mode, plant, words, set(sites))
        return plant

    return register


def _of(part: str, *names: str) -> list[str]:
    return [f"{part}:{name}" for name in names]


def _changed(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put `change(original, …)` in the place of a function or a method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: change(original, *args, **named))


def _cache(patch: pytest.MonkeyPatch, before: Any = None, after: Any = None) -> None:
    """Change the cache of a scan before it is read, or after it is written."""

    def scan(original: Any, self: Scan, *args: Any, cache: Any = None, **named: Any) -> Any:
        if cache is not None and cache.ssm is not None and before is not None:
            cache.ssm = before(cache.ssm)
        result = original(self, *args, cache=cache, **named)
        if cache is not None and after is not None:
            cache.ssm = after(cache.ssm)
        return result

    _changed(patch, Scan, "forward", scan)


@fault(
    "state-int8", "the first token reads the state of the request before (token 0)",
    *_of("scan", *SERVED), *_of("conv1d", *SERVED),
)  # fmt: skip
def not_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MixerState, "reset", lambda self: setattr(self, "length", 0))


@fault(
    "state-fp16", "tokens read the state rounded to bf16 (tokens 16, 24, 25)",
    "scan:chunked_prefill",
)  # fmt: skip
def bf16_at_chunk_borders(patch: pytest.MonkeyPatch) -> None:
    _cache(patch, after=lambda state: state.bfloat16().float())


@fault("state-int8", "tokens read the state of another request", *_of("scan", "decode"))
def another_request(patch: pytest.MonkeyPatch) -> None:
    _cache(patch, before=lambda state: state.roll(1, 0))


@fault("state-bf16", "tokens read no state: it is forgotten (tokens 16, 24, 25)", "scan:decode")
def forgotten_at_chunk_borders(patch: pytest.MonkeyPatch) -> None:
    _cache(patch, before=torch.zeros_like)


def _scale(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Change the static scales of the states of scans."""
    original = planning.static_scale

    def scale(choice: Any, ranges: Any, site: str) -> Any:
        own = original(choice, ranges, site)
        return change(original, choice, ranges, site) if ".scan:" in site else own

    patch.setattr(planning, "static_scale", scale)


@fault("state-fp8-channel", "the state has the scale of another channel", SCAN)
def scale_of_another_channel(patch: pytest.MonkeyPatch) -> None:
    _scale(patch, lambda original, *args: original(*args).roll(1))


@fault("state-int8-static", "the state has the scale of backbone.layers.1.mixer.scan", SCAN)
def scale_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    _scale(
        patch,
        lambda original, choice, ranges, _site: original(
            choice, ranges, "backbone.layers.1.mixer.scan:stored_state"
        ),
    )


@fault("state-fp8", "the state has a scale of 1, the calibrated one is forgotten", SCAN)
def forgotten_scale(patch: pytest.MonkeyPatch) -> None:
    _scale(patch, lambda *_args: 1.0)


def _cast(patch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    """Cast the states of scans by `change(original, self, x, first)`."""

    def forward(original: Any, self: StoredState, x: Tensor, first: int) -> Tensor:
        return change(original, self, x, first) if self._is_scan else original(self, x, first)

    _changed(patch, StoredState, "forward", forward)


@fault("state-int8", "the state is not quantized", SCAN)
def not_quantized(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _original, _self, x, _first: x)


@fault("state-int8", "the state has the scale of the first token", SCAN)
def stale_scale(patch: pytest.MonkeyPatch) -> None:
    from qgate import quantize

    def cast(_original: Any, self: Any, x: Tensor, first: int) -> Tensor:
        if not first:
            self.first_scale = x.abs().amax(0, keepdim=True) / 127
        codes = quantize(x / self.first_scale, "int8", scale=1.0)
        return codes * self.first_scale

    _cast(patch, cast)


@fault("state-fp16-stochastic", "the state is rounded to bf16 as well", SCAN)
def bf16_in_between(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda original, self, x, first: original(self, x, first).bfloat16().float())


@fault("state-int8-feedback", "the state has its rounding error subtracted, not added", SCAN)
def feedback_with_the_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    def cast(_original: Any, self: Any, x: Tensor, _first: int) -> Tensor:
        stored = self.quantizer(x)
        return stored - self.remainder(x - stored)  # type: ignore[no-any-return]

    _cast(patch, cast)


@fault("state-fp8-feedback", "the state lacks its rounding error", SCAN)
def feedback_forgotten(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _original, self, x, _first: self.quantizer(x))


def _drawn(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    _changed(patch, StoredState, "_draws", lambda original, *args: change(original(*args)))


@fault("state-bf16-stochastic", "the state is truncated, rounding at random is meant", SCAN, CONV)
def truncated(patch: pytest.MonkeyPatch) -> None:
    _drawn(patch, torch.ones_like)


@fault("state-int8-stochastic", "the state is rounded to the nearest, at random is meant", SCAN)
def rounded_to_the_nearest(patch: pytest.MonkeyPatch) -> None:
    _drawn(patch, lambda draws: torch.full_like(draws, 0.5))


@fault("state-fp8-stochastic", "the state is rounded by the random numbers of token 0", SCAN, CONV)
def one_draw_for_all_tokens(patch: pytest.MonkeyPatch) -> None:
    def draws(original: Any, self: StoredState, x: Tensor, first: int) -> Tensor:
        output: Tensor = original(self, x, 0 * first)
        return output if self._is_scan else output[:, :1]

    _changed(patch, StoredState, "_draws", draws)


@fault("state-bf16-stochastic", "by the random numbers of backbone.layers.1.mixer.scan", SCAN)
def draws_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    def init(original: Any, self: StoredState, site: str, *args: Any) -> None:
        original(self, site.replace("layers.0.mixer.scan", "layers.1.mixer.scan"), *args)

    _changed(patch, StoredState, "__init__", init)


@fault(
    "state-bf16-stochastic",
    "token 16 is stored as if it were token 0; only in chunked prefill",
    SCAN,
)
def tokens_counted_from_the_chunk(patch: pytest.MonkeyPatch) -> None:
    _changed(
        patch, scanning, "selective_scan",
        lambda original, *args, first=0, **named: original(
            *args, first=0 if args[0].shape[1] > 1 else first, **named
        ),
    )  # fmt: skip


@fault("state-bf16", "states are stored after 1 of 41 tokens", SCAN)
def stored_at_the_end_of_a_chunk(patch: pytest.MonkeyPatch) -> None:
    def states(original: Any, delta: Tensor, *args: Any) -> Any:
        *more, first, store = args
        last = first + len(delta) - 1
        return original(
            delta, *more, first, store and (lambda x, n: store(x, n) if n == last else x)
        )

    _changed(patch, scanning, "_states", states)


@fault("state-int8", "outputs are made of the state after it is rounded", "scan:output")
def outputs_of_rounded_states(patch: pytest.MonkeyPatch) -> None:
    def states(original: Any, *args: Any) -> Any:
        decay, states, stored = original(*args)
        # The states themselves are right where they were cast.
        return decay, torch.stack([*stored]) if args[-1] else states, stored

    _changed(patch, scanning, "_states", states)


def _conv(
    patch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> None:
    def convolve(original: Any, x: Tensor, weight: Tensor, bias: Any, kept: Any = None) -> Tensor:
        x, kept = change(x, kept)
        return original(x, weight, bias, kept)  # type: ignore[no-any-return]

    _changed(patch, network, "causal_conv", convolve)


CONVOLVED = _of("conv1d", *SERVED, "output")


@fault("state-int8", "earlier inputs are one token late", *_of("conv1d", "prefill", "output"))
def convolution_one_token_late(patch: pytest.MonkeyPatch) -> None:
    _conv(patch, lambda x, kept: (x, torch.cat([torch.zeros_like(kept[:, :1]), kept], 1)))


@fault("state-fp8-channel", "earlier inputs are read in the wrong order", "conv1d:decode")
def window_turned_around(patch: pytest.MonkeyPatch) -> None:
    # Seen in decoding, where the window is what a request keeps.
    def turn(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.cat([kept[:, :3].flip(1), kept[:, 3:]], 1) if x.shape[1] == 1 else kept

    _conv(patch, turn)


@fault("state-int8-static", "a token reads its own input rounded, too", *CONVOLVED)
def own_input_rounded(patch: pytest.MonkeyPatch) -> None:
    _conv(patch, lambda x, kept: (kept[:, -x.shape[1] :], kept))


@fault("state-int8", "tokens read earlier inputs before they are rounded", "conv1d:prefill")
def prefill_reads_raw_inputs(patch: pytest.MonkeyPatch) -> None:
    _conv(patch, lambda x, kept: (x, torch.cat([kept[:, :3], x], 1)))


@share(12)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_and_named(name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, plant, words, sites = FAULTS[name]
    plant(monkeypatch)
    red = findings(rows_of(model, mode))
    assert sites <= red.keys(), red
    assert any(words in text for text in red.values()), red
