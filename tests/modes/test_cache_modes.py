"""Modes of the cache: their numbers by a second definition, written from the formats alone."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from bitsandbytes.functional import get_4bit_type
from torch import Tensor

from qgate import Mode, QgateError, models, modes
from qgate.formats._codebook import LLOYD
from qgate.formats.residual import Projection
from qgate.models import Model
from qgate.models.llama import Attention
from qgate.modes.attention.choices import AttentionChoices, TensorChoice
from tests.shares import share

SAMPLING = models.Sampling(samples=2, seqlen=80, calib_samples=3, calib_seqlen=64)
NAMES = [mode.name for mode in modes.select("kv-*", "other")]
Array = Any


@pytest.fixture(scope="module")
def model() -> Model:
    return models.load("tiny-llama", sampling=SAMPLING)


@pytest.fixture(scope="module")
def scales(model: Model) -> modes.Calibration:
    return modes.measure(model, modes.CalibrationSettings())


def e4m3(x: Array) -> Array:
    """Round to E4M3, which saturates; by ml_dtypes, which knows nothing of qgate."""
    clipped = np.clip(x, -448, 448).astype(np.float32)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def grid(x: Array, scale: Array, top: int) -> Array:
    return np.clip(np.rint(x / scale), -top, top) * scale


def e2m1(x: Array) -> Array:
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


def hadamard(size: int) -> Array:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)


def stored(name: str, x: Array, ranges: list[float]) -> Array:
    """What the cache keeps of x (heads, tokens, width), of one text."""
    heads, tokens, width = x.shape
    if name in ("kv-fp8", "kv-fp8-prerope"):
        return e4m3(x / (ranges[0] / 448)) * (ranges[0] / 448)
    if name == "kv-fp8-head":
        scale = np.float32(np.array(ranges[1:]) / 448).astype(np.float64)[:, None, None]
        return e4m3(x / scale) * scale
    if name == "kv-fp8-token":
        scale = np.float32(np.abs(x).max(-1, keepdims=True) / 448).astype(np.float64)
        return e4m3(x / scale) * scale
    if name == "kv-int8":
        scale = np.float32(np.abs(x).max((0, 2), keepdims=True) / 127).astype(np.float64)
        return grid(x, scale, 127)
    if name in ("kv-int4", "kv-int4-rotated"):
        scale = np.float32(np.abs(x).max(-1, keepdims=True) / 7).astype(np.float64)
        return grid(x, scale, 7)
    if name == "kv-mxfp4":
        exponent = np.floor(np.log2(np.abs(x).max(-1, keepdims=True))) - 2
        return e2m1(x / 2.0**exponent) * 2.0**exponent
    if name == "kv-nf4":
        scale = np.abs(x).max(-1, keepdims=True)
        return nearest(x / scale, get_4bit_type("nf4", device="cpu").double().numpy()) * scale
    if name == "kv-turbo3":
        scale = np.float32(np.sqrt(np.square(x).mean(-1, keepdims=True))).astype(np.float64)
        return nearest(x / scale, np.array(LLOYD[3])) * scale
    if name == "kv-turbo3-qjl":
        scale = np.float32(np.sqrt(np.square(x).mean(-1, keepdims=True))).astype(np.float64)
        first = nearest(x / scale, np.array(LLOYD[2])) * scale
        residual, p = x - first, Projection.drawn(0, 128).matrix[:width, :width]
        signs = np.where(residual @ p.T >= 0, 1.0, -1.0)
        length = np.sqrt(np.square(residual).sum(-1, keepdims=True))
        return first + math.sqrt(math.pi / 2) / width * length * (signs @ p)
    assert name == "kv-nvfp4"
    blocks = x.reshape(heads, tokens, width // 16, 16)
    largest = np.abs(x).max(-1)[..., None, None]
    whole = 448 * 6 / largest
    scale = e4m3(np.abs(blocks).max(-1, keepdims=True) / 6 * whole) / whole
    return (e2m1(blocks / scale) * scale).reshape(x.shape)


def nearest(x: Array, levels: Array) -> Array:
    """The nearest level of each number."""
    return np.asarray(levels[np.abs(x[..., None] - levels).argmin(-1)])


def turned(x: Array, base: float) -> Array:
    """Rotary positions as complex numbers: channel j and j + width / 2 are one."""
    half = x.shape[-1] // 2
    speed = base ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(np.arange(x.shape[-2]), speed))
    return np.concatenate([z.real, z.imag], -1)


def attention(name: str, q: Array, k: Array, v: Array, ranges: dict[str, list[float]]) -> Array:
    """Decode one text token by token, in float64; heads, tokens, width."""
    mode = modes.find_mode(name, "other").attention
    assert mode is not None
    before = name == "kv-fp8-prerope"
    original = turned(k, 10000.0)
    if before:
        keys = turned(stored(name, k, ranges["keys_before_rope"]), 10000.0)
    elif name in ("kv-int4-rotated", "kv-turbo3", "kv-turbo3-qjl"):
        matrix = hadamard(32)
        keys = stored(name, original @ matrix, []) @ matrix.T
    else:
        keys = stored(name, original, ranges["keys"])
    if name.startswith("kv-turbo3"):
        values = stored("kv-turbo3", v @ matrix, []) @ matrix.T
    else:
        values = stored(name, v, ranges["values"])
    queries = turned(q, 10000.0)
    heads, tokens, width = q.shape
    out = np.zeros_like(q)
    for t in range(tokens):
        positions = [s for s in range(t + 1) if s < mode.sinks or t - s < mode.window]
        of_keys, of_values = keys[:, : t + 1].copy(), values[:, : t + 1].copy()
        of_keys[:, positions], of_values[:, positions] = original[:, positions], v[:, positions]
        for h in range(heads):
            of = h * len(k) // heads
            scores = of_keys[of] @ queries[h, t] / math.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[h, t] = weights @ of_values[of] / weights.sum()
    return out


def of_layer(model: Model, quantized: modes.Quantized, layer: int) -> tuple[list[Array], Tensor]:
    """Projections of one text in the FP32 model, and the context that a mode makes of them."""
    at = f"model.layers.{layer}.self_attn"
    source = model.module.get_submodule(at)
    assert isinstance(source, Attention)
    hidden: list[Tensor] = []
    handle = source.register_forward_pre_hook(lambda _m, args: hidden.append(args[0]))
    context: list[Tensor] = []
    attended = quantized.model.module.get_submodule(at)
    other = attended.o_proj.register_forward_pre_hook(lambda _m, args: context.append(args[0]))  # type: ignore[union-attr]
    with torch.no_grad():
        model(model.inputs[0])
        attended(hidden[0])
        heads = [source.per_head(getattr(source, f"{leaf}_proj")(hidden[0])) for leaf in "qkv"]
    handle.remove()
    other.remove()
    return [tensor[0].double().numpy() for tensor in heads], source.per_head(context[0])[0]


@share(4)
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_mode_computes_what_its_formats_say(
    name: str, layer: int, model: Model, scales: modes.Calibration
) -> None:
    mode = modes.find_mode(name, "other")
    quantized = modes.apply(mode, model, scales if mode.calibrated else None)
    heads, actual = of_layer(model, quantized, layer)
    site = f"model.layers.{layer}.self_attn.cache:"
    ranges = {
        side: [scales[f"{site}{side}{head}"].range for head in ("", "[0]", "[1]")]
        for side in ("keys", "keys_before_rope", "values")
    }
    expected = attention(name, *heads, ranges)
    errors = np.linalg.norm(actual.numpy() - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    # A code that the last bit of a source decides moves a token more than float noise does.
    assert np.quantile(errors, 0.95) < 2e-5
    assert errors.max() < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_chunks_and_prefill_agree(
    name: str, model: Model, scales: modes.Calibration
) -> None:
    mode = modes.find_mode(name, "other")
    quantized = modes.apply(mode, model, scales if mode.calibrated else None)
    core = quantized.model.module.get_submodule("model.layers.1.self_attn").core
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 70, 32, generator=generator) for heads in (4, 2, 2))
    whole = core.whole(q, k, v)  # type: ignore[operator, union-attr]
    for chunks in ([70], [1] * 70, [64, 6], [3, 64, 1, 2]):
        cached = core.decode(q, k, v, chunks)  # type: ignore[operator, union-attr]
        torch.testing.assert_close(cached, whole, rtol=0, atol=2e-6)


def test_a_network_decodes_with_its_quantized_cache(model: Model) -> None:
    quantized = modes.apply(modes.find_mode("kv-int8", "other"), model)
    network: Any = quantized.model.module
    ids = torch.cat(list(model.inputs))
    with torch.no_grad():
        cache = network.new_cache()
        steps = [network(part, cache) for part in ids.split([40, *[1] * 8, 32], 1)]
        whole = network(ids)
        assert float((torch.cat(steps, 1) - whole).square().mean() / whole.square().mean()) < 1e-4
        plain = model.module(ids)
    assert float((whole - plain).square().mean() / plain.square().mean()) > 1e-7


def test_gradients_go_through_the_cache(model: Model, scales: modes.Calibration) -> None:
    reference = torch.autograd.grad(model.module(model.inputs[0]).square().sum(), _weight(model))
    for name in NAMES:
        mode = modes.find_mode(name, "other")
        network = modes.apply(mode, model, scales if mode.calibrated else None).model.module
        actual = torch.autograd.grad(network(model.inputs[0]).square().sum(), _weight(model))
        assert (
            float(torch.cosine_similarity(*(g[0].flatten() for g in (actual, reference)), 0))
            > 0.5  # of three and four bits
        )


def _weight(model: Model) -> Tensor:
    return model.module.get_parameter("model.layers.0.self_attn.k_proj.weight")


def test_plans_say_what_is_stored(model: Model, scales: modes.Calibration) -> None:
    plans = {
        name: modes.make_plan(modes.find_mode(name, "other"), model, scales).entries
        for name in NAMES
    }
    assert all(len(entries) == 10 for entries in plans.values())
    keys, values = plans["kv-fp8"][:2]
    assert (keys.site, values.site) == tuple(
        f"model.layers.0.self_attn.cache:{side}" for side in ("keys", "values")
    )
    assert keys.does == "fp8_e4m3 per tensor"
    assert keys.origin == "calibrated, largest of 3 samples in the tensor"
    assert keys.scale == pytest.approx(scales[keys.site].range / 448)
    assert plans["kv-fp8-prerope"][0].does == "fp8_e4m3 per tensor, before RoPE"
    assert plans["kv-int4-rotated"][0].does == "int4 per 32, rotated by 32"
    assert plans["kv-int4-rotated"][1].does == "int4 per 32"
    assert plans["kv-turbo3"][1].does == "lloyd3, rotated by 32"
    assert plans["kv-turbo3-qjl"][0].does == "lloyd2_qjl, rotated by 32"
    assert plans["kv-mxfp4"][0].does == (
        "mxfp4_e2m1, first 4 tokens as they are, last 32 tokens as they are"
    )


def test_a_mode_of_ones_own_quantizes_one_side(model: Model) -> None:
    choices = AttentionChoices(values=TensorChoice("int8", "group", group=8))
    mode = Mode("v-int8", "values in INT8", fits="other", attention=choices)
    quantized = modes.apply(mode, model)
    assert [entry.site.rpartition(":")[2] for entry in quantized.plan.entries] == ["values"] * 5
    assert not mode.calibrated
    assert mode.formats == {"int8"}
    with torch.no_grad():
        assert not torch.equal(quantized.model(model.inputs[0]), model(model.inputs[0]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TensorChoice("int8", "row"), "unknown share of a choice 'row'"),  # type: ignore[arg-type]
        (lambda: TensorChoice("int8", group=0), "group 0 is not allowed"),
        (lambda: AttentionChoices(), "quantize nothing"),
        (lambda: AttentionChoices(keys=TensorChoice("int8"), sinks=-1), "sinks -1 is not allowed"),
        (
            lambda: AttentionChoices(keys=TensorChoice("fp8_e4m3", "head"), rotated=True),
            "rotated keys with scales fp8_e4m3 per head are not allowed",
        ),
        (
            lambda: AttentionChoices(values=TensorChoice("int8"), before_rope=True),
            "before_rope and rotated are about keys",
        ),
        (
            lambda: Mode(
                "two", "", dtype="float16",
                attention=AttentionChoices(keys=TensorChoice("int8")),
            ),
            "more than one of rules, choices, attention, states, dtype and own",
        ),
    ],
)  # fmt: skip
def test_choices_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(QgateError, match=words):
        make()


def test_what_does_not_fit_a_model_is_refused(model: Model) -> None:
    def refusal(**choice: Any) -> str:
        side = TensorChoice(**choice)
        mode = Mode("mine", "", fits="other", attention=AttentionChoices(keys=side))
        with pytest.raises(QgateError) as caught:
            modes.apply(mode, model)
        return str(caught.value)

    assert "groups of 24 channels do not divide heads of 32" in refusal(
        format="int4", share="group", group=24
    )
    assert "'mine' has static scales: give it a calibration" in refusal(
        format="fp8_e4m3", share="tensor"
    )
    other = Model(torch.nn.Linear(4, 4), [torch.ones(1, 4)], "plain")
    with pytest.raises(QgateError, match="plain has no attention whose cache can be quantized"):
        modes.apply(modes.find_mode("kv-int8", "other"), other)
