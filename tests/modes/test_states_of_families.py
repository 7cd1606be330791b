"""State modes on families of transformers, compared with transformers' own slow decoding.

The reference decodes token by token by transformers' recurrent functions; after each token the
states in its cache are rounded by a second definition, which knows formats alone.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate import Mode, Model, QgateError, modes
from qgate.models.recurrent.mixers import MIXERS, kind_of
from qgate.modes.states.choices import StateChoice, StateChoices
from qgate.modes.states.mixers import StateMixer, named_mixers, reached
from tests.models.families import STATES, model_of, network_of, texts
from tests.modes.test_state_modes import drawn, kept
from tests.shares import share

NAMES = [mode.name for mode in modes.select("state-*", "other")]
MIXED = ("Mamba2", "Qwen3Next", "KimiLinear", "Lfm2", "Jamba")
TOKENS = 24


def cache_name(network: Any) -> str:
    """Return the name under which a network takes and returns its cache."""
    names = inspect.signature(network.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


def decoded(network: Any, ids: Tensor, after: Any = None, chunks: Any = None) -> Tensor:
    """Return logits of a text in chunks, single tokens by default; `after` changes the cache."""
    named, cache, logits = cache_name(network), None, []
    with torch.no_grad():
        for number, part in enumerate(ids.split(chunks or 1, 1)):
            result = network(part, **{named: cache}, use_cache=True)
            cache = getattr(result, named)
            logits.append(result.logits)
            if after is not None:
                after(cache, number)
    return torch.cat(logits, 1)


def error(actual: Tensor, right: Tensor) -> float:
    return float((actual - right).norm() / right.norm())


@share(4)
@pytest.mark.parametrize("family", STATES)
def test_states_in_reach_change_nothing(family: str) -> None:
    network = network_of(family)
    mine = reached(network)
    classes = {type(m).__name__ for m in mine.modules() if kind_of(m)}
    assert classes
    assert classes <= MIXERS.keys()
    assert not [m for m in network.modules() if hasattr(m, "short_conv")], "a copy is changed"
    ids = torch.cat(texts(2, 37))
    with torch.no_grad():
        whole = network(ids).logits
        assert error(mine(ids).logits, whole) < 1e-5
    # Bamba of transformers gives other numbers with a cache, by its rotary positions.
    right = decoded(network, ids) if family == "Bamba" else whole
    assert error(decoded(mine, ids), right) < 1e-5
    chunks = [20, 1, 1, 8, 1, 6]
    right = decoded(network, ids, chunks=chunks) if family == "Bamba" else whole
    assert error(decoded(mine, ids, chunks=chunks), right) < 1e-5


def test_every_class_in_reach_has_a_family_here() -> None:
    built = {
        type(module).__name__
        for family in STATES
        for module in network_of(family).modules()
        if kind_of(module)
    }
    assert built == set(MIXERS)


def test_the_documents_list_the_classes_in_reach() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "modes.md").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| recurrence | classes"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[2])} == set(
        MIXERS
    )


# A second definition ------------------------------------------------------------------------------


def states_of(mixer: StateMixer, layer: Any) -> dict[str, np.ndarray]:
    """Return what a cache holds: (batch, channels, elements), and the newest input (batch, 1, …)."""
    states = {"conv": layer.conv_states[0][..., -1].unsqueeze(1)}
    recurrent = layer.recurrent_states[0]
    if recurrent is not None:
        by_keys = "DeltaNet" in type(mixer.module).__name__ or "Kimi" in type(mixer.module).__name__
        recurrent = recurrent.transpose(-1, -2) if by_keys else recurrent
        states["ssm"] = recurrent.flatten(1, -2)
    return {side: x.double().numpy() for side, x in states.items()}


def put(mixer: StateMixer, layer: Any, side: str, values: np.ndarray) -> None:
    """Write states back into a cache."""
    new = torch.from_numpy(values).float()
    if side == "conv":
        layer.conv_states[0][..., -1] = new[:, 0]
        return
    target = layer.recurrent_states[0]
    turned = states_of(mixer, layer)["ssm"].shape != tuple(target.flatten(1, -2).shape)
    if turned or "Kimi" in type(mixer.module).__name__:
        batch, heads, keys, width = target.shape
        new = new.view(batch, heads, width, keys).transpose(-1, -2)
    target.copy_(new.reshape(target.shape))


def rounding(name: str, mixers: list[StateMixer], reaches: dict[str, Any]) -> Any:
    """Return a change of a cache: what a mode keeps of its states."""

    def after(cache: Any, token: int) -> None:
        for mixer in mixers:
            layer = cache.layers[mixer.module.layer_idx]
            for side, states in states_of(mixer, layer).items():
                site = mixer.site(side)
                draws = drawn(site, token, states[0].size).reshape(states[0].shape)
                rows = [kept(name, row, reaches.get(site), draws) for row in states]
                put(mixer, layer, side, np.stack(rows))

    return after


def largest(model: Model, mixers: list[StateMixer]) -> dict[str, Any]:
    """Return the largest state of each channel in transformers' caches along calibration texts."""
    reaches: dict[str, Any] = {}

    def after(cache: Any, _token: int) -> None:
        for mixer in mixers:
            for side, states in states_of(mixer, cache.layers[mixer.module.layer_idx]).items():
                most = np.abs(states).max((0, 2) if side == "ssm" else (0, 1))
                reaches[mixer.site(side)] = np.maximum(reaches.get(mixer.site(side), 0), most)

    for sample in model.calibration_samples():
        decoded(model.module, sample, after)
    return reaches


@share(10, by=("family",))
@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("name", NAMES)
def test_a_mode_decodes_as_transformers_with_a_rounded_cache(name: str, family: str) -> None:
    model = model_of(family, tokens=TOKENS)
    quantized = modes.apply(modes.find_mode(name, "other"), model)
    mixers = named_mixers(quantized.model)
    static = name in ("state-fp8", "state-fp8-channel", "state-int8-static")
    reaches = largest(model, mixers) if static else {}
    ids = torch.cat(list(model.inputs))
    expected = decoded(network_of(family), ids, rounding(name, mixers, reaches))
    with torch.no_grad():
        plain, actual = network_of(family)(ids).logits, quantized.model.module(ids).logits
    lost = error(expected, plain)
    assert lost > (1e-6 if name.endswith("feedback") or "fp16" in name else 1e-5)
    # A code that float noise turns moves a token more than noise does.
    distances = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    fed_back = name.endswith("feedback")
    assert float(distances.quantile(0.25 if fed_back else 0.5)) < 0.01 * lost + 2e-6
    most = (1.0 if fed_back else 0.2) * lost + 2e-6
    assert error(actual, expected) < most
    # The network decodes with transformers' cache, which holds what is stored.
    assert error(decoded(quantized.model.module, ids, chunks=[9, 1, 1, 13]), actual) < most


# Promises -----------------------------------------------------------------------------------------


def test_a_cache_that_is_copied_or_reset_goes_on_or_begins_anew() -> None:
    model = model_of("Qwen3Next", tokens=TOKENS)
    network: Any = modes.apply(
        modes.find_mode("state-int8-stochastic", "other"), model
    ).model.module
    ids = model.inputs[0]
    with torch.no_grad():
        begun = network(ids[:, :9], use_cache=True).past_key_values
        other = copy.deepcopy(begun)
        after = [network(ids[:, 9:12], past_key_values=c).logits for c in (begun, other)]
        assert torch.equal(*after)
        begun.reset()
        new_logits = network(ids[:, :9], past_key_values=begun).logits
        assert torch.equal(new_logits, network(ids[:, :9]).logits)


def test_a_mode_of_one_state_leaves_the_other_as_it_is() -> None:
    scan = Mode("ssm", "", states=StateChoices(ssm=StateChoice("int8", "token")))
    plan = modes.make_plan(scan, model_of("Mamba2"))
    assert [entry.site.rpartition(".")[2] for entry in plan.entries] == ["scan:stored_state"] * 2
    with pytest.raises(
        QgateError, match="keeps the last inputs of convolutions and no other state"
    ):
        modes.apply(scan, model_of("Lfm2"))


def test_states_that_nothing_reaches_are_an_error() -> None:
    class Unknown(torch.nn.Module):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            return x if cache is None else cache.get_recurrent_state(0) + x

    network = torch.nn.Sequential(reached(network_of("Lfm2")).model.layers[0].conv, Unknown())
    model = Model(network, [torch.ones(1, 4, 32)], "half")
    with pytest.raises(
        QgateError, match=r"half has states that these modes cannot reach, of Unknown"
    ):
        modes.make_plan(modes.find_mode("state-int8", "other"), model)


def test_a_folder_of_transformers_takes_modes_of_states_by_either_way(tmp_path: Path) -> None:
    from qgate.models import Sampling
    from qgate.modes.setups import ModelSetup

    network_of("Mamba").save_pretrained(tmp_path)
    ids = texts(1, 100)[0][0]
    sampling = Sampling(1, TOKENS, 1, TOKENS, tokens=ids)
    logits = []
    for way in ("hf", "mamba"):
        setup = ModelSetup(f"{way}:{tmp_path}", sampling=sampling)
        setup.check_modes("state-*")
        model = setup.load()
        quantized = setup.quantize(setup.select("state-int8", model)[0], model)
        logits.append(quantized.model(model.inputs[0]))
    assert error(*logits) < 1e-2
