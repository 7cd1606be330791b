"""A training loop is collected as it is, and is afterwards as if nothing had looked on."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import qgate
from qgate import QgateError
from qgate.dumps import Dump
from tests.collecting.collected import (
    Network,
    batch,
    found,
    has_hooks,
    loss_of,
    network,
    one,
    records,
    train,
)
from tests.shares import proof

F = torch.nn.functional


def expected(model: Network) -> dict[str, Tensor]:
    """Inputs, outputs and their gradients of a step, by hooks of the plain kind."""
    tensors: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def hook(_m: Any, args: Any, result: Tensor, name: str = name) -> Any:
                tensors[f"{name}:input"] = args[0].detach().clone()
                tensors[f"{name}:output"] = result.detach().clone()
                result = result.clone()  # what is written in place is not a view then
                result.register_hook(
                    lambda g: tensors.__setitem__(f"{name}:grad_output", g.clone())
                )
                return result

            handles.append(module.register_forward_hook(hook))
    loss_of(model, batch()).backward()
    for handle in handles:
        handle.remove()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            tensors[f"{name}:grad_weight"] = module.weight.grad
            gradient = tensors[f"{name}:grad_output"]
            tensors[f"{name}:grad_input"] = gradient @ module.weight.detach()
            tensors[f"{name}:weight"] = module.weight.detach().clone()
    return tensors


def test_every_tensor_is_what_plain_hooks_see(tmp_path: Path) -> None:
    expected_tensors = expected(network())
    model = network()
    with qgate.collect(model, tmp_path / "dump", quant_type="hifp8") as collector:
        loss_of(model, batch()).backward()
    assert collector.missing == []
    assert collector.iterations == [0]
    got = {f"{r.module}:{r.name}": t for r, t in found(tmp_path / "dump", layer_type="linear")}
    assert got.keys() | {"layers.0.attention.qkv:grad_input"} == expected_tensors.keys()
    for name, tensor in got.items():
        if name.endswith(":grad_input"):
            torch.testing.assert_close(tensor, expected_tensors[name])
        else:
            assert torch.equal(tensor, expected_tensors[name]), name
    names = Counter(r.name for r in records(tmp_path / "dump") if r.layer_type == "attention")
    grads = ("grad_query", "grad_key", "grad_value", "grad_output")
    assert names == Counter(dict.fromkeys(("query", "key", "value", "context", *grads), 2))


def test_attention_functions_belong_to_the_layer_that_calls_them(tmp_path: Path) -> None:
    model = network()
    results: list[Tensor] = []

    def keep(_m: Any, _args: Any, result: Tensor) -> None:
        results.append(result.detach().clone())

    handle = model.layers[1].attention.qkv.register_forward_hook(keep)
    with qgate.collect(model, tmp_path / "dump", attention_weights=True):
        loss_of(model, batch()).backward()
    handle.remove()
    of = {"module": "layers.1.attention", "component": "FA", "layer": 1, "layer_type": "attention"}
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in results[0].chunk(3, -1))
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    assert torch.equal(one(tmp_path / "dump", name="query", **of), q)
    assert torch.equal(one(tmp_path / "dump", name="value", **of), v)
    context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(one(tmp_path / "dump", name="context", **of), context)
    weights = one(tmp_path / "dump", name="attention_weights", **of)
    torch.testing.assert_close(weights @ v, context)
    context.backward(one(tmp_path / "dump", name="grad_output", **of))
    for name, tensor in (("grad_query", q), ("grad_key", k), ("grad_value", v)):
        assert torch.equal(one(tmp_path / "dump", name=name, **of), tensor.grad)
    record = next(r for r in records(tmp_path / "dump") if r.name == "query")
    assert record.extra["is_causal"] is True


@pytest.mark.parametrize("level", ["tensors", "statistics"])
def test_training_is_bit_identical(tmp_path: Path, level: Any) -> None:
    plain = network()
    losses = train(plain)
    model = network()
    with qgate.collect(model, tmp_path / "dump", iterations=2, level=level):
        assert train(model) == losses
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)


def test_a_record_says_everything(tmp_path: Path) -> None:
    model = network()
    with qgate.collect(
        model,
        tmp_path / "dump",
        sites="linear",
        quant_type="hifp8",
        first_iteration=7,
        sample=3,
        extra={"tp": 1},
        phases=("forward",),
    ):
        train(model, 1, passes=2)
    record = next(r for r in records(tmp_path / "dump") if r.module == "layers.1.fc1" and r.call)
    assert (record.layer_type, record.layer, record.component) == ("linear", 1, "linear")
    assert (record.operation, record.phase, record.name) == ("forward", "pre", "input")
    assert (record.quant_type, record.rank, record.world_size) == ("hifp8", 0, 1)
    assert (record.iteration, record.sample, record.micro_batch, record.call) == (7, 3, 1, 1)
    assert (record.shape, record.dtype, record.sampled) == ((2, 5, 16), "float32", 1.0)
    assert {"min", "max", "mean", "std", "amax", "hif8.saturated_share"} <= record.stats.keys()
    assert record.nonfinite == {"nan": 0, "posinf": 0, "neginf": 0}
    assert record.extra == {"tp": 1, "counted_as": "bfloat16"}
    header = Dump.open(tmp_path / "dump").header
    assert header["session"]["quant_type"] == "hifp8"
    assert header["session"]["sites"] == "linear"


def test_hooks_are_gone_when_there_is_enough_and_afterwards(tmp_path: Path) -> None:
    model = network()
    original = F.scaled_dot_product_attention
    hooks = torch_optimizer._global_optimizer_post_hooks
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with qgate.collect(model, tmp_path / "dump", iterations=2) as collector:
        for step in range(4):
            assert collector.listening == has_hooks(model) == (step < 2)
            assert (F.scaled_dot_product_attention is not original) == bool(hooks) == (step < 2)
            loss_of(model, batch()).backward()
            optimizer.step()
    assert collector.iterations == [0, 1]
    assert not collector.missing
    assert {r.iteration for r in records(tmp_path / "dump")} == {0, 1}
    assert not has_hooks(model)
    assert F.scaled_dot_product_attention is original
    assert not any(t.name == "qgate-collect" for t in threading.enumerate())


def test_in_place_changes_come_too_late(tmp_path: Path) -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result = self.fc(x)
            result.data.fill_(7)
            x.fill_(7)
            return result

    model, x = Overwriting(), torch.ones(3, 4)
    weight, right = model.fc.weight.detach().clone(), model.fc(x).detach()
    with qgate.collect(model, tmp_path / "dump", phases=("forward",)) as collector, torch.no_grad():
        model(x)
        model.fc.weight.zero_()
        collector.step()
    assert torch.equal(one(tmp_path / "dump", name="input"), torch.ones(3, 4))
    assert torch.equal(one(tmp_path / "dump", name="output"), right)
    assert torch.equal(one(tmp_path / "dump", name="weight"), weight)


def test_called_twice_and_shared(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first
            self.third = nn.Linear(4, 4)
            self.third.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x)).tanh())

    model = Twice()
    with qgate.collect(model, tmp_path / "dump") as collector:
        model(torch.randn(3, 4)).square().sum().backward()
    assert not collector.missing
    first = found(tmp_path / "dump", module="first", operation="forward", name="output")
    assert [record.call for record, _ in first] == [0, 1]
    assert first[0][0].extra["also"] == ["second"]
    (entry, middle) = found(tmp_path / "dump", module="first", name="input")[1]
    assert entry.call == 1
    assert torch.equal(middle, first[0][1])
    grads = found(tmp_path / "dump", name="grad_weight")
    assert [(r.module, r.call) for r, _ in grads] == [("third", 0), ("first", 1), ("first", 0)]
    torch.testing.assert_close(sum(t for _, t in grads), model.first.weight.grad)
    places = {r.tensor for r in records(tmp_path / "dump") if r.name == "weight"}
    assert len(places) == 1  # the same tensor is stored once


def test_an_exception_in_the_loop(tmp_path: Path) -> None:
    model = network()

    def broken() -> None:
        train(model, 1)
        model(batch())
        raise ZeroDivisionError("in the loop")

    with pytest.raises(ZeroDivisionError), qgate.collect(model, tmp_path / "dump", iterations=3):
        broken()
    assert not has_hooks(model)
    dump = Dump.open(tmp_path / "dump")
    assert {r.iteration for r in dump.records()} == {0, 1}
    assert "2 of 3 iterations: stopped by ZeroDivisionError" in str(dump.notes())
    with qgate.collect(model, tmp_path / "next"):
        train(model, 1)


def test_ctrl_c_while_hooks_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = network(), F.scaled_dot_product_attention
    collector = qgate.collect(model, tmp_path / "d", iterations=1).start()
    with monkeypatch.context() as patch:
        patch.setattr("qgate.collecting.functions.replace_everywhere", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, 1)
    collector.stop("KeyboardInterrupt")
    waiting = threading.Thread(target=collector.wait, daemon=True)  # which was without end
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    assert F.scaled_dot_product_attention is plain
    assert records(tmp_path / "d")
    with qgate.collect(model, tmp_path / "e", iterations=1):
        train(model, 1)


def _interrupted(_pairs: object) -> None:
    raise KeyboardInterrupt


def test_collectors_do_not_nest(tmp_path: Path) -> None:
    model = network()
    with qgate.collect(model, tmp_path / "a"):
        with (
            pytest.raises(QgateError, match="do not nest"),
            qgate.collect(network(), tmp_path / "b"),
        ):
            pass
        train(model, 1)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sites": "atention|lin ear"}, ["'atention|lin ear'", "9 linear", "layers.0.fc1"]),
        ({"sites": ["layers.0.fc"]}, ["layers.0.fc1"]),
        ({"sites": "linear("}, ["'linear('", "regular expression"]),
        ({"phases": ("forwards",)}, ["'forwards'", "forward"]),
        ({"phases": ()}, ["phases=()", "one of forward, backward"]),
        ({"level": "all"}, ["'all'", "statistics"]),
        ({"dtype": "fp8"}, ["'fp8'", "keep"]),
        ({"iterations": 0}, ["iterations=0"]),
        ({"samples": 0}, ["samples=0"]),
        ({"counted": 0}, ["counted=0"]),
        ({"ranks": "first"}, ["'first'"]),
        ({"existing": "keep"}, ["'keep'", "append"]),
    ],
)
def test_bad_settings_name_what_there_is(
    tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    model = network()
    with pytest.raises(QgateError) as error, qgate.collect(model, tmp_path / "dump", **settings):
        train(model, 1)
    assert all(word in str(error.value) for word in words), error.value
    assert not has_hooks(model)


@proof
def test_another_iteration_and_quant_type_go_on_in_the_same_dump(tmp_path: Path) -> None:
    model = network()
    for first, label in ((0, "hifp8"), (100, "mxfp8")):
        with qgate.collect(
            model, tmp_path / "dump", first_iteration=first, quant_type=label, existing="append"
        ):
            train(model, 1)
    collected_kinds = {
        (record.iteration, record.quant_type) for record in records(tmp_path / "dump")
    }
    assert collected_kinds == {(0, "hifp8"), (100, "mxfp8")}
    other = qgate.collect(model, tmp_path / "dump", dtype="bf16", existing="append")
    with pytest.raises(QgateError, match="its dtype is 'keep', not 'bf16'"), other:
        train(model, 1)


@proof
def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    model = network()
    for _ in range(2):
        with qgate.collect(model, tmp_path / "dump", existing="overwrite"):
            train(model, 1)
    with pytest.raises(QgateError, match="overwrite"), qgate.collect(model, tmp_path / "dump"):
        train(model, 1)
    assert not has_hooks(model)
    before = len(records(tmp_path / "dump"))
    with qgate.collect(model, tmp_path / "dump", existing="append"):
        train(model, 1)
    assert len(records(tmp_path / "dump")) == 2 * before


def test_nothing_collected_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(QgateError, match="nothing was collected"),
        qgate.collect(network(), tmp_path / "dump"),
    ):
        pass


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    model = network()
    model.unused = nn.Linear(3, 3)
    messages: list[str] = []
    with (
        pytest.warns(UserWarning, match=r"nothing ran in unused[\s\S]*1 of 2 iterations"),
        qgate.collect(model, tmp_path / "dump", iterations=2, say=messages.append),
    ):
        train(model, 1)
    assert "missing: iteration 0: nothing ran in unused" in messages[0]
    assert "nothing ran in unused" in str(Dump.open(tmp_path / "dump").notes())
    with (
        pytest.warns(UserWarning, match="no gradients, the model ran without a graph"),
        qgate.collect(model := network(), tmp_path / "flat"),
        torch.no_grad(),
    ):
        model(batch())
    with (
        pytest.warns(UserWarning, match="grad_output never came to"),
        qgate.collect(model := network(), tmp_path / "half"),
    ):
        model(batch())


def test_names_of_any_kind(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a/b c": nn.Linear(4, 4), "größe\n": nn.Linear(4, 4)})
    model.forward = lambda x: model["größe\n"](model["a/b c"](x))  # type: ignore[method-assign]
    with qgate.collect(model, tmp_path / "d ü/..x", quant_type="../hif 8/ü"):
        model(torch.randn(2, 4)).sum().backward()
    got = records(tmp_path / "d ü/..x")
    assert {r.module for r in got} == {"a/b c", "größe\n"}
    assert {r.quant_type for r in got} == {"../hif 8/ü"}
    assert torch.equal(
        one(tmp_path / "d ü/..x", name="weight", module="a/b c"), model["a/b c"].weight
    )


@proof
def test_sites_are_types_patterns_or_names(tmp_path: Path) -> None:
    def modules(number: int, sites: Any) -> set[str]:
        model = network()
        with qgate.collect(model, tmp_path / str(number), sites=sites):
            train(copy.deepcopy(model) if number < 0 else model, 1)
        return {f"{r.layer_type} {r.module}" for r in records(tmp_path / str(number))}

    assert modules(0, "attention") == {f"attention layers.{i}.attention" for i in (0, 1)}
    assert modules(1, r"layers\.(0|1)\.fc1") == {f"linear layers.{i}.fc1" for i in (0, 1)}
    assert modules(2, ["layers.1.act", "head"]) == {"activation layers.1.act", "linear head"}
    assert modules(3, "^head$|attention") == {
        "linear head",
        *(f"attention layers.{i}.attention" for i in (0, 1)),
    }
    assert modules(4, r"layers\.0$") == {"other layers.0"}
    assert "attention layers.0.attention" in modules(5, r"layers\.0\.attention")


def test_statistics_take_little_room_and_hold_no_values(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512))
    with qgate.collect(model, tmp_path / "dump", level="statistics"):
        model(torch.randn(600, 512)).square().mean().backward()
    got = records(tmp_path / "dump")
    assert all(r.tensor is None and r.counts is not None for r in got)
    assert {r.name: r.sampled < 0.3 for r in got if r.name == "input"} == {"input": True}
    size = sum(f.stat().st_size for f in (tmp_path / "dump").rglob("*") if f.is_file())
    assert size < 45_000 + 20_000 * len(got)
    counts = Dump.open(tmp_path / "dump").counts(got[0])
    assert counts["counts"].sum() == round(got[0].sampled * got[0].elements)


def test_tensors_can_be_stored_smaller(tmp_path: Path) -> None:
    model = network()
    with qgate.collect(model, tmp_path / "dump", dtype="bf16", sites="head"):
        train(model, 1)
    ((record, weight),) = found(tmp_path / "dump", name="weight")
    assert weight.dtype == torch.bfloat16
    assert record.extra["flowed_as"] == "float32"
    assert torch.equal(weight, network().head.weight.bfloat16())
