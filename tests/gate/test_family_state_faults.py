"""Faults planted in quantized states of transformers' families are red, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import Model, modes
from qgate.gate.measured import Measured
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.serving.state_rows import ServedMixers
from qgate.models.mamba.state import MixerState
from qgate.models.recurrent import scans
from qgate.modes.states import planning
from qgate.modes.states.casting import StoredState
from tests.gate.test_cache_faults import findings
from tests.models.families import STATES, model_of
from tests.shares import share, slow_file

pytestmark = slow_file

WAYS = ("decode", "prefill", "chunked_prefill", "output")
SCAN, CONV = (f"{part}:stored_state" for part in ("scan", "short_conv"))
NAMES = [mode.name for mode in modes.select("state-*", "other")]
Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[str, tuple[str, ...], Plant, str, set[str]]] = {}
BOTH = ("Mamba2", "Qwen3Next")


def rows_of(model: Model, name: str) -> list[Measured]:
    quantized = modes.apply(modes.find_mode(name, "other"), model)
    run = ServedMixers(quantized)
    with torch.no_grad(), run.watch():
        quantized.model(torch.cat(list(model.inputs)))
    order = {site.name: number for number, site in enumerate(model.sites())}
    return run.rows(model, ModelSites(order, model.layer_of))


@share(40)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", STATES)
def test_healthy_states_are_green(family: str, name: str, seed: int) -> None:
    rows = rows_of(model_of(family, seed=seed), name)
    assert findings(rows) == {}
    assert rows
    for row in rows:
        if row.scope == "isolated":
            assert row.value("relative_mse@worst_token") <= 0.1 * row.floor, row.site  # type: ignore[operator]


def fault(
    mode: str, words: str, *sites: str, of: tuple[str, ...] = BOTH
) -> Callable[[Plant], Plant]:
    """Register a fault with its mode, its words, the sites that are red, and the families."""

    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (mode, of, plant, words, set(sites))
        return plant

    return register


def _changed(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put `change(original, …)` in the place of a function or a method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: change(original, *args, **named))


def _cast(patch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    """Cast the states of scans by `change(original, self, x, first)`."""

    def forward(original: Any, self: StoredState, x: Tensor, first: int) -> Tensor:
        return change(original, self, x, first) if self._is_scan else original(self, x, first)

    _changed(patch, StoredState, "forward", forward)


@fault("state-fp8-channel", "the state has the scale of another head", SCAN)
def scale_of_another_head(patch: pytest.MonkeyPatch) -> None:
    _changed(
        patch, planning, "static_scale",
        lambda original, *args: original(*args).roll(len(original(*args)) // 4)
        if ".scan:" in args[2] else original(*args),
    )  # fmt: skip


@fault("state-int8", "the state has one scale for all channels", SCAN)
def one_scale_for_all_heads(patch: pytest.MonkeyPatch) -> None:
    from qgate import quantize

    def cast(_original: Any, _self: Any, x: Tensor, _first: int) -> Tensor:
        scales = x.abs().amax((0, 2), keepdim=True) / 127
        return quantize(x / scales, "int8", scale=1.0) * scales

    _cast(patch, cast)


@fault("state-int8-feedback", "the state lacks its rounding error", SCAN)
def feedback_dropped(patch: pytest.MonkeyPatch) -> None:
    _cast(patch, lambda _original, self, x, _first: self.quantizer(x))


@fault("state-fp8-stochastic", "the state is rounded to the nearest, at random is meant", SCAN)
def not_at_random(patch: pytest.MonkeyPatch) -> None:
    _changed(
        patch, StoredState, "_draws",
        lambda original, *args: torch.full_like(original(*args), 0.5),
    )  # fmt: skip


def _run(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Change how tokens run: `change(original, step, tokens, zeros, cache, store)`."""
    _changed(patch, scans, "run_tokens", change)


@fault(
    "state-int8", "the state is stored after it decays, and before its token is added",
    *(f"scan:{way}" for way in WAYS), of=("Mamba2",),
)  # fmt: skip
def stored_before_the_token_is_added(patch: pytest.MonkeyPatch) -> None:
    def run(original: Any, step: Any, tokens: int, zeros: Tensor, cache: Any, store: Any) -> Any:
        first = 0 if cache is None else cache.length

        def early(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
            (added, _), (full, output) = step(zeros, token), step(state, token)
            return store(full - added, first + token) + added, output

        return original(early if store else step, tokens, zeros, cache, None)

    _run(patch, run)


@fault("state-int8", "tokens read the state before it is rounded", "scan:decode", "scan:output")
def stored_and_not_read(patch: pytest.MonkeyPatch) -> None:
    def run(original: Any, step: Any, tokens: int, zeros: Tensor, cache: Any, store: Any) -> Any:
        def looked(x: Tensor, number: int) -> Tensor:
            store(x, number)
            return x

        return original(step, tokens, zeros, cache, store and looked)

    _run(patch, run)


@fault("state-bf16", "states are stored after 3 of 41 tokens", SCAN)
def stored_at_the_end_of_a_chunk(patch: pytest.MonkeyPatch) -> None:
    def run(original: Any, step: Any, tokens: int, zeros: Tensor, cache: Any, store: Any) -> Any:
        last = (0 if cache is None else cache.length) + tokens - 1

        def some(x: Tensor, number: int) -> Tensor:
            # As a kernel of chunks does, which hands on the states between them in float32.
            return store(x, number) if number == last or number % 16 == 15 else x  # type: ignore[no-any-return]

        return original(step, tokens, zeros, cache, store and some)

    _run(patch, run)


@fault(
    "state-int8", "outputs are made of the states in another order", "scan:prefill", of=("Mamba2",)
)
def groups_of_C_exchanged(patch: pytest.MonkeyPatch) -> None:
    def scan(original: Any, self: Any, **named: Any) -> Any:
        return original(self, **named | {"C": named["C"].flip(3)})

    _changed(patch, scans.Mamba2Scan, "forward", scan)


@fault("state-int8", "the first token reads the state of the request before", "scan:decode")
def not_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MixerState, "reset", lambda self: setattr(self, "length", 0))


SHORT = ("Mamba2", "Qwen3Next", "Lfm2")


@fault("state-int8", "earlier inputs are one token late", "short_conv:prefill", of=SHORT)
def convolution_one_token_late(patch: pytest.MonkeyPatch) -> None:
    def late(original: Any, x: Tensor, *args: Any) -> Tensor:
        convolved = original(x, *args)
        return torch.cat([torch.zeros_like(convolved[:, :1]), convolved], 1)

    _changed(patch, scans, "stored_window", late)


@fault("state-int8", "a token reads its own input rounded, too", "short_conv:decode", of=SHORT)
def own_input_rounded(patch: pytest.MonkeyPatch) -> None:
    _changed(
        patch, scans, "causal_conv",
        lambda original, x, weight, bias, kept: original(
            kept[:, -x.shape[1] :], weight, bias, kept
        ),
    )  # fmt: skip


@fault("state-int8", "the state is not quantized", CONV, of=SHORT)
def inputs_not_quantized(patch: pytest.MonkeyPatch) -> None:
    def forward(original: Any, self: StoredState, x: Tensor, first: int) -> Tensor:
        return original(self, x, first) if self._is_scan else x  # type: ignore[no-any-return]

    _changed(patch, StoredState, "forward", forward)


CASES = [(name, family) for name, (_, of, *_more) in FAULTS.items() for family in of]


@share(4)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_fault_is_red_and_named(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, _, plant, words, sites = FAULTS[name]
    model = model_of(family)
    plant(monkeypatch)
    red = findings(rows_of(model, mode))
    assert sites <= red.keys(), red
    assert any(words in text for text in red.values()), red
