"""Losses of formats, with and without massive elements, against quantized tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qgate.activation_stats._quantizers import quantizer_of, table_name
from qgate.activation_stats.layer_stats import LayerRequest
from qgate.activation_stats.record import LayerActivations
from qgate.formats import FORMATS
from qgate.formats.quantizer import Quantizer, quantize
from qgate.modes.formats import FORMAT_MODES
from qgate.stats import massive_beyond
from tests.activation_stats.layer_records import record_of

MEASURED = ("int8", "fp8_e4m3", "hif8", "bf16", "mxfp8_e4m3", "nvfp4")


def layer(x: Tensor) -> LayerActivations:
    return record_of([x], LayerRequest(formats=MEASURED))


def tensor(dtype: torch.dtype, *, massive: bool = True) -> Tensor:
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    if massive:
        x[3, 5], x[77, 1] = 3000.0, -2500.0
    return x.to(dtype)


def ratio(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MEASURED)
def test_errors_without_massive_elements_are_those_of_the_quantized_tensor(
    name: str, dtype: torch.dtype
) -> None:
    x = tensor(dtype)
    record = layer(x)
    outcome = record["portrait"]["formats"][table_name(name)]
    wide = x.double()
    beyond = massive_beyond(x.bfloat16())
    q = quantize(wide, name)
    below = wide.abs() <= beyond
    assert record["massive"]["elements"] == int((~below).sum()) == 2
    assert record["massive"]["beyond"] == pytest.approx(beyond, rel=1e-6)
    for mask, start in ((torch.ones_like(below), ""), (below, "rest_")):
        noise = float((q - wide)[mask].square().sum())
        assert outcome[f"{start}signal"] == pytest.approx(float(wide[mask].square().sum()))  # type: ignore[literal-required]
        assert outcome[f"{start}noise"] == pytest.approx(noise, rel=1e-6)  # type: ignore[literal-required]


def test_one_element_makes_int8_look_good() -> None:
    """The case that SQNR alone calls the best one: nearly all values become zero."""
    outcome = layer(tensor(torch.float32))["portrait"]["formats"]["int8 per tensor"]
    assert outcome["flushed"] > 0.99
    assert ratio(outcome["signal"], outcome["noise"]) > 30
    assert ratio(outcome["rest_signal"], outcome["rest_noise"]) < 1


def test_without_massive_elements_both_are_the_same() -> None:
    record = layer(tensor(torch.float32, massive=False))
    assert "massive" not in record
    for outcome in record["portrait"]["formats"].values():
        assert (outcome["rest_signal"], outcome["rest_noise"]) == (
            outcome["signal"],
            outcome["noise"],
        )


def test_a_fitted_scale_has_errors_without_massive_elements_too() -> None:
    x = tensor(torch.bfloat16)
    outcome = layer(x)["portrait"]["formats"]["fp8_e4m3 per tensor"]
    wide = x.double()
    scale = 2.0 ** math.ceil(math.log2(3000 / 448))
    q = quantize(wide, "fp8_e4m3", scale=scale)
    below = wide.abs() <= massive_beyond(x)
    assert outcome["fitted_rest_noise"] == pytest.approx(float((q - wide)[below].square().sum()))


def test_the_name_of_a_format_is_the_quantizer_of_its_mode() -> None:
    """A bare name in a table over tensors does what the mode does; any other says what it does."""
    x = tensor(torch.float32, massive=False)
    count = 0
    for mode in FORMAT_MODES:
        for rule in mode.rules:
            name = rule.format
            if name is None or rule.per == "group":
                continue
            count += 1
            axis = {"granularity": "channel", "axis": 0} if rule.per == "row" else {}
            used = quantize(x, name, **axis)  # type: ignore[arg-type]
            assert torch.equal(quantizer_of(name)(x), used)
            same = torch.equal(Quantizer(name)(x), used)
            assert table_name(name) == (name if same else f"{name} per tensor")
    assert count > 8


@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS])
def test_every_format_has_a_name_and_a_quantizer_that_agree(name: str) -> None:
    per_tensor = table_name(name) != name
    assert (quantizer_of(name).granularity == "channel") == per_tensor
