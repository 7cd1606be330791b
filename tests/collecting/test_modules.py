"""Modules that are called, answer and are wrapped in the ways that real ones are."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qgate
from qgate import QgateError
from tests.collecting.collected import (
    WIDTH,
    batch,
    collect_step,
    found,
    has_hooks,
    loss_of,
    network,
    one,
    records,
    train,
)
from tests.shares import proof


def key(record: Any) -> tuple[Any, ...]:
    return (record.module, record.operation, record.name, record.call, record.micro_batch)


class Recomputing:
    """Activation checkpointing of either kind around each block."""

    def __init__(self, use_reentrant: bool) -> None:
        self.use_reentrant = use_reentrant

    def __call__(self, layer: nn.Module, x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)


@proof
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_recomputed_is_recorded_once(tmp_path: Path, use_reentrant: bool) -> None:
    def run(model: nn.Module, name: str) -> dict[Any, Tensor]:
        with qgate.collect(model, tmp_path / name) as collector:
            for seed in (1, 2):
                loss_of(model, batch(seed).requires_grad_()).backward()
        assert not collector.missing
        got = found(tmp_path / name)
        tensor_by_key = {key(record): tensor for record, tensor in got}
        assert len(tensor_by_key) == len(got)
        return tensor_by_key

    plain = run(network(), "plain")
    recomputed = run(network(around=Recomputing(use_reentrant)), "again")
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[k], recomputed[k]) for k in plain)
    marked = {r.operation for r in records(tmp_path / "again") if "recomputed" in r.extra}
    assert marked == ({"backward"} if use_reentrant else set())


def test_a_module_in_several_recomputed_stretches(tmp_path: Path) -> None:
    class Looped(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(4, 4)
            self.again = again

        def twice(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x).tanh()).tanh()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = checkpoint(self.twice, x, use_reentrant=True) if self.again else self.twice(x)
            return x

    dumps = []
    for again in (False, True):
        model = Looped(again)
        with qgate.collect(model, tmp_path / str(again)) as collector:
            for seed in (0, 1):
                torch.manual_seed(seed)
                model(torch.randn(3, 4, requires_grad=True)).square().sum().backward()
        assert not collector.missing
        dumps.append({key(record): tensor for record, tensor in found(tmp_path / str(again))})
    assert dumps[0].keys() == dumps[1].keys()
    assert len(dumps[0]) == 12 * 6
    assert all(torch.equal(dumps[0][k], dumps[1][k]) for k in dumps[0])


class TEStyle(nn.Module):
    """As TransformerEngine's and Megatron's: answers (output, bias) from a function of its own."""

    class _Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return gradients[0] @ weight, gradients[0].flatten(0, -2).T @ x.flatten(0, -2)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._Linear.apply(input_, self.weight if weight is None else weight), self.bias


class ColumnParallelLinear(TEStyle):
    pass


def test_linears_that_return_output_and_bias(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_number = 5
            self.qkv = ColumnParallelLinear()

        def forward(self, x: Tensor) -> Tensor:
            out, bias = self.qkv(x)
            return out + bias

    model = nn.Sequential(Layer())
    collect_step(model, tmp_path / "dump", batch().requires_grad_())
    got = {record.name: tensor for record, tensor in found(tmp_path / "dump", layer=4)}
    assert torch.equal(got["output"], batch() @ got["weight"].T)
    torch.testing.assert_close(got["grad_input"], got["grad_output"] @ got["weight"])
    assert torch.equal(got["grad_weight"], model[0].qkv.weight.grad)


class CoreAttention(nn.Module):
    """As Megatron's: query, key and value are its arguments."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None) -> Any:
        del mask
        weights = (query @ key.transpose(-2, -1)).softmax(-1)
        return {"context": (weights @ value,), "weights": weights}


def test_attention_modules_by_keyword(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core_attention = CoreAttention()

        def forward(self, x: Tensor) -> Tensor:
            q, k = x * 2, x * 3
            return self.core_attention(value=x, query=q, key=k, mask=None)["context"][0]

    model, x = Outer(), batch().requires_grad_()
    collect_step(model, tmp_path / "dump", x, attention_weights=True)
    got = {record.name: tensor for record, tensor in found(tmp_path / "dump", component="FA")}
    assert torch.equal(got["query"], x * 2)
    assert torch.equal(got["value"], x)
    torch.testing.assert_close(got["context"], got["attention_weights"] @ got["value"])
    total = 2 * got["grad_query"] + 3 * got["grad_key"] + got["grad_value"]
    torch.testing.assert_close(total, x.grad)


@proof
def test_huggingface_llama(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (2, 7))
    with qgate.collect(model, tmp_path / "dump") as collector:
        model(input_ids=ids, labels=ids).loss.backward()
    assert not collector.missing
    got = records(tmp_path / "dump")
    assert {r.module for r in got if r.component == "FA"} == {
        f"model.layers.{i}.self_attn" for i in (0, 1)
    }
    assert {r.layer for r in got if r.name == "grad_query"} == {0, 1}
    # Of linear layers, norms and the embedding.
    assert sum(r.name == "grad_weight" for r in got) == 15 + 5 + 1


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_of_torch(tmp_path: Path, need_weights: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=need_weights)[0]

    torch.manual_seed(0)
    model = Outer()
    right = loss_of(model, batch())
    assert collect_step(model, tmp_path / "dump") == right
    inner = {r.name: r for r in records(tmp_path / "dump") if r.component == "FA"}
    assert bool(inner) != need_weights
    assert one(tmp_path / "dump", component="attention", name="context").shape == (2, 5, WIDTH)


def test_fast_paths_of_torch_stay_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2)
    torch.manual_seed(1)
    right = train(copy.deepcopy(model))
    torch.manual_seed(1)
    with qgate.collect(model, tmp_path / "dump"):
        assert train(model) == right


def test_a_tensor_that_cannot_be_kept_does_not_cost_the_others(tmp_path: Path) -> None:
    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, self.weight.T) + self.bias

    model = nn.Sequential(Linear(4, 4))

    def run() -> None:
        with qgate.collect(model, tmp_path / "dump"):
            model(torch.eye(4).to_sparse()).sum().backward()

    with pytest.warns(UserWarning, match="layout sparse_coo is not kept"):
        run()
    names = {r.name for r in records(tmp_path / "dump")}
    assert names >= {"weight", "output", "grad_output"}


@proof
def test_compiled_functions_run_as_written_too(tmp_path: Path) -> None:
    model = network()
    step = torch.compile(lambda x: loss_of(model, x), backend="eager")
    right = step(batch()).item()
    with qgate.collect(model, tmp_path / "dump") as collector:
        loss = step(batch())
        loss.backward()
    assert not collector.missing
    assert loss.item() == right
    assert len(records(tmp_path / "dump")) == 69


def test_autocast_and_half_precision(tmp_path: Path) -> None:
    model = network()
    with torch.autocast("cpu", torch.bfloat16):
        collect_step(model, tmp_path / "dump")
    fc1 = {r.name: r for r in records(tmp_path / "dump") if r.module == "layers.1.fc1"}
    assert {name: record.dtype for name, record in fc1.items()} == {
        "input": "float32", "weight": "float32", "output": "bfloat16",
        "grad_output": "bfloat16", "grad_input": "float32", "grad_weight": "float32",
    }  # fmt: skip
    assert torch.equal(
        one(tmp_path / "dump", module="head", name="grad_weight"), model.head.weight.grad
    )


def test_weights_that_are_computed_at_each_look(tmp_path: Path) -> None:
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    torch.manual_seed(0)
    losses = []
    for name in ("", "dump"):
        torch.manual_seed(0)
        model = nn.Sequential(spectral_norm(nn.Linear(4, 4)), weight_norm(nn.Linear(4, 4)))
        x = torch.randn(3, 4)
        if name:
            with qgate.collect(model, tmp_path / name, phases=("forward",)):
                losses.append([loss_of(model, x).item(), loss_of(model, x).item()])
        else:
            losses.append([loss_of(model, x).item(), loss_of(model, x).item()])
    assert losses[0] == losses[1]


@dataclasses.dataclass
class Answer:
    logits: Tensor
    cache: list[Any]


def test_answers_of_any_shape(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: dict[str, Any]) -> Answer:
            return Answer(self.fc(inputs["x"][0]), [None, {"y": inputs["x"]}])

    model = Outer()
    with qgate.collect(model, tmp_path / "dump", iterations=1, sites="fc|^$") as collector:
        model({"x": (batch(),)}).logits.sum().backward()
    assert not collector.missing


def test_a_view_written_to_in_place_has_its_gradient(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu_(self.fc(x))

    torch.manual_seed(0)
    model = Outer()
    collect_step(model, tmp_path / "dump")
    gradient = one(tmp_path / "dump", name="grad_output")
    out = one(tmp_path / "dump", name="output")
    torch.testing.assert_close(gradient, torch.where(out > 0, 2 * out / out.numel(), 0))
    torch.testing.assert_close(gradient.sum((0, 1)), model.fc.bias.grad)


@proof
def test_compiled_modules_run_as_written_while_they_are_collected(tmp_path: Path) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(network(), backend="eager")
    right = loss_of(compiled, batch()).item()
    assert collect_step(compiled, tmp_path / "dump").item() == right
    assert "layers.0.fc1" in {r.module for r in records(tmp_path / "dump")}
    assert not has_hooks(compiled)
    assert loss_of(compiled, batch()).item() == right


class OddLinear(nn.Module):
    """Takes what cannot be kept, and answers what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Any:
        return {"shape": tuple((x @ self.weight).shape)}


def test_what_cannot_be_kept_does_not_stop_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), OddLinear())
    messages: list[str] = []

    def run() -> None:
        with qgate.collect(model, tmp_path / "dump", phases=("forward",), say=messages.append):
            assert model[1](model[0](torch.randn(2, 4))) == {"shape": (2, 4)}
            assert model[1](torch.ones(3, 4).to_sparse()) == {"shape": (3, 4)}

    with pytest.warns(UserWarning, match="qgate collect"):
        run()
    assert "TypeError: a tensor of layout sparse_coo is not kept at 1" in messages[0]
    assert "TypeError: it returned dict and no tensor at 1" in messages[0]
    names = [r.name for r in records(tmp_path / "dump") if r.module == "1"]
    assert names == ["input", "weight", "weight"]


@proof
def test_a_list_of_models(tmp_path: Path) -> None:
    stages = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 2))]
    with qgate.collect(stages, tmp_path / "dump") as collector:
        stages[1](stages[0](torch.randn(2, 4))).sum().backward()
    assert not collector.missing
    assert {r.module for r in records(tmp_path / "dump")} == {"0.0", "1.0"}
    with pytest.raises(QgateError, match="torch module"):
        qgate.collect(["model"], tmp_path / "other")  # type: ignore[list-item]


def test_by_default_all_modules_with_weights_are_collected(tmp_path: Path) -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    model = nn.Sequential(
        torch.nn.Embedding(5, 8),
        torch.nn.LayerNorm(8),
        torch.nn.LayerNorm(8, elementwise_affine=False),
        torch.nn.Sequential(Scale(), torch.nn.GELU()),
        torch.nn.Linear(8, 8),
        torch.nn.Conv1d(3, 2, 1),
    )
    with qgate.collect(model, tmp_path / "dump", phases=("forward",)):
        model(torch.arange(3))
    modules = [r.module for r in records(tmp_path / "dump") if r.name == "output"]
    assert modules == ["0", "1", "3.0", "4", "5"]
