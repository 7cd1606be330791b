"""Reference code written as operators: the script gives what the code gives, or is not written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qgate.gate.measuring.reproductions import INPUTS, SCRIPT, of_code
from qgate.gate.segments import traced_code as traced
from qgate.gate.segments.traced_code import TracedCode, traced_code
from qgate.kernel_checks.explained import CodeCall
from tests.gate.test_own_kernel_faults import SUITE, gates_of
from tests.gate.test_reproductions import output_of
from tests.kernel_checks.unseen_code import CODE
from tests.kernel_checks.unseen_faults import UNNAMED, model_with
from tests.kernel_checks.unseen_products import UnseenFault
from tests.shares import always, share, slow_file

pytestmark = slow_file

TABLE = torch.linspace(-1, 1, 16)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(x.float(), (16,), weight.float(), eps=1e-6).to(x.dtype)


def attention(x: Tensor, _weight: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = x.clone()
    y[..., ::2] *= -1
    y.add_(weight).clamp_(max=1)
    return y


def with_constants(x: Tensor, weight: Tensor) -> Tensor:
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    scores = (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1)
    return scores @ x * TABLE.to(x.dtype) + weight * torch.tensor(0.25)


def loop(x: Tensor, weight: Tensor) -> Tensor:
    state, results = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = state * weight.sigmoid() + token
        results.append(state)
    return torch.stack(results, 1)


def largest(x: Tensor, weight: Tensor) -> Tensor:
    values, places = x.topk(2, -1)
    return values * weight[places]


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x / 2


def own_function(x: Tensor, weight: Tensor) -> Tensor:
    halved: Tensor = _Halved.apply(x)  # type: ignore[no-untyped-call]
    return halved * weight


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv1d(x.mT, weight[:4].expand(16, 1, 4), padding=3, groups=16)


FUNCTIONS = [norm, attention, in_place, with_constants, loop, largest, own_function, convolved]


def values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 16, generator=generator), torch.randn(16, generator=generator)


def run(code: TracedCode, arguments: tuple[Tensor, ...]) -> Tensor:
    """Run written code where there is nothing else than torch and the tensors."""
    scope: dict[str, Any] = {
        "torch": torch, "aten": torch.ops.aten, "tensors": dict(code.constants)
    }  # fmt: skip
    lines = [f"def code({', '.join(code.parameters)}):", *code.lines]
    exec("\n    ".join(lines), scope)
    result: Tensor = scope["code"](*arguments)
    return result


@pytest.mark.parametrize("code", FUNCTIONS, ids=lambda code: code.__name__)
def test_written_code_gives_the_values_of_the_code(code: Callable[..., Tensor]) -> None:
    arguments = tuple(value.double() for value in values())
    written = traced_code(code, values(), ["x", "weight"])
    assert written is not None
    torch.testing.assert_close(run(written, arguments), code(*arguments), rtol=1e-9, atol=0)
    moved = tuple(argument + 0.01 for argument in arguments)
    if code is not largest:  # whose places are a matter of values
        torch.testing.assert_close(run(written, moved), code(*moved), rtol=1e-9, atol=0)


def _looks_at_values(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight if float(x.sum()) > 0 else x


def _draws(x: Tensor, weight: Tensor) -> Tensor:
    return functional.dropout(x, 0.5) * weight


def _ends_the_program(_x: Tensor, _weight: Tensor) -> Tensor:
    raise SystemExit(3)


@pytest.mark.parametrize("code", [_looks_at_values, _draws, _ends_the_program])
def test_code_that_is_not_a_list_of_operators_is_not_written(
    code: Callable[..., Tensor],
) -> None:
    assert traced_code(code, values(), ["x", "weight"]) is None


def test_code_of_too_many_operators_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "MOST_OPERATORS", 3)
    assert traced_code(norm, values(), ["x", "weight"]) is None


def test_operators_of_others_are_not_written() -> None:
    library = torch.library.Library("qgate_test_traced", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    twice = torch.ops.qgate_test_traced.twice
    assert traced_code(lambda x, _: twice(x), values(), ["x", "weight"]) is None
    library._destroy()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "names",
    [
        ["class", "class"],
        ["tensors", "mul"],
        ["the block's input", "a.b:output"],
        ['"""', "\n    import os"],
        ["1", "größe"],
    ],
)
def test_names_become_names_of_python_that_hide_nothing(names: list[str]) -> None:
    arguments = tuple(value.double() for value in values())
    written = traced_code(norm, values(), names)
    assert written is not None
    assert all(name.isidentifier() and name.isascii() for name in written.parameters)
    assert torch.equal(run(written, arguments), norm(*arguments))


def call(code: Callable[..., Tensor], like: Callable[..., Tensor]) -> CodeCall:
    return CodeCall(values(), ['x """\\', "weight\nimport os"], code, like, {})


@always
def test_the_script_names_the_fault_and_then_the_arguments(tmp_path: Path) -> None:
    of = call(lambda x, weight: norm(x, weight * weight), norm)
    folder = of_code("a:output", "mine", of).write(tmp_path / "repro", "wrong")
    assert folder is not None
    text = output_of(folder)
    assert text.startswith("code is wrong: argument 1 is taken twice: as its square"), text
    assert "argument 1 is weight" in text


def test_code_that_cannot_be_written_leaves_the_tensor_that_it_should_give(
    tmp_path: Path,
) -> None:
    of = call(lambda x, weight: 1.01 * _looks_at_values(x, weight), _looks_at_values)
    folder = of_code("a:output", "mine", of).write(tmp_path / "repro", "wrong")
    assert folder is not None
    assert "the run: 95 of 96 values differ" in output_of(folder)
    assert sorted(path.name for path in folder.iterdir()) == [INPUTS, SCRIPT]


@share(36)
@pytest.mark.parametrize("fault", CODE, ids=lambda fault: fault.name)
def test_a_script_is_left_that_names_a_fault_between_products(
    fault: UnseenFault, tmp_path: Path
) -> None:
    gated = gates_of(model_with(fault), tmp_path)
    mode = gated.bench.setup.select("mine", gated.bench.model)[0]
    outcome = gated.layer(SUITE, mode, gated.bench.layers[0])
    folder = gated.leave_reproduction(tmp_path / "repro", outcome)
    assert folder is not None
    first = output_of(folder).splitlines()[0]
    assert first.startswith("code is wrong: ")
    assert (fault.name, "gate") in UNNAMED or re.search(fault.words, first), first
