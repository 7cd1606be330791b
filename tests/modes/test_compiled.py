"""Modes that torch.compile compiled are compared where they run as compiled, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qgate
from qgate import modes
from qgate.errors import QgateError
from tests.gate.test_any_model import failures_after_accepting
from tests.shares import share


@pytest.fixture(autouse=True)
def without_traces() -> Iterator[None]:
    """Forget compiled code."""
    yield
    torch._dynamo.reset()


def off(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """Compile to code that is off by a tenth."""
    return lambda *args: tuple(1.1 * value for value in graph(*args))


class Block(nn.Sequential):
    """A sequence with code of its own: torch compiles no code of its own modules in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(compile_parts: Callable[[nn.Module], nn.Module]) -> qgate.Model:
    torch.manual_seed(0)
    inputs = list(torch.randn(3, 4, 16))

    def mine(model: qgate.Model) -> nn.Module:
        module = copy.deepcopy(model.module)
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return compile_parts(module)

    return qgate.Model(Network(), inputs, name="compiled", modes={"mine": mine})


def whole(backend: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: torch.compile(module, backend=backend)


def in_place(backend: Any) -> Callable[[nn.Module], nn.Module]:
    def build(module: nn.Module) -> nn.Module:
        module.compile(backend=backend)
        return module

    return build


def forward_of(backend: Any) -> Callable[[nn.Module], nn.Module]:
    def build(module: nn.Module) -> nn.Module:
        module.forward = torch.compile(module.forward, backend=backend)  # type: ignore[method-assign]
        return module

    return build


def block(backend: Any) -> Callable[[nn.Module], nn.Module]:
    def build(module: nn.Module) -> nn.Module:
        module.layers[1] = torch.compile(module.layers[1], backend=backend)  # type: ignore[index, operator]
        return module

    return build


def block_in_place(backend: Any) -> Callable[[nn.Module], nn.Module]:
    def build(module: nn.Module) -> nn.Module:
        module.layers[1].compile(backend=backend)  # type: ignore[index, union-attr, operator]
        return module

    return build


def applied(model: qgate.Model) -> qgate.Model:
    return modes.apply(modes.modes_of(model, "mine")[0], model).model


@share(6)
@pytest.mark.parametrize("compile_parts", [whole, in_place, forward_of])
def test_a_compiled_model_has_no_sites_and_its_outputs_are_those_of_the_compiled_code(
    compile_parts: Callable[..., Any], tmp_path: Path
) -> None:
    right, wrong = model_of(compile_parts("eager")), model_of(compile_parts(off))
    assert applied(right).sites() == []
    assert applied(right).layers == ()
    lines = failures_after_accepting(right, wrong, tmp_path, "mine")
    assert lines
    assert all("logits" in line for line in lines)


@share(4)
@pytest.mark.parametrize("compile_parts", [block, block_in_place])
def test_a_compiled_block_is_compared_at_its_output_and_not_inside(
    compile_parts: Callable[..., Any], tmp_path: Path
) -> None:
    right, wrong = model_of(compile_parts("eager")), model_of(compile_parts(off))
    quantized = applied(right)
    assert quantized.layers == ("layers.0", "layers.1", "layers.2")
    assert {site.name for site in quantized.sites() if site.module.startswith("layers.1")} == {
        "layers.1:input", "layers.1:output",
    }  # fmt: skip
    lines = failures_after_accepting(right, wrong, tmp_path, "mine")
    assert any("layers.1:output" in line for line in lines), lines
    assert not any("layers.1.0" in line for line in lines)


class Refusing(nn.Module):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel\nfor this device")


def test_a_mode_that_cannot_run_is_one_line_with_the_words_of_its_error() -> None:
    model = model_of(lambda _module: Refusing())
    with pytest.raises(QgateError) as error:
        applied(model)
    assert str(error.value) == (
        "in mode 'mine' compiled cannot run sample 0 of 0 to 2 (float32 4 x 16): "
        "NotImplementedError: no kernel\\nfor this device"
    )
