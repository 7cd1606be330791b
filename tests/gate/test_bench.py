"""The bench against obvious computations: ideals, scopes, batches, and how often a model runs."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.gate import Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.passes import outer_tensors
from qgate.models import Sampling
from tests.gate.benches import LLAMA, MAMBA, Array, bench, calls_of, mode_of, mx_blocks
from tests.shares import proof, share

UP = "model.layers.1.mlp.up_proj"


OUTSIDE = {
    LLAMA: {"model.embed_tokens:output", "model.norm:output", "lm_head:output"},
    MAMBA: {"backbone.embeddings:output", "backbone.norm_f:output", "lm_head:output"},
}


@functools.cache
def short(model: str) -> Bench:
    return bench(model, layers=2)


@pytest.fixture(params=[LLAMA, MAMBA])
def shared(request: pytest.FixtureRequest) -> Bench:
    return short(request.param)


@pytest.fixture
def of_llama() -> Bench:
    return short(LLAMA)


def rows_at(of: Bench, mode: str, site: str, scope: str = "local") -> Measured:
    rows = of.measure(mode_of(of, mode))
    (row,) = (measured for measured in rows if (measured.site, measured.scope) == (site, scope))
    return row


def up_proj(of: Bench) -> tuple[Array, Array]:
    """The input of one linear layer in FP32, and its weight."""
    (((x,), _),) = calls_of(of.model, UP, of.model.inputs[:1])
    weight = of.model.module.get_submodule(UP).weight
    return x[0].double().numpy(), weight.detach().double().numpy()


def int8_rows(x: Array) -> Array:
    scale = np.float32(1) * np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(127)
    return np.rint(x / scale.astype(np.float64)) * scale.astype(np.float64)


def relative(actual: Array, reference: Array) -> float:
    return float(np.square(actual - reference).sum() / np.square(reference).sum())


@share(2)
@pytest.mark.parametrize(("mode", "rounded"), [("int8", int8_rows), ("mxfp8", mx_blocks)])
def test_ideals_are_an_obvious_computation(of_llama: Bench, mode: str, rounded: Any) -> None:
    x, w = up_proj(of_llama)
    expected = {
        "input": relative(rounded(x), x),
        "weight": relative(rounded(w), w),
        "output": relative(rounded(x) @ rounded(w).T, x @ w.T),
    }
    for port, value in expected.items():
        row = rows_at(of_llama, mode, f"{UP}:{port}")
        assert row.ideal == {"relative_mse": pytest.approx(value, rel=1e-4)}
        assert row.values["relative_mse"] == pytest.approx(value, rel=1e-4)
        assert row.layer == "layers.1"


@proof
def test_every_essential_mode_is_at_its_ideal(shared: Bench) -> None:
    """Within 0.05 dB, better or worse, where half a decibel is allowed."""
    for mode in shared.setup.select("essential", shared.model):
        with_ideal = [row for row in shared.measure(mode) if row.ideal is not None]
        rows = [row for row in with_ideal if row.quantizer or row.ideal["relative_mse"]]
        assert {row.layer for row in rows} == set(shared.layers)
        untouched = [row for row in with_ideal if row not in rows]
        assert {row.values["relative_mse"] for row in untouched} == {0.0}
        assert {row.site for row in untouched} >= OUTSIDE[shared.model.name]
        for row in rows:
            assert row.ideal is not None
            excess = 10 * math.log10(row.values["relative_mse"] / row.ideal["relative_mse"])
            assert abs(excess) < 0.05, f"{row.site} in mode {mode.name}: {excess:.3f} dB"
            assert row.nonfinite == row.nonfinite_reference == 0


@proof
def test_carried_is_local_in_the_first_block_and_grows(shared: Bench) -> None:
    for mode in shared.setup.select("essential", shared.model):
        blocks: dict[str, list[float]] = {"carried": [], "local": []}
        for row in shared.measure(mode):
            is_block = row.site.removesuffix(":output") in shared.model.layers
            if is_block and row.scope in blocks:
                blocks[row.scope].append(row.values["relative_mse"])
        assert len(blocks["carried"]) == len(blocks["local"]) == len(shared.layers)
        assert blocks["carried"][0] == blocks["local"][0]
        pairs = list(zip(blocks["carried"], blocks["local"], strict=True))[1:]
        assert all(carried > local for carried, local in pairs)


@proof
def test_carried_is_the_distance_of_the_free_running_model(of_llama: Bench) -> None:
    quantized = of_llama.quantized(mode_of(of_llama, "int8")).model
    last = of_llama.model.layers[-1]
    actual, reference = (
        torch.cat([y for _, y in calls_of(model, last, of_llama.model.inputs)]).double().numpy()
        for model in (quantized, of_llama.model)
    )
    row = rows_at(of_llama, "int8", f"{last}:output", "carried")
    assert row.values["relative_mse"] == pytest.approx(relative(actual, reference), rel=1e-4)


@pytest.mark.parametrize(("model", "mode"), [(MAMBA, "2-1"), (LLAMA, "int8")])
def test_batches_are_what_their_samples_are_alone(model: str, mode: str) -> None:
    of = bench(model, Sampling(3, 32, 2, 32))
    quantized = of.quantized(mode_of(of, mode)).model
    together = outer_tensors(quantized, of.model.inputs)
    alone = outer_tensors(quantized, of.model.inputs, together=False)
    assert together.tensors.keys() == alone.tensors.keys()
    for site, tensors in together.tensors.items():
        assert len(tensors) == 3
        for a, b in zip(tensors, alone[site], strict=True):
            # One flipped code is amplified by later layers, so it is distances that are compared.
            distance = float((a - b).square().sum() / b.square().sum())
            assert distance < 1e-4, site


@proof
def test_each_pass_happens_once() -> None:
    of = bench(LLAMA, layers=3)
    calls = {"reference": 0, "mode": 0}

    def counted(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    mode = mode_of(of, "int8")
    of.quantized(mode).model.module.register_forward_hook(counted("mode"))
    of.model.module.register_forward_hook(counted("reference"))
    first = of.measure(mode)
    # The reference: all samples in a batch, two short texts side by side, and one. The mode: free
    # and fed, and that text.
    # Both: a short batch, and one token. The reference: the mode's tensors between quantizers, and
    # their noise, with that of operators usually and among massive values, each twice. The mode:
    # tokens at three other lengths. Both: a text longer than the samples, and massive values.
    assert calls == {"reference": 3 + 2 + 2 + 6 + 2, "mode": 3 + 2 + 3 + 2}
    assert of.measure(mode) is first
    assert of.reference("plain") is of.reference("plain")
    assert calls == {"reference": 3 + 2 + 2 + 6 + 2, "mode": 3 + 2 + 3 + 2}


@proof
def test_nan_and_infinity_are_counted_where_they_are(of_llama: Bench) -> None:
    of = bench(LLAMA, layers=3)
    mode = mode_of(of, "int8")
    module = of.quantized(mode).model.module.get_submodule(UP)
    plain = module.forward

    def poisoned(x: Tensor) -> Tensor:
        y = plain(x).clone()
        y[..., 5], y[..., 0, 6] = math.nan, math.inf
        return y

    module.forward = poisoned  # type: ignore[method-assign]
    before = rows_at(of_llama, "int8", "model.layers.0:output", "carried")
    assert rows_at(of, "int8", "model.layers.0:output", "carried") == before
    assert rows_at(of, "int8", f"{UP}:output").nonfinite == 64 + 1
    assert rows_at(of, "int8", "model.layers.2:output", "carried").nonfinite > 0
    assert rows_at(of, "int8", "model.layers.2:output").nonfinite == 0


def test_a_model_of_a_single_layer_has_one_local_and_one_carried_error() -> None:
    from qgate import Model

    flat = Model(torch.nn.Sequential(torch.nn.Linear(4, 4)), [torch.randn(3, 4)])
    rows = Bench(bench().setup, _model=flat).measure(mode_of(bench(), "int8"))
    scopes = {
        scope: [row.site for row in rows if row.scope == scope] for scope in ("local", "carried")
    }
    assert scopes == {
        "local": ["0:input", "0:weight", "0:output"],
        "carried": ["0:output", "logits"],
    }


def test_gradients_are_those_of_autograd(of_llama: Bench) -> None:
    """A block alone, given FP32's input and FP32's gradient at its output, on two samples."""
    from torch.nn.functional import cross_entropy

    mode = mode_of(of_llama, "mxfp4")
    block, weight = "model.layers.1", "mlp.down_proj"
    true, quantized = (
        model.module.get_submodule(block)
        for model in (of_llama.model, of_llama.quantized(mode).model)
    )
    totals = {true: torch.zeros(()), quantized: torch.zeros(())}
    for sample in of_llama.model.inputs[:2]:
        calls: list[tuple[tuple[Any, ...], Tensor]] = []
        hook = true.register_forward_hook(lambda _m, args, y, into=calls: into.append((args, y)))
        loss = cross_entropy(of_llama.model(sample)[0, :-1], sample[0, 1:])
        hook.remove()
        ((x, *more), y) = calls[0]
        (arriving,) = torch.autograd.grad(loss, y)
        for module in totals:
            parameter = module.get_submodule(weight)._parameters["weight"]
            assert parameter is not None
            output = module(x.detach(), *more)
            (gradient,) = torch.autograd.grad(output, parameter, arriving)
            totals[module] = totals[module] + gradient.double()
    error = float((totals[quantized] - totals[true]).square().sum())
    energy = float(totals[true].square().sum())
    (row,) = (r for r in of_llama.gradients(mode) if r.site == f"{block}.{weight}:weight")
    assert row.scope == "backward"
    assert row.values["relative_mse"] == pytest.approx(error / energy, rel=1e-3)
