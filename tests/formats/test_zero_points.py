"""Integers with zero points, against torch's fake quantization and observers and against ONNX."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import qgate
from qgate.formats import definition
from qgate.formats.losses import Losses

RANGES = {
    "int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7), "uint4": (0, 15),
    "int2": (-2, 1), "uint2": (0, 3),
}  # fmt: skip
EIGHT = ("int8", "uint8")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def numbers(seed: int = 0, rows: int = 24, columns: int = 70) -> torch.Tensor:
    """Rows that lie above zero, below it, and around it, of many magnitudes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) + rng.uniform(-3, 3, (rows, 1))
    return torch.from_numpy(x * np.exp2(rng.integers(-6, 7, (rows, 1)))).float()


def clear(ratios: torch.Tensor) -> torch.Tensor:
    """Where a float32 quotient rounds as the exact one: not beside a tie."""
    return ((ratios - ratios.floor()) - 0.5).abs() > 1e-4


def onnx_run(op: str, outputs: int, inputs: list[np.ndarray], **attributes: Any) -> list[Any]:
    helper = onnx.helper
    names = [f"x{i}" for i in range(len(inputs))]
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, **attributes)],
        "one",
        [helper.make_tensor_value_info(n, onnx.TensorProto.UNDEFINED, None) for n in names],
        [helper.make_tensor_value_info(n, onnx.TensorProto.UNDEFINED, None) for n in results],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    return list(ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True))))


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(name if name in EIGHT else getattr(ml_dtypes, name))


# ---------------------------------------------------------------- given scales and zero points


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RANGES)
def test_a_tensor_by_torch_and_onnx(name: str, seed: int) -> None:
    low, high = RANGES[name]
    rng = np.random.default_rng(seed)
    x = numbers(seed)
    scale, zero_point = float(np.float32(rng.uniform(0.01, 0.3))), int(rng.integers(low, high + 1))
    sure = clear(x.double() / scale)
    y = qgate.quantize(x, name, scale=scale, zero_point=zero_point)
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)
    assert torch.equal(y[sure], theirs[sure])
    encoded = qgate.encode(x, name, scale=scale, zero_point=zero_point)
    inputs = [x.numpy(), np.float32(scale), np.array(zero_point).astype(numpy_dtype(name))]
    (codes,) = onnx_run("QuantizeLinear", 1, inputs)
    assert np.array_equal(encoded.codes.numpy()[sure], codes.astype(np.int64)[sure])
    assert int(encoded.zero_points) == zero_point
    assert torch.equal(encoded.decode(), y)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", RANGES)
def test_channels_by_torch_and_onnx(name: str, axis: int) -> None:
    low, high = RANGES[name]
    rng, x = np.random.default_rng(1), numbers(1)
    scale = torch.from_numpy(rng.uniform(0.01, 0.3, x.shape[axis])).float()
    zero_point = torch.from_numpy(rng.integers(low, high + 1, x.shape[axis])).int()
    options: dict[str, Any] = {"granularity": "channel", "axis": axis}
    options |= {"scale": scale, "zero_point": zero_point}
    y = qgate.quantize(x, name, **options)
    along = (-1, 1) if axis == 0 else (1, -1)
    sure = clear(x.double() / scale.double().view(along))
    theirs = torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, low, high)
    assert torch.equal(y[sure], theirs[sure])
    inputs = [x.numpy(), scale.numpy(), zero_point.numpy().astype(numpy_dtype(name))]
    (codes,) = onnx_run("QuantizeLinear", 1, inputs, axis=axis)
    encoded = qgate.encode(x, name, **options)
    assert np.array_equal(encoded.codes.numpy()[sure], codes.astype(np.int64)[sure])
    (decoded,) = onnx_run("DequantizeLinear", 1, [codes, *inputs[1:]], axis=axis)
    assert np.array_equal(decoded[sure], encoded.decode().numpy()[sure])
    assert torch.equal(encoded.zero_points.int(), zero_point)


@pytest.mark.parametrize("name", RANGES)
def test_groups_by_onnx(name: str) -> None:
    low, high = RANGES[name]
    rng, x = np.random.default_rng(2), numbers(2, columns=96)
    scale = torch.from_numpy(rng.uniform(0.01, 0.3, (24, 3))).float()
    zero_point = torch.from_numpy(rng.integers(low, high + 1, (24, 3)))
    options: dict[str, Any] = {"granularity": "block", "block": 32, "axis": 1, "scale": scale}
    encoded = qgate.encode(x, name, zero_point=zero_point, **options)
    inputs = [x.numpy(), scale.numpy(), zero_point.numpy().astype(numpy_dtype(name))]
    (codes,) = onnx_run("QuantizeLinear", 1, inputs, axis=1, block_size=32)
    sure = clear(x.double() / scale.double().repeat_interleave(32, 1))
    assert np.array_equal(encoded.codes.numpy()[sure], codes.astype(np.int64)[sure])
    assert torch.equal(encoded.decode(), qgate.quantize(x, name, zero_point=zero_point, **options))


@pytest.mark.parametrize("name", RANGES)
def test_every_sixteen_bit_number_with_a_power_of_two(name: str) -> None:
    """Quotients are exact, so every tie is theirs too: to even, before the zero point is added."""
    low, high = RANGES[name]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite() & (every.float().abs() < 2.0**40)]
    for zero_point in range(low, high + 1, max((high - low) // 5, 1)):
        y = qgate.quantize(x, name, scale=0.25, zero_point=zero_point, dtype=torch.float32)
        theirs = torch.fake_quantize_per_tensor_affine(x.float(), 0.25, zero_point, low, high)
        assert torch.equal(y, theirs)


# ---------------------------------------------------------------- scales and zero points from x


@pytest.mark.parametrize("seed", range(5))
def test_scale_and_zero_point_are_those_of_dynamic_quantize_linear(seed: int) -> None:
    x = numbers(seed)[seed * 3 : seed * 3 + 4]
    codes, scale, zero_point = onnx_run("DynamicQuantizeLinear", 3, [x.numpy()])
    encoded = qgate.encode(x, "uint8")
    assert encoded.scales.item() == float(scale)
    assert encoded.zero_points.item() == int(zero_point)
    sure = clear(x.double() / float(scale))
    assert np.array_equal(encoded.codes.numpy()[sure], codes[sure])


@pytest.mark.parametrize(
    ("name", "dtype"), [("uint8", torch.quint8), ("int8", torch.qint8)], ids=["uint8", "int8"]
)
def test_scales_and_zero_points_are_those_of_torch_observers(name: str, dtype: torch.dtype) -> None:
    from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

    x = numbers(3, rows=200)
    low, high = RANGES[name]
    ends = {"dtype": dtype, "quant_min": low, "quant_max": high, "eps": 2.0**-149}
    rows = PerChannelMinMaxObserver(ch_axis=0, qscheme=torch.per_channel_affine, **ends)
    rows(x)
    scales, zero_points = rows.calculate_qparams()
    ours = qgate.encode(x, name, granularity="channel", axis=0, zero_point="minmax")
    assert torch.equal(ours.scales, scales)
    assert torch.equal(ours.zero_points.int(), zero_points.int())
    whole = MinMaxObserver(qscheme=torch.per_tensor_affine, **ends)
    whole(x)
    encoded = qgate.encode(x, name, zero_point="minmax")
    parameters = [parameter.item() for parameter in whole.calculate_qparams()]
    assert [encoded.scales.item(), encoded.zero_points.item()] == parameters


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ["even", "away", "zero"])
@pytest.mark.parametrize("name", RANGES)
def test_the_definition_says_the_same(name: str, rounding: str, dtype: torch.dtype) -> None:
    if (rounding, dtype) == ("zero", torch.float64):
        rounding = "even"  # the definition cuts float64 exactly only at scales of powers of two
    x = numbers(4).to(dtype)
    x[1], x[2, 5], x[3, 6], x[4, 7], x[4, 8] = 0, math.nan, math.inf, -math.inf, 3
    for options in (
        {"granularity": "block", "block": 32},
        {"granularity": "channel", "axis": 0, "inf": "saturate"},
        {"granularity": "channel", "axis": 1},
        {},
        {"narrow": True} if name.startswith("i") else {"inf": "saturate"},
    ):
        q = qgate.Quantizer(name, zero_point="minmax", rounding=rounding, **options)
        defined = definition.quantize(x.double().numpy(), q, double=dtype == torch.float64)
        ours = q(x) if dtype == torch.float64 else qgate.Quantizer(
            name, zero_point="minmax", rounding=rounding, dtype=torch.float64, **options
        )(x)  # fmt: skip
        assert np.array_equal(ours.double().numpy(), defined, equal_nan=True)


def test_large_tensors_take_the_table_of_their_scale() -> None:
    x = numbers(5, 64, 64).bfloat16()
    small = qgate.quantize(x, "uint4")
    large = qgate.quantize(x.repeat(16, 16), "uint4")
    assert torch.equal(large[:64, :64], small)
    options = {"scale": 0.37, "zero_point": 3}
    large = qgate.quantize(x.repeat(16, 16), "int4", **options)
    assert torch.equal(large[-64:, -64:], qgate.quantize(x, "int4", **options))


def test_zero_is_exact_and_ends_are_codes() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.3, 3.0], [0.0, 2.0, 5.0, 8.0], [-8.0, -4.0, -3.0, 0.0]])
    encoded = qgate.encode(x, "uint4", granularity="channel", axis=0)
    assert (qgate.quantize(x, "uint4", granularity="channel", axis=0)[x == 0] == 0).all()
    assert encoded.zero_points.tolist() == [4, 0, 15]
    assert encoded.codes.amax(1).tolist() == [15, 15, 15]
    assert encoded.codes.amin(1).tolist() == [0, 0, 0]


def test_zeros_and_no_numbers() -> None:
    for x in (torch.zeros(2, 3), torch.zeros(0, 3)):
        assert torch.equal(qgate.quantize(x, "uint8"), x)
        assert torch.equal(qgate.quantize(x, "int8", zero_point="minmax"), x)


def test_a_range_beyond_float32_saturates_nothing() -> None:
    x = torch.tensor([-3.3e38, 0.0, 3.3e38])
    y = qgate.quantize(x, "uint8")
    assert ((y - x).abs() <= 3.3e38 / 254).all()
    assert qgate.formats.report(x, "uint8").saturated == 0
    tiny = torch.tensor([-1e-45, 0.0, 1e-45])
    assert torch.equal(qgate.quantize(tiny, "uint8"), tiny)


# ---------------------------------------------------------------- losses and gradients


@pytest.mark.parametrize("name", RANGES)
def test_saturated_elements_and_their_gradient_are_those_of_torch(name: str) -> None:
    low, high = RANGES[name]
    x = numbers(6).requires_grad_()
    zero_point = (low + high) // 3
    options: dict[str, Any] = {"scale": 0.125, "zero_point": zero_point}
    qgate.quantize(x, name, **options).sum().backward()
    ours, x.grad = x.grad, None
    torch.fake_quantize_per_tensor_affine(x, 0.125, zero_point, low, high).sum().backward()
    assert torch.equal(ours, x.grad)
    codes = (x.detach().double() / 0.125).round() + zero_point
    lost = qgate.formats.report(x.detach(), name, **options)
    assert lost.upper + lost.lower == int(((codes > high) | (codes < low)).sum()) > 0
    values = qgate.quantize(x.detach(), name, **options)
    assert lost.flushed == int(((values == 0) & (x.detach() != 0)).sum())


def test_nothing_is_lost_with_zero_points_from_x() -> None:
    x = numbers(7)
    assert qgate.formats.report(x, "uint8").saturated == 0
    poisoned = x.clone()
    poisoned[0, 0] = math.inf
    options: dict[str, Any] = {"granularity": "channel", "axis": 0}
    lost = qgate.formats.report(poisoned, "uint8", **options)
    assert (lost.poisoned, lost.posinf) == (69, 1)
    assert lost + Losses() != Losses()
    saturated = qgate.quantize(poisoned, "uint8", inf="saturate", **options)
    assert saturated.isfinite().all()


def test_a_nan_is_stored_as_zero_or_as_the_largest_code() -> None:
    x = torch.tensor([1.0, math.nan, -1.0])
    options: dict[str, Any] = {"scale": 0.5, "zero_point": 5}
    assert qgate.encode(x, "uint4", nan="zero", **options).codes.tolist() == [7, 5, 3]
    assert qgate.encode(x, "uint4", nan="max", **options).codes.tolist() == [7, 15, 3]
    with pytest.raises(qgate.QgateError, match="uint4 has no NaN"):
        qgate.encode(x, "uint4", **options)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (qgate.QgateError, {"fmt": "uint4", "scale": 1.0, "zero_point": 16}, ["zero_point 16", "0 to 15"]),
        (qgate.QgateError, {"fmt": "int8", "scale": 1.0, "zero_point": -129}, ["-129", "-128 to 127"]),
        (qgate.QgateError, {"fmt": "int8", "zero_point": 3}, ["zero_point=3", "scale"]),
        (qgate.QgateError, {"fmt": "int8", "zero_point": "minmax", "scale": 1.0}, ["minmax", "leave out scale"]),
        (qgate.QgateError, {"fmt": "int8", "zero_point": "min"}, ["'min'", "minmax"]),
        (TypeError, {"fmt": "int8", "scale": 1.0, "zero_point": 0.5}, ["zero_point", "0.5"]),
        (qgate.QgateError, {"fmt": "fp8_e4m3", "zero_point": "minmax"}, ["fp8_e4m3", "'zero_point'"]),
        (qgate.QgateError, {"fmt": "int8", "scale": 1.0, "zero_point": torch.tensor(1.5)}, ["1.5", "integers"]),
        (qgate.QgateError, {"fmt": "int8", "scale": 1.0, "zero_point": torch.tensor([1, 2])}, ["zero point", "(2,)", "()"]),
    ],
)  # fmt: skip
def test_bad_zero_points_get_one_line(
    error: type[Exception], options: dict[str, Any], words: list[str]
) -> None:
    fmt = options.pop("fmt")
    for use in (qgate.quantize, qgate.encode, qgate.formats.report):
        with pytest.raises(error) as caught:
            use(torch.ones(3), fmt, **options)
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in words), message
