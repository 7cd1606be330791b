"""A model's own kernel that stands for a mode is held to that mode's ideal quantizer."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.modes import Kernel, Rule
from qgate.modes import selection as modes
from qgate.modes.setups import ModelSetup
from tests.gate.benches import Block, Stack
from tests.shares import always, share, slow_file

pytestmark = slow_file


def failures(of: qgate.Model, folder: Path) -> list[str]:
    """First lines of what an update cannot accept."""
    bench = Bench(ModelSetup("net"), _model=of)
    session = ModelGates(bench, folder, Policy(), updating="all")
    mode = bench.setup.select("mine", of)[0]
    outcomes = [session.layer("layer_outputs", mode, layer) for layer in bench.layers]
    return [outcome.text.splitlines()[0] for outcome in outcomes if not outcome.passed]


def test_a_kernel_that_does_what_it_stands_for_is_within_its_budget(tmp_path: Path) -> None:
    right = model_of(by_divisor(127, -127), "int8")
    bench = Bench(ModelSetup("net"), _model=right)
    rows = bench.site_errors(bench.quantized(bench.setup.select("mine", bench.model)[0]))
    ideal_rows = [row for row in rows if row.ideal is not None]
    assert [row.site for row in ideal_rows] == [
        f"layers.{k}.{name}:output" for k in range(3) for name in ("up", "down")
    ], "what a kernel quantizes inside cannot be seen, what it returns can"
    for row in ideal_rows:
        assert row.ideal is not None
        assert abs(10 * math.log10(row.values["relative_mse"] / row.ideal["relative_mse"])) < 0.05
        assert row.quantizer == "int8"
    assert failures(right, tmp_path) == []


@share(4)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"divisor": 63}, "dB over the ideal int8 quantizer, 0.5 allowed"),
        ({"divisor": 0}, "better than an ideal int8 quantizer: nothing is quantized here"),
        ({"without_bias": "layers.0.up"}, "dB over the ideal int8 quantizer"),
        ({"stands_for": "mxfp8", "divisor": 7}, "dB over the ideal mxfp8 quantizer"),
    ],
    ids=["seven-bits", "not-quantized", "dropped-bias", "other-format"],
)
def test_a_kernel_that_does_not_cannot_be_accepted(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    divisor, stands_for = given.pop("divisor", 127), given.pop("stands_for", "int8")
    cast = by_divisor(divisor, -divisor) if divisor else lambda x: x
    failure_lines = failures(model_of(cast, stands_for, **given), tmp_path)
    assert len(failure_lines) == (1 if given else 3)
    assert all(words in line for line in failure_lines), failure_lines


# What a row of the kernel's input or weight is quantized by.
RowCast = Callable[[Tensor], Tensor]


def by_divisor(divisor: float, low: int, factor: float = 1.0) -> RowCast:
    def cast(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / divisor
        return (x / scale).round().clamp(low, 127) * scale * factor

    return cast


def in_groups_of_its_neighbor(x: Tensor) -> Tensor:
    """Quantize MXFP8 with groups that begin one element late."""
    shifted = qgate.quantize(x.roll(-1, -1), "mxfp8")
    return shifted.roll(1, -1)


def with_searched_scales(x: Tensor) -> Tensor:
    best, error = x, torch.full((*x.shape[:-1], 1), torch.inf)
    for factor in torch.linspace(0.8, 1.02, 12):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) * factor / 127
        y = (x / scale).round().clamp(-127, 127) * scale
        squares = (y - x).square().sum(-1, keepdim=True)
        best, error = torch.where(squares < error, y, best), torch.minimum(squares, error)
    return best


def with_stored_scales(dtype: torch.dtype, steps: int = 0) -> RowCast:
    """Return a cast whose scales are kept in 16 bits; that of one row of weights is steps off."""

    def cast(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        stored_scale = scale.to(dtype)
        if len(x) > 3 and x.dim() == 2:
            for _ in range(steps):
                stored_scale[3] = torch.nextafter(stored_scale[3], stored_scale[3] + 1)
        return (x / scale).round().clamp(-127, 127) * stored_scale.float()

    return cast


class CastProduct(nn.Module):
    def __init__(self, linear: nn.Linear, cast: RowCast, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias, self.cast, self.dtype = linear.weight, linear.bias, cast, dtype

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(self.cast(x), self.cast(self.weight), self.bias)
        return y.to(self.dtype).to(x.dtype)


def model_of(
    cast: RowCast,
    stands_for: Any,
    dtype: torch.dtype = torch.float32,
    without_bias: str = "",
    **options: Any,
) -> qgate.Model:
    torch.manual_seed(0)

    def build(reference: qgate.Model) -> nn.Module:
        quantized = copy.deepcopy(reference.module)
        for name, module in [*quantized.named_modules()]:
            if isinstance(module, nn.Linear):
                if name == without_bias:
                    module.bias = None
                quantized.set_submodule(name, CastProduct(module, cast, dtype))
        return quantized

    samples = [torch.randn(2, 16, 32) for _ in range(2)]
    kernel = Kernel(build, stands_for, **options)
    return qgate.Model(Stack(Block), samples, "net", modes={"mine": kernel})


def quantizers_of(model: qgate.Model) -> set[str]:
    bench = Bench(ModelSetup("net"), _model=model)
    rows = bench.site_errors(bench.quantized(bench.setup.select("mine", model)[0]))
    return {row.quantizer for row in rows if row.ideal is not None}


@share(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cast", "stands_for", "quantizer"),
    [
        (by_divisor(127, -127), "int8", "int8"),
        (by_divisor(127.5, -128), "int8", "int8 (scale amax/127.5)"),
        (by_divisor(128, -128), "int8", "int8 (scale amax/128)"),
        (lambda x: qgate.quantize(x, "mxfp8"), "mxfp8", "mxfp8"),
        (
            lambda x: qgate.quantize(x, "mxfp8", scale_rule="ceil"),
            "mxfp8",
            "mxfp8 (scale rule ceil, ties to even)",
        ),
    ],
    ids=["127", "127.5", "128", "floor", "ceil"],
)
def test_the_convention_of_a_right_kernel_is_named(
    cast: RowCast, stands_for: str, quantizer: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    of = model_of(cast, stands_for, dtype)
    assert quantizers_of(of) == {quantizer}
    assert failures(of, tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_stored_in_16_bits_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    of, name = model_of(with_stored_scales(dtype), "int8"), str(dtype).removeprefix("torch.")
    assert quantizers_of(of) == {
        f"int8 (scale amax/127, stored as {name} after the codes were made)"
    }
    assert failures(of, tmp_path) == []


@share(5)
@pytest.mark.parametrize(
    ("cast", "stands_for", "words"),
    [
        (by_divisor(127.5, -128, 1.03), "int8", "dB over the ideal int8"),
        (
            in_groups_of_its_neighbor,
            "mxfp8",
            "no convention of mxfp8 gives these values: the nearest is",
        ),
        (
            with_searched_scales,
            "int8",
            "no convention of int8 gives these|better than an ideal int8",
        ),
        (
            with_stored_scales(torch.bfloat16, 1),
            "int8",
            "no convention of int8 gives these|over the ideal int8",
        ),
        (by_divisor(127, -127), "fp8_e4m3", "better than an ideal fp8_e4m3"),
    ],
    ids=["3-percent", "groups-off-by-one", "searched-undeclared", "one-step", "int8-for-fp8"],
)
def test_a_kernel_that_no_convention_explains_is_red(
    cast: RowCast, stands_for: str, words: str, tmp_path: Path
) -> None:
    lines = failures(model_of(cast, stands_for), tmp_path)
    assert len(lines) == 3
    assert all(re.search(words, line) for line in lines), lines


@share(3)
@pytest.mark.parametrize(
    "stands_for",
    [
        modes.find_mode("int8", "other"),
        Rule(":(input|weight)$", "int8", per="row"),
        qgate.Quantizer("int8", granularity="block", block=32, axis=-1),
    ],
    ids=["mode", "rule", "quantizer"],
)
def test_a_kernel_stands_for_a_mode_a_rule_or_a_quantizer(stands_for: Any, tmp_path: Path) -> None:
    by_32 = isinstance(stands_for, qgate.Quantizer)

    def cast(x: Tensor, divisor: float = 127) -> Tensor:
        blocks = x.reshape(*x.shape[:-1], -1, 32) if by_32 else x
        return by_divisor(divisor, -127)(blocks).reshape(x.shape)

    assert quantizers_of(model_of(cast, stands_for)) == {"int8"}
    assert failures(model_of(cast, stands_for), tmp_path) == []
    assert len(failures(model_of(lambda x: cast(x, 63), stands_for), tmp_path)) == 3


def test_a_kernel_stands_for_nothing_else() -> None:
    with pytest.raises(QgateError, match="a Mode, a Rule or a Quantizer, not for 8"):
        Kernel(len, 8)  # type: ignore[arg-type]


@always
def test_searched_scales_are_held_by_their_error_where_declared(tmp_path: Path) -> None:
    assert failures(model_of(with_searched_scales, "int8", convention="mse"), tmp_path) == []
    wrong = model_of(by_divisor(63, -63), "int8", convention="mse")
    assert all("dB over the ideal int8" in line for line in failures(wrong, tmp_path))
    with pytest.raises(QgateError, match="unknown convention of a kernel 'msee'"):
        model_of(with_searched_scales, "int8", convention="msee")


@pytest.mark.parametrize("name", ["int9", "mine", "2-1", ""])
def test_what_it_stands_for_is_a_mode_that_fits(name: str) -> None:
    of = model_of(by_divisor(127, -127), name)
    setup = ModelSetup("net")
    if not name:
        assert setup.select("mine", of)[0].stands_for == ""
        return
    with pytest.raises(QgateError, match=f"unknown mode that 'mine' of net stands for '{name}'"):
        setup.select("mine", of)
