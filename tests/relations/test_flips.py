"""Codes of attention weights that noise turns are no fault, and whatever else differs there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import Tensor, nn

from qgate.models import Sampling, load
from qgate.modes import Quantized, apply, modes_of
from qgate.modes.attention.core import Attend
from qgate.relations import compute
from qgate.relations.compute import ModelRelations
from qgate.relations.noise import FloatNoise
from tests.shares import proof, share

Change = Callable[[Tensor, int, int], Tensor]
Plant = Callable[[Change], None]
SAMPLING = Sampling(2, 48)
# The middle between codes 7 and 8 of INT8, where a weight of 1 is 127.
BORDER = 7.5 / 127


@pytest.fixture(scope="module")
def quantized() -> Quantized:
    model = load("tiny-llama", sampling=SAMPLING)
    return apply(modes_of(model, "attn-int8")[0], model)


class Changed(nn.Module):
    """A softmax whose result is changed, given how many tokens are read and how many were cached."""

    def __init__(self, change: Change, shared: int) -> None:
        super().__init__()
        self.change, self.shared = change, shared

    def forward(self, scores: Tensor) -> Tensor:
        count = scores.shape[-2] // self.shared
        return self.change(scores.softmax(-1), count, scores.shape[-1])


@pytest.fixture
def plant(quantized: Quantized) -> Iterator[Plant]:
    attend = [m for m in quantized.model.module.modules() if isinstance(m, Attend)][1]
    attention = quantized.model.module.model.layers[1].self_attn
    shared = attention.q_proj.out_features // attention.k_proj.out_features
    softmax = attend.softmax
    yield lambda change: setattr(attend, "softmax", Changed(change, shared))
    attend.softmax = softmax


@pytest.fixture(scope="module")
def float_noise(quantized: Quantized) -> FloatNoise:
    return ModelRelations(quantized, load("tiny-llama", sampling=SAMPLING)).noise


def broken(quantized: Quantized, noise: FloatNoise) -> list[str]:
    relations = ModelRelations(quantized, load("tiny-llama", sampling=SAMPLING))
    relations.noise = noise
    relations.check(frozenset({"chunked"}))
    return [disagreement.site for disagreement in relations.report.disagreements]


def at_border(weights: Tensor, count: int, length: int) -> Tensor:
    """Put a weight of token 19 at a border: which code it gets is decided by its last bits."""
    row = 19 - (length - count)
    if not 0 <= row < count:
        return weights
    moved = weights.clone()
    moved[0, 0, row, 0] = BORDER * (1 - 1e-6 if count == 1 else 1 + 1e-6)
    return moved


@proof
def test_a_turned_code_is_no_fault(
    quantized: Quantized, float_noise: FloatNoise, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(at_border)
    assert broken(quantized, float_noise) == []
    monkeypatch.setattr(compute, "may_be_flips", lambda *_: False)
    assert set(broken(quantized, float_noise)) == {"model.layers.1.self_attn.core.output:input"}


def _scaled(weights: Tensor, count: int, _length: int) -> Tensor:
    return weights * 1.001 if count > 1 else weights


def _one_token(weights: Tensor, count: int, length: int) -> Tensor:
    """Scale the weights of one token of one sample by 2 %, in chunks that hold it."""
    row = 21 - (length - count)
    if count == 1 or not 0 <= row < count:
        return weights
    moved = weights.clone()
    moved[0, :, row] *= 1.02
    return moved


@share(2)
@pytest.mark.parametrize("fault", [_scaled, _one_token])
def test_faults_of_weights_stay_red(
    quantized: Quantized, float_noise: FloatNoise, plant: Plant, fault: Change
) -> None:
    plant(fault)
    assert broken(quantized, float_noise)[:1] == ["model.layers.1.self_attn.core.output:input"]
