"""Modes of recurrent states: their numbers by a second definition, written from formats alone."""

from __future__ import annotations

import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from qgate import Mode, QgateError, models, modes
from qgate.models import Model
from qgate.models.mamba.network import MambaMixer
from qgate.models.mamba.state import MixerState
from qgate.modes.states import definition
from qgate.modes.states.casting import StoredState
from qgate.modes.states.choices import StateChoice, StateChoices
from qgate.modes.states.draws import Draws, site_key
from tests.gate.state_models import small_mamba
from tests.shares import share

NAMES = [mode.name for mode in modes.select("state-*", "mamba")]
SITE = "backbone.layers.1.mixer.scan:stored_state"
Array = Any


@pytest.fixture(scope="module")
def model() -> Model:
    return small_mamba()


# A second definition ------------------------------------------------------------------------------


FLOATS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp8": ml_dtypes.float8_e4m3fn}
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def rounded(x: Array, kind: str) -> Array:
    """Round to the nearest value, by libraries that know nothing of qgate."""
    x = np.clip(x, -LARGEST.get(kind, np.inf), LARGEST.get(kind, np.inf))
    if kind.startswith("int"):
        return np.rint(x)
    return x.astype(np.float32).astype(FLOATS[kind]).astype(np.float64)


def at_random(x: Array, kind: str, draws: Array) -> Array:
    """Round up in size where the draw is below what is lacking, down elsewhere."""
    size = np.minimum(np.abs(x), LARGEST.get(kind, np.inf))
    if kind == "int8":
        low, high = np.floor(size), np.floor(size) + 1
    else:
        near = size.astype(np.float32).astype(FLOATS[kind])
        below = np.where(near.astype(np.float64) > size, np.nextafter(near, near * 0), near)
        low = below.astype(np.float64)
        top = ml_dtypes.finfo(FLOATS[kind]).max.astype(FLOATS[kind])
        above = np.nextafter(below.astype(FLOATS[kind]), top).astype(np.float64)
        high = np.where(above > low, above, low + 1)
    return np.copysign(np.where(draws < (size - low) / (high - low), high, low), x)


def mixed(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def drawn(site: str, token: int, elements: int) -> Array:
    key, of_token = zlib.crc32(site.encode()), mixed((token + 0x85EBCA6B) & 0xFFFFFFFF)
    keys = (mixed((element * 0x9E3779B9 + key) & 0xFFFFFFFF) for element in range(elements))
    return np.array([(mixed(of_element ^ of_token) >> 8) / 2**24 for of_element in keys])


def single(x: Array) -> Array:
    return np.asarray(x).astype(np.float32).astype(np.float64)


def kept(name: str, x: Array, reaches: Array, draws: Array) -> Array:
    """What a mode keeps of (channels, states), or of (1, channels) of a convolution."""
    kind = name.split("-")[1]
    is_scan = len(x) > 1
    scale: Array = 1.0
    if name == "state-fp8":
        scale = single(reaches.max() / 448)
    elif name in ("state-fp8-channel", "state-int8-static"):
        scale = single(reaches / LARGEST[kind])
        scale = scale[:, None] if is_scan else scale[None]
    elif kind in ("fp8", "int8"):
        scale = single(np.abs(x).max(1, keepdims=True) / LARGEST[kind])
        scale = np.where(scale == 0, 1, scale)
    if name.endswith("-stochastic"):
        return single(at_random(x / scale, kind, draws) * scale)
    result = single(rounded(x / scale, kind) * scale)
    if not name.endswith("-feedback"):
        return result
    lost, also = single(x - result), {"int8": "int4"}.get(kind, "fp8")
    step = single(np.abs(lost).max(1, keepdims=True) / LARGEST[also])
    step = np.where(step == 0, 1, step)
    return single(result + single(rounded(lost / step, also) * step))


def decoded(name: str, mixer: MambaMixer, x: Array, z: Array, ranges: dict[str, Array]) -> Array:
    """What reaches out_proj of one text, token by token, in float64."""
    weights = {key: tensor.detach().double().numpy() for key, tensor in mixer.named_parameters()}
    A, D = -np.exp(weights["A_log"]), weights["D"]
    channels, states = A.shape
    width, rank = weights["conv1d.weight"].shape[2], weights["dt_proj.weight"].shape[1]
    window, state, outputs = np.zeros((width - 1, channels)), np.zeros(A.shape), []
    for token, now in enumerate(x):
        taps = np.concatenate([window, now[None]]) * weights["conv1d.weight"][:, 0].T
        y = taps.sum(0) + weights["conv1d.bias"]
        u = y / (1 + np.exp(-y))
        draws = drawn(SITE.replace("scan", "conv1d"), token, channels)[None]
        window = np.concatenate([window[1:], kept(name, now[None], ranges["conv1d"], draws)])
        projected = weights["x_proj.weight"] @ u
        step = weights["dt_proj.weight"] @ projected[:rank] + weights["dt_proj.bias"]
        delta = np.log1p(np.exp(step))
        B, C = projected[rank : rank + states], projected[rank + states :]
        state = np.exp(delta[:, None] * A) * state + (delta * u)[:, None] * B
        gate = z[token] / (1 + np.exp(-z[token]))
        outputs.append((state @ C + D * u) * gate)
        draws = drawn(SITE, token, channels * states).reshape(channels, states)
        state = kept(name, single(state), ranges["scan"], draws)
    return np.stack(outputs)


@share(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_mode_computes_what_its_formats_say(name: str, model: Model) -> None:
    quantized = modes.apply(modes.find_mode(name, "mamba"), model)
    at = "backbone.layers.1.mixer"
    source, mixer = (of.module.get_submodule(at) for of in (model, quantized.model))
    assert isinstance(source, MambaMixer)
    mixer_inputs: list[Tensor] = []
    handles = [
        source.register_forward_pre_hook(lambda _m, args: mixer_inputs.append(args[0])),
        mixer.out_proj.register_forward_pre_hook(lambda _m, args: mixer_inputs.append(args[0])),  # type: ignore[union-attr, operator]
    ]
    with torch.no_grad():
        model(model.inputs[0][:, :32])
        mixer(mixer_inputs[0])
        x, z = (half.double().numpy()[0] for half in source.in_proj(mixer_inputs[0]).chunk(2, -1))
    for handle in handles:
        handle.remove()
    ranges = {part: largest(model, f"{at}.{part}") for part in ("conv1d", "scan")}
    expected = decoded(name, source, x, z, ranges)
    errors = np.linalg.norm(mixer_inputs[1][0].numpy() - expected, axis=-1)
    errors /= np.linalg.norm(expected, axis=-1)
    # A code that the last bit decides moves a token more than float noise does.
    assert np.quantile(errors, 0.9) < 2e-5
    assert errors.max() < 0.02


def largest(model: Model, module: str) -> Array:
    """The largest state of each channel on the calibration samples."""
    hidden_states: list[Tensor] = []
    mixer = model.module.get_submodule(module.rpartition(".")[0])
    handle = mixer.register_forward_pre_hook(lambda _m, args: hidden_states.append(args[0]))
    with torch.no_grad():
        for sample in model.calibration_samples():
            model(sample)
    handle.remove()
    assert isinstance(mixer, MambaMixer)
    with torch.no_grad():
        x = torch.cat([mixer.in_proj(hidden).chunk(2, -1)[0] for hidden in hidden_states])
        if module.endswith("conv1d"):
            return x.abs().amax((0, 1)).double().numpy()
        u = mixer.act(mixer.conv1d(x))
        dt, B, _C = mixer.x_proj(u).split(mixer.split, -1)
        delta = torch.nn.functional.softplus(mixer.dt_proj(dt) + mixer.dt_proj.bias)
        state, most = torch.zeros(len(x), *mixer.A_log.shape), torch.zeros(mixer.A_log.shape)
        for t in range(x.shape[1]):
            decay = torch.exp(delta[:, t, :, None] * -mixer.A_log.exp())
            state = decay * state + delta[:, t, :, None] * B[:, t, None] * u[:, t, :, None]
            most = most.maximum(state.abs().amax(0))
    return most.amax(1).double().numpy()


# Promises -----------------------------------------------------------------------------------------


def served(mixer: Any, given: dict[str, Tensor], chunks: list[int]) -> list[Tensor]:
    """What convolution and scan make of projections, chunk by chunk, and the states after them."""
    cache, parts = MixerState(), []
    pieces = {name: x.split(chunks, 1) for name, x in given.items()}
    for number, count in enumerate(chunks):
        now = {name: piece[number] for name, piece in pieces.items()}
        y = mixer.conv1d(now.pop("x"), cache)
        scanned = mixer.scan(
            **now, A_log=mixer.A_log, D=mixer.D, dt_bias=mixer.dt_proj.bias, cache=cache
        )
        parts.append(torch.cat([y, scanned.output], -1))
        cache.length += count
    assert cache.conv is not None
    assert cache.ssm is not None
    return [torch.cat(parts, 1), cache.conv, cache.ssm]


@share(6)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_chunks_and_batches_have_the_same_bits(name: str, model: Model) -> None:
    quantized = modes.apply(modes.find_mode(name, "mamba"), model)
    mixer: Any = quantized.model.module.get_submodule("backbone.layers.1.mixer")
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": 64, "u": 64, "dt": 64, "z": 64, "B": 16, "C": 16}
    inputs = {at: torch.randn(3, 48, n, generator=generator) for at, n in sizes.items()}
    with torch.no_grad():
        whole = served(mixer, inputs, [48])
        for chunks in ([1] * 48, [16, 1, 1, 30]):
            assert all(map(torch.equal, served(mixer, inputs, chunks), whole))
        alone = served(mixer, {at: x[2:] for at, x in inputs.items()}, [48])
        assert all(torch.equal(a, b[2:]) for a, b in zip(alone, whole, strict=True))
        # Random rounding repeats, also in a network that is made anew.
        second_network: Any = modes.apply(modes.find_mode(name, "mamba"), model).model.module
        assert torch.equal(second_network(model.inputs[0]), quantized.model(model.inputs[0]))
        assert not torch.equal(second_network(model.inputs[0]), model(model.inputs[0]))


def test_a_network_decodes_with_its_quantized_states(model: Model) -> None:
    quantized = modes.apply(modes.find_mode("state-int8", "mamba"), model)
    network: Any = quantized.model.module
    ids = torch.cat(list(model.inputs))
    with torch.no_grad():
        cache = network.new_cache()
        steps = [network(part, cache) for part in ids.split([20, *[1] * 8, 20], 1)]
        whole = network(ids)
        assert float((torch.cat(steps, 1) - whole).norm() / whole.norm()) < 1e-3


def cast(fmt: str, share: str = "none", seed: int = 0, **more: Any) -> StoredState:
    choice = StateChoice(fmt, share, **more)  # type: ignore[arg-type]
    return StoredState(SITE, choice, None, seed)


@pytest.mark.parametrize(
    ("fmt", "share"), [("bf16", "none"), ("fp8_e4m3", "token"), ("int8", "token")]
)
def test_random_rounding_is_unbiased(fmt: str, share: str) -> None:
    x = torch.randn(16, 1, 64, generator=torch.Generator().manual_seed(0))
    store, tokens = cast(fmt, share, stochastic=True), 400
    stored = torch.stack([store(x, token) for token in range(tokens)]).double()
    mean, spread = stored.mean(0) - x, stored.std(0)
    between = spread > 0
    z = (mean[between] / spread[between]) * tokens**0.5
    # 1,000 elements: the mean of all is near zero, their spread is that of a mean of draws.
    assert abs(float(z.mean())) < 4 / len(z) ** 0.5
    assert 0.85 < float(z.std()) < 1.15
    nearest = cast(fmt, share)(x, 0).double()
    assert float((nearest - x).square().sum()) > 20 * float(mean.square().sum())
    # Each is one of the two neighbors.
    assert float((stored.amax(0) - stored.amin(0))[between].min()) > 0
    assert all(len(set(stored[:, n, 0, 0].tolist())) <= 2 for n in range(16))


def test_draws_are_even_and_independent() -> None:
    key = site_key(SITE, 0)
    draws = Draws(key).of_tokens(0, 256, 1024, torch.device("cpu"))
    counts = torch.histc(draws.float(), 16, 0, 1)
    assert float(((counts - 2**14).square() / 2**14).sum()) < 37.7, "chi-square of 15, 0.1 %"
    other = Draws(site_key(SITE, 1)).of_tokens(0, 256, 1024, torch.device("cpu"))
    next_site = Draws(site_key(SITE.replace("1", "2"), 0)).of_tokens(
        0, 256, 1024, torch.device("cpu")
    )
    pairs = {
        "tokens": (draws[1:], draws[:-1]), "elements": (draws[:, 1:], draws[:, :-1]),
        "seeds": (draws, other), "sites": (draws, next_site),
    }  # fmt: skip
    for about, (a, b) in pairs.items():
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / a.numel() ** 0.5, about
    part = Draws(key).of_tokens(100, 3, 1024, torch.device("cpu"))
    assert torch.equal(part, draws[100:103])
    assert definition.draw(SITE, 0, 101, 77) == part[1, 77] == drawn(SITE, 101, 78)[77]
    assert np.array_equal(
        definition.draws(SITE, 0, [100, 102], (1024,))[:, 0], part[[0, 2]].numpy()
    )


def test_draws_that_are_not_kept_follow_those_that_are() -> None:
    draws = Draws(site_key(SITE, 0))
    for first in (0, 1020, 5000):
        part = draws.of_tokens(first, 8, 1024, torch.device("cpu"))
        expected = definition.draws(SITE, 0, range(first, first + 8), (1024,))[:, 0]
        assert np.array_equal(expected, part.numpy()), first
    narrow = draws.of_tokens(3, 2, 5, torch.device("cpu")).numpy()
    assert np.array_equal(narrow, definition.draws(SITE, 0, [3, 4], (5,))[:, 0])


def test_another_seed_is_another_rounding() -> None:
    x = torch.randn(16, 2, 64)
    first, other = (cast("bf16", stochastic=True, seed=seed)(x, 3) for seed in (0, 1))
    assert not torch.equal(first, other)
    assert torch.equal(first[:, 0], cast("bf16", stochastic=True)(x[:, :1], 3)[:, 0])


def test_gradients_go_through_the_states(model: Model) -> None:
    def gradient(network: Any) -> Tensor:
        weight = model.module.get_parameter("backbone.layers.0.mixer.in_proj.weight")
        return torch.autograd.grad(network(model.inputs[0]).square().sum(), weight)[0].flatten()

    reference = gradient(model.module)
    for name in ("state-bf16", "state-fp8", "state-int8-stochastic"):
        network = modes.apply(modes.find_mode(name, "mamba"), model).model.module
        actual = gradient(network)
        assert 0.99 < float(torch.cosine_similarity(actual, reference, 0)) < 1, name


def test_plans_say_what_is_stored(model: Model) -> None:
    def lines(name: str) -> list[tuple[str, str, str]]:
        entries = modes.make_plan(modes.find_mode(name, "mamba"), model).entries
        return [(e.site.rpartition("mixer.")[2], e.does, e.origin) for e in entries[:2]]

    assert lines("state-bf16-stochastic") == [
        (site, "bf16, rounded stochastically", "no scale")
        for site in ("conv1d:stored_state", "scan:stored_state")
    ]
    assert lines("state-int8-feedback")[1][1:] == (
        "int8 per token, its error in int4", "amax of its elements",
    )  # fmt: skip
    assert lines("state-fp8-channel")[1][1:] == (
        "fp8_e4m3 per channel", "largest of 3 calibration samples in each channel",
    )  # fmt: skip
    plan = modes.make_plan(modes.find_mode("state-fp8", "mamba"), model).entries
    assert len(plan) == 4
    scale = largest(model, "backbone.layers.0.mixer.scan").max() / 448
    assert plan[1].scale == pytest.approx(scale, rel=1e-6)


def test_a_mode_of_ones_own_keeps_one_state(model: Model) -> None:
    mode = Mode("ssm", "", fits="mamba", states=StateChoices(ssm=StateChoice("int8", "token")))
    quantized = modes.apply(mode, model)
    assert [entry.site.rpartition(".")[2] for entry in quantized.plan.entries] == [
        "scan:stored_state"
    ] * 2
    assert (mode.formats, mode.calibrated, mode.is_reference) == ({"int8"}, False, False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StateChoice("bf16", "head"), "unknown share of a state 'head'"),  # type: ignore[arg-type]
        (lambda: StateChoice("mxfp8"), "mxfp8_e4m3 has scales of its own blocks|mxfp8 has scales"),
        (lambda: StateChoice("int8", "token", True, "int4"), "keeps no remainder"),
        (lambda: StateChoices(), "quantize nothing"),
        (lambda: StateChoices(ssm=StateChoice("bf16"), seed=-1), "seed -1 is not allowed"),
        (
            lambda: Mode("two", "", dtype="float16", states=StateChoices(ssm=StateChoice("bf16"))),
            "more than one of rules, choices, attention, states, dtype and own",
        ),
    ],
)
def test_choices_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(QgateError, match=words):
        make()


def test_models_without_states_are_refused(model: Model) -> None:
    mode = modes.find_mode("state-bf16", "mamba")
    with pytest.raises(QgateError, match="tiny-llama has no recurrent state that can be"):
        modes.apply(mode, models.load("tiny-llama"))
    other = Model(torch.nn.Linear(4, 4), [torch.ones(1, 4)], "plain", bases=model.bases)
    with pytest.raises(QgateError, match="plain has no recurrent state that can be quantized"):
        modes.apply(mode, other)
