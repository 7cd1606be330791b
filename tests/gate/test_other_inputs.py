"""Products of qgate's own modes in shapes and at values that no sample has: planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.gate.measuring.bench import Bench
from qgate.modes.setups import ModelSetup
from tests.gate.benches import LLAMA, bench, mode_of
from tests.shares import share, slow_file

pytestmark = slow_file

Fault = Callable[[Tensor, Tensor], Tensor]
SITE = "model.layers.1.mlp.down_proj"


def where(at: Callable[[Tensor], bool]) -> Fault:
    """Return a fault that makes a result 1 % too large at some shapes of the input."""
    return lambda x, y: y * 1.01 if at(x) else y


def without_numbers(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x == 0).all(-1, keepdim=True), torch.nan, y)


def beside_outliers(x: Tensor, y: Tensor) -> Tensor:
    size = x.abs()
    return torch.where(size.amax(-1, True) > 1e3 * size.median(-1, True)[0], y * 1.01, y)


OF_SHAPES: dict[str, Fault] = {
    "at 129 to 200 rows (right at 112 and 700)": where(lambda x: 129 <= x.shape[-2] <= 511),
    "at 700 tokens": where(lambda x: 513 <= x.shape[-2] <= 1000),
    "at 129 tokens without a batch axis": where(lambda x: x.dim() == 2),
    "at 64 samples": where(lambda x: x.dim() == 3 and len(x) > 16),
}
OF_VALUES: dict[str, Fault] = {
    "with rows of zeros: 1,024 of 2,048 results are NaN": without_numbers,
    "1,048,576 times as large: 2,0": lambda _x, y: y.where(y.abs() < 1e4, 0.0),
    "1,048,576 times smaller: ": lambda _x, y: y.where(y.abs() > 1e-6, 0.0),
    "with one large channel: ": beside_outliers,
    "with one NaN: 128 NaN of the definition became finite": lambda _x, y: y.nan_to_num(),
}


def wrong(of: Bench, mode: str, module: str, fault: Fault | None) -> list[tuple[str, str]]:
    """Return the site and the words of what does not conform in a mode with a fault."""
    chosen = mode_of(of, mode)
    faulty = of.quantized(chosen).model.module.get_submodule(module)
    right = faulty.forward
    if fault is not None:
        faulty.forward = lambda x: fault(x, right(x))  # type: ignore[assignment]
    rows = of.measure(chosen)
    assert rows
    return [
        (row.site, figure.about)
        for row in rows
        for figure in row.conformance or ()
        if figure.differing
    ]


@share(8)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "fp8_e4m3", "bf16", "w4"])
@pytest.mark.parametrize("words", [*OF_SHAPES, *OF_VALUES])
def test_a_product_that_is_wrong_elsewhere_is_named(words: str, mode: str) -> None:
    faults = wrong(bench(LLAMA, layers=2), mode, SITE, (OF_SHAPES | OF_VALUES)[words])
    assert [site for site, _ in faults] == [f"{SITE}:output"]
    if words in OF_VALUES:
        assert faults[0][1].startswith(f"is wrong for inputs {words.partition(':')[0]}"), faults
    else:
        assert f"gives other values {words}" in faults[0][1], faults
        assert "1.01 times" in faults[0][1]


@share(6)
@pytest.mark.parametrize("mode", ["int8", "nvfp4", "bf16"])
def test_one_module_of_a_kind_is_called_with_thousands_of_rows(mode: str) -> None:
    fault = where(lambda x: x.numel() // x.shape[-1] > 4096)
    first = "model.layers.0.self_attn.q_proj"
    ((site, words),) = wrong(bench(LLAMA, layers=2), mode, first, fault)
    assert site == f"{first}:output"
    assert re.search(r"at (4,097|6,147) and more rows", words), words


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, stride=2, groups=2)
        self.turned = nn.ConvTranspose2d(16, 8, 2)
        self.last = nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(image))))
        return self.last(self.turned(x).mean((2, 3)))  # type: ignore[no-any-return]


def images(mode: str, module: str = "first", fault: Fault | None = None) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    samples = [torch.randn(2, 3, 12, 12) for _ in range(3)]
    model = qgate.Model(Convolutions(), samples, "images", calibration=samples)
    return wrong(Bench(ModelSetup("images"), _model=model), mode, module, fault)


@share(6)
@pytest.mark.parametrize("mode", ["int8", "fp8_e4m3", "mxfp8", "bf16"])
def test_convolutions_are_held_at_hard_inputs(mode: str) -> None:
    assert images(mode) == []
    lost: Any = lambda _x, y: y.where(y.abs() < 1e4, 0.0)  # noqa: E731
    for module in ("first", "second", "turned", "last"):
        ((site, words),) = images(mode, module, lost)
        assert site == f"{module}:output"
        assert words.startswith("is wrong for inputs 1,048,576 times as large"), words


@share(6)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16", "w4"])
def test_massive_values_of_the_residual_that_are_cut_are_named(mode: str) -> None:
    of = bench(LLAMA, layers=2)
    chosen = mode_of(of, mode)
    block: Any = of.quantized(chosen).model.module.get_submodule("model.layers.1")
    right = block.forward
    block.forward = lambda hidden: right(hidden).clamp(-1e3, 1e3)
    (row,) = [row for row in of.measure(chosen) if row.why]
    assert row.site == "model.layers.1:output"
    assert "no value is above 1000" in row.why["isolated"]
    assert "massive values" in row.why["isolated"]
