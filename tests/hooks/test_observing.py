"""Hooks on any module: what they hand over, and that they are gone afterwards."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.hooks.nested import first_float_tensor, walk_tensors
from qgate.hooks.observing import ObservedCalls, matching_modules, observe_calls
from qgate.hooks.offloading import bytes_of, layer_by_layer
from qgate.hooks.tensor_cache import TensorCache

Seen = list[tuple[str, str, Tensor]]


def seen_in(
    root: nn.Module, wanted: dict[str, list[str]], *args: Any
) -> tuple[Seen, ObservedCalls]:
    calls: Seen = []
    with observe_calls(root, wanted, lambda *each: calls.append(each)) as flowed, torch.no_grad():
        root(*args)
    return calls, flowed


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Takes()
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(mask=None, ids=torch.ones(2, dtype=torch.long), hidden=x)["out"][0]


class Takes(nn.Module):
    def forward(self, hidden: Tensor, ids: Tensor, mask: Any = None) -> Any:  # noqa: ARG002
        return {"none": None, "out": (hidden + 1, hidden)}


def hooks_of(root: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in root.modules())


def test_inputs_by_keyword_and_outputs_in_containers_are_found() -> None:
    x = torch.randn(2, 3)
    calls, _ = seen_in(ByKeyword(), {"inner": ["input", "output"]}, x)
    assert [(name, role) for name, role, _ in calls] == [("inner", "input"), ("inner", "output")]
    assert torch.equal(calls[0][2], x)
    assert torch.equal(calls[1][2], x + 1)


@dataclass
class Output:
    loss: Any
    hidden: Tensor


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: (None, t),
        lambda t: [torch.ones(1, dtype=torch.long), t],
        lambda t: {"a": {"b": t}},
        lambda t: Output(None, t),
        lambda t: Pair("text", t),
    ],
)
def test_the_first_numbers_of_a_container(wrap: Any) -> None:
    t = torch.randn(3)
    assert first_float_tensor(wrap(t)) is t


@pytest.mark.parametrize("value", [None, "text", 3, torch.ones(2, dtype=torch.long), ()])
def test_what_has_no_numbers_has_none(value: Any) -> None:
    assert first_float_tensor(value) is None


def test_a_value_that_holds_itself_ends() -> None:
    t, value = torch.randn(3), []
    value += [value, t]
    assert len(list(walk_tensors(value))) == 16


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(100 * x) * 0 + self.inner(x)


def test_every_call_counts() -> None:
    calls, flowed = seen_in(Twice(), {"inner": ["output"]}, torch.ones(2))
    assert [float(t.max()) for _, _, t in calls] == [100, 1]
    assert flowed.calls["inner", "output"] == 2


def test_hooks_are_gone_after_an_error() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with (
        pytest.raises(RuntimeError),
        observe_calls(net, {"0": ["input", "output"]}, lambda *_: None),
    ):
        net(torch.randn(1, 2))
    assert hooks_of(net) == 0


def test_hooks_are_gone_when_one_cannot_be_placed() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    roles_by_module = {"0": ["input"], "nowhere": ["input"]}
    with (
        pytest.raises(QgateError, match="no module 'nowhere'"),
        observe_calls(net, roles_by_module, print),
    ):
        pass
    assert hooks_of(net) == 0


def test_a_module_that_never_ran_is_told_and_all_of_them_are_an_error() -> None:
    net = ByKeyword()
    _, flowed = seen_in(net, {"inner": ["input"], "idle": ["output"]}, torch.randn(2, 3))
    assert flowed.silent() == [("idle", "output")]
    flowed.check()
    _, flowed = seen_in(net, {"idle": ["output"]}, torch.randn(2, 3))
    with pytest.raises(QgateError, match=r"nothing was seen of idle \(output\)"):
        flowed.check()


def test_a_pattern_that_matches_nothing_shows_the_first_names() -> None:
    net = nn.Sequential(*[nn.Linear(1, 1) for _ in range(30)])
    with pytest.raises(QgateError, match=r"matches no module.* 0, 1, .*19 and 10 more"):
        matching_modules(net, "layers")
    with pytest.raises(QgateError, match="not a regular expression"):
        matching_modules(net, "(")
    assert matching_modules(net, r"^2\d$") == [str(k) for k in range(20, 30)]


def test_a_shared_tensor_is_looked_at_once_until_it_is_written_to() -> None:
    cache: TensorCache[int] = TensorCache(size=4)
    x = torch.ones(3)
    assert [cache.get(x, lambda t: int(t.sum())) for _ in range(3)] == [
        (3, True),
        (3, False),
        (3, False),
    ]
    x += 1
    assert [cache.get(x, lambda t: int(t.sum())) for _ in range(2)] == [(6, True), (6, False)]
    for _ in range(50):
        cache.get(torch.ones(1), lambda _: 0)
    assert len(cache) <= 4


# Layer by layer ----------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])
        self.layers[2].register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_one_block_at_a_time_is_on_the_device() -> None:
    net = Blocks()
    names = [f"layers.{k}" for k in range(5)]
    on_device: dict[int, Tensor] = {}
    most = []

    def move(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        on_device[copy.data_ptr()] = copy
        return copy

    def count(*_: Any) -> None:
        arrived = [
            name
            for name, module in net.named_modules()
            if name in names and all(p.data_ptr() in on_device for p in module.parameters())
        ]
        most.append(arrived)

    before = {name: (t.data_ptr(), t.clone()) for name, t in net.state_dict().items()}
    x = torch.randn(2, 4)
    expected = net(x)
    roles_by_module = {name: ["input"] for name in names}
    with (
        layer_by_layer(net, names, torch.device("cpu"), move),
        observe_calls(net, roles_by_module, count),
    ):
        assert torch.equal(net(x), expected)
    assert most == [[name] for name in names]
    after = net.state_dict()
    for name, (pointer, value) in before.items():
        assert after[name].data_ptr() == pointer
        assert torch.equal(after[name], value)
    assert hooks_of(net) == 0


def test_weights_are_back_after_an_error() -> None:
    net = Blocks()
    pointers = [p.data_ptr() for p in net.parameters()]
    net.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    names = [f"layers.{k}" for k in range(5)]
    with (
        pytest.raises(ZeroDivisionError),
        layer_by_layer(net, names, torch.device("cpu"), lambda t: t.clone()),
    ):
        net(torch.randn(1, 4))
    assert [p.data_ptr() for p in net.parameters()] == pointers


def test_what_a_block_shares_with_the_rest_is_moved_once() -> None:
    net = Blocks()
    net.layers[1].weight = net.embed.weight
    moved: list[int] = []

    def move(t: Tensor) -> Tensor:
        moved.append(t.data_ptr())
        return t.clone()

    with layer_by_layer(net, ["layers.1"], torch.device("cpu"), move):
        net(torch.randn(1, 4))
    assert len(moved) == len(set(moved))
    assert bytes_of(net) == 4 * (5 * 16 + 6 * 4 + 4)
    with pytest.raises(QgateError, match="names of a model's blocks"):
        layer_by_layer(net, [], torch.device("cpu")).__enter__()
