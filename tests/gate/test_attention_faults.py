"""Faults planted in attention whose own tensors are quantized are red, and named at their stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate import modes, quantize
from qgate.models import Model
from qgate.modes.attention.casting import StoredSide
from qgate.modes.attention.core import Attend, AttentionCore
from tests.gate.test_cache_faults import findings, load, rows_of
from tests.shares import share, slow_file

pytestmark = slow_file

ATTENTION_MODES = [mode.name for mode in modes.select("attn-*", "other")]
STAGES = ("attention:queries", "attention:scores", "attention:weights", "attention:output")
Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[str, Plant, str, str]] = {}


@pytest.fixture(scope="module")
def loaded() -> tuple[Model, modes.Calibration]:
    return load()


@share(8)
@pytest.mark.parametrize("name", ATTENTION_MODES)
def test_healthy_attention_is_green(name: str, loaded: tuple[Model, modes.Calibration]) -> None:
    rows = rows_of(loaded, name)
    assert findings(rows) == {}
    for row in rows:
        if row.scope == "local":
            assert row.ideal is not None
            assert row.values["relative_mse"] == pytest.approx(row.ideal["relative_mse"], rel=1e-5)
            assert row.ideal["relative_mse"] > 0
        else:
            assert row.value("relative_mse@worst_token") <= 0.1 * row.floor, row.site  # type: ignore[operator]
    errors = {row.site: row.values["relative_mse"] for row in rows if row.scope == "local"}
    at = "model.layers.1.self_attn."
    # The product of two quantized tensors has the errors of both.
    parts = errors[f"{at}attention:queries"], errors[f"{at}cache:keys"]
    assert max(parts) / 2 < errors[f"{at}attention:scores"] < 4 * sum(parts)  # type: ignore[operator, arg-type, type-var]


@share(12)
@pytest.mark.parametrize("seed", range(1, 4))
def test_other_texts_are_green(seed: int) -> None:
    other = load(seed)
    for name in ATTENTION_MODES:
        assert findings(rows_of(other, name)) == {}


def fault(mode: str, site: str, words: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (mode, plant, site, words)
        return plant

    return register


_ATTEND, _CAST = Attend.forward, StoredSide.forward


def _attend(patch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Let attention read what `change(core, queries, keys, values)` returns."""
    before = AttentionCore.__init__

    def init(self: AttentionCore, *args: Any, **named: Any) -> None:
        before(self, *args, **named)
        object.__setattr__(self.attend, "of", self)

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Tensor:
        return _ATTEND(self, *change(self.of, q, k, v), *more, **named)

    patch.setattr(AttentionCore, "__init__", init)
    patch.setattr(Attend, "forward", forward)


def _scale(side: StoredSide) -> Any:
    assert side.quantizer is not None
    scale = side.quantizer.scale
    return scale if isinstance(scale, float) else scale.view(1, -1, 1, 1)  # type: ignore[union-attr]


@fault("attn-fp8", "attention:scores", "the scale of the queries is 1, or forgotten: scores are ")
def scale_of_queries_forgotten(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda core, q, k, v: (q / _scale(core.queries), k, v))


@fault("attn-fp8-head", "attention:scores", "the scale of the queries is 1, or forgotten")
def scales_of_heads_of_queries_forgotten(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda core, q, k, v: (q / _scale(core.queries), k, v))


@fault("attn-fp8", "attention:scores", "the scale of the keys is 1, or forgotten")
def scale_of_keys_forgotten(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda core, q, k, v: (q, k / _scale(core.keys), v))


@fault("attn-fp8", "attention:scores", "the scales of queries and keys are 1, or forgotten")
def both_scales_forgotten(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda core, q, k, v: (q / _scale(core.queries), k / _scale(core.keys), v))


@fault("attn-fp8", "attention:scores", "the queries have the scale of the keys")
def scale_of_the_keys_for_queries(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda c, q, k, v: (q / _scale(c.queries) * _scale(c.keys), k, v))


@fault(
    "attn-fp8", "attention:queries", "queries have a scale of 1, the calibrated one is forgotten"
)
def queries_cast_at_a_scale_of_one(patch: pytest.MonkeyPatch) -> None:
    before = AttentionCore.__init__

    def init(self: AttentionCore, *args: Any, **named: Any) -> None:
        before(self, *args, **named)
        object.__setattr__(self.queries, "at_one", True)

    patch.setattr(AttentionCore, "__init__", init)
    patch.setattr(
        StoredSide, "forward",
        lambda self, x: quantize(x, "fp8_e4m3") if hasattr(self, "at_one") else _CAST(self, x),
    )  # fmt: skip


@fault("attn-int8", "attention:scores", "scores are not divided by the root of the width")
def no_division(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda _core, q, k, v: (q * 32**0.5, k, v))


@fault("attn-int8", "attention:scores", "keys are those of another head")
def keys_of_another_head(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda _core, q, k, v: (q, k.flip(1), v))


@fault("attn-int8", "attention:scores", "keys are one token late")
def keys_one_token_late(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda _core, q, k, v: (q, torch.cat([k[:, :, :1], k[:, :, :-1]], 2), v))


@fault("attn-fp8", "cache:decode", "the scale of the values is 1, or forgotten: the context is ")
def scale_of_values_forgotten(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda core, q, k, v: (q, k, v / _scale(core.values)))


@fault("attn-mxfp8", "cache:prefill", "values are those of another head")
def values_of_another_head(patch: pytest.MonkeyPatch) -> None:
    _attend(patch, lambda _core, q, k, v: (q, k, v.flip(1)))


class HalfSoftmax(nn.Softmax):
    """Softmax with powers of two, whose scores lack the factor log2(e)."""

    def forward(self, scores: Tensor) -> Tensor:
        return super().forward(scores * 0.6931471805599453)


@fault("attn-fp8", "attention:softmax", "weights are not the softmax of the scores")
def powers_of_two(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qgate.modes.attention.core.nn.Softmax", HalfSoftmax)


def _weights(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    patch.setattr(
        StoredSide, "forward",
        lambda self, x: change(x)
        if self.choice is not None and self.choice.share == "unit" else _CAST(self, x),
    )  # fmt: skip


@fault("attn-fp8", "attention:weights", "weights are not quantized")
def weights_not_quantized(patch: pytest.MonkeyPatch) -> None:
    _weights(patch, lambda x: x)


@fault("attn-fp8", "attention:weights", "weights have a scale of 1")
def weights_at_a_scale_of_one(patch: pytest.MonkeyPatch) -> None:
    _weights(patch, lambda x: quantize(x, "fp8_e4m3"))


@fault("attn-fp8-head", "attention:output", "the output is not quantized as declared")
def output_not_quantized(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        StoredSide, "forward",
        lambda self, x: x
        if self.choice is not None and self.choice.share == "token" else _CAST(self, x),
    )  # fmt: skip


@share(12)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_and_named(
    name: str, loaded: tuple[Model, modes.Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, plant, site, words = FAULTS[name]
    plant(monkeypatch)
    red = findings(rows_of(loaded, mode))
    assert words in red.get(site, ""), red
