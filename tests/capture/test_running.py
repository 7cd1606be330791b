"""What a capture holds is what flowed, and the model is afterwards what it was before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import qgate
from qgate import Model, QgateError, Rule, capture, modes
from qgate.capture import pick_sites, run
from qgate.capture.running import next_token_loss
from tests.capture import networks
from tests.capture.networks import model

OUTPUTS = [f"layers.{k}:output" for k in range(3)]


def by_hand(net: nn.Module, samples: Any) -> dict[str, list[Tensor]]:
    """Inputs and outputs of every module, by plain hooks."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: Any, result: Any) -> None:
            for port, value in (("input", args[0] if args else None), ("output", result)):
                if isinstance(value, Tensor):
                    outputs.setdefault(f"{name}:{port}", []).append(value.detach().clone())

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in net.named_modules()]
    with torch.no_grad():
        for sample in samples:
            net(sample)
    for handle in handles:
        handle.remove()
    return outputs


def hooks(net: nn.Module) -> list[int]:
    """How many there are, module by module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(getattr(module, kind)) for module in net.modules() for kind in kinds]


# Choosing sites ----------------------------------------------------------------------------------


def test_without_a_wish_the_outputs_of_blocks_are_captured() -> None:
    assert list(run(model())) == OUTPUTS
    assert [site.name for site in pick_sites(model())] == OUTPUTS
    alone = Model(nn.Linear(4, 4), [torch.ones(1, 4)], "one")
    with pytest.raises(QgateError, match="one has no list of blocks; say which sites"):
        run(alone)


def test_sites_by_pattern_and_by_name() -> None:
    assert list(run(model(), r"mix:(input|weight)$"))[:2] == [
        "layers.0.mix:input",
        "layers.0.mix:weight",
    ]
    named = ["layers.2.mix:weight", "layers.0:output", "layers.2.mix:weight"]
    record = run(model(), named)
    assert list(record) == ["layers.2.mix:weight", "layers.0:output"]
    assert [len(tensors) for tensors in record.tensors.values()] == [4, 4]
    assert len(run(model(), pick_sites(model(), "norm:output"))) == 3


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("atention", ["'atention' matches no site of net. Sites: ", "layers.0:input"]),
        ("mix:(", ["'mix:(' is not a regular expression"]),
        (["layers.0.mix:outptu"], ["unknown site of net 'layers.0.mix:outptu'", "Did you mean layers.0.mix:output"]),
        (["layers.0:output", "mix"], ["unknown site of net 'mix'"]),
    ],
)  # fmt: skip
def test_a_wish_that_names_nothing_is_an_error(wanted: Any, words: list[str]) -> None:
    with pytest.raises(QgateError) as caught:
        run(model(), wanted)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(QgateError):
        capture.compare_runs(model(), model(), wanted)


def test_a_site_that_nothing_passes_is_an_error() -> None:
    with pytest.raises(QgateError, match="nothing passed unused:output of net in sample 1"):
        run(model(unused_from=9), ["layers.0:output", "unused:output"])
    with pytest.raises(QgateError, match="nothing passes unused:output of net"):
        run(model(), ["layers.0:output", "unused:output"])
    with pytest.raises(QgateError, match=r"captured site 'layers\.1:output'"):
        run(model(), ["layers.0:output"])["layers.1:output"]


def test_no_samples_is_an_error() -> None:
    with pytest.raises(QgateError, match="no samples"):
        run(model(), samples=[])
    with pytest.raises(QgateError, match="no samples"):
        capture.compare_runs(model(), model(), samples=[])


# What is captured --------------------------------------------------------------------------------


@pytest.mark.parametrize("twice", [False, True])
def test_tensors_are_those_of_hooks_made_by_hand(twice: bool) -> None:
    it = model(twice=twice)
    expected = by_hand(it.module, it.inputs)
    record = run(it, r"(layers|lm_head).*:(input|output)$|embed:output")
    assert len(record) > 15
    for site, tensors in record.tensors.items():
        assert len(tensors) == len(expected[site]) == (8 if twice and "layers.2" in site else 4)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected[site], strict=True)), site
        assert not any(tensor.requires_grad for tensor in tensors)
    assert [t.shape[1] for t in record["layers.0:output"]] == [5, 9, 9, 1]
    assert record.nbytes() == sum(t.nbytes for ts in record.tensors.values() for t in ts)
    assert not record.gradients


def test_weights_are_captured_when_their_module_runs() -> None:
    it = model()
    for tensor in run(it, ["layers.1.mix:weight"])["layers.1.mix:weight"]:
        assert torch.equal(tensor, it.module.layers[1].mix.weight)  # type: ignore[union-attr, index, arg-type]


class Apart(networks.Block):
    def forward(self, x: Tensor) -> Any:
        return x + self.mix(self.norm(x))


class InPlace(networks.Block):
    def forward(self, x: Tensor) -> Any:
        y = self.mix(self.norm(x))
        y += x
        return y


@pytest.mark.parametrize("gradients", [False, True])
def test_a_buffer_written_again_is_not_what_is_kept(gradients: bool) -> None:
    sites = r"layers.\d:(input|output)$|mix:output"
    ours, separate_run = (
        run(model(block), sites, gradients=gradients) for block in (InPlace, Apart)
    )
    assert not torch.equal(ours["layers.0.mix:output"][1], ours["layers.0:output"][1])
    for tensors_by_site, expected in (
        (ours.tensors, separate_run.tensors),
        (ours.gradients, separate_run.gradients),
    ):
        assert list(tensors_by_site) == list(expected)
        for site, tensors in expected.items():
            assert len(tensors_by_site[site]) == 4
            assert all(map(torch.equal, tensors_by_site[site], tensors)), site


ANSWERS = [networks.Masked, networks.InTuple, networks.InDict, networks.InOutput]


@pytest.mark.parametrize("block", ANSWERS)
def test_blocks_of_every_kind_are_read_alike(block: type[networks.Block]) -> None:
    plain, other = (
        run(model(kind), r"layers.\d:(input|output)$") for kind in (networks.Block, block)
    )
    assert list(other) == list(plain)
    for site in plain:
        assert all(map(torch.equal, plain[site], other[site])), site


def test_a_block_that_answers_with_no_tensor_is_an_error() -> None:
    with pytest.raises(QgateError, match=r"site layers\.0:output .* returned Opaque"):
        run(model(networks.InObject))


@pytest.mark.parametrize("block", [networks.Block, *ANSWERS])
def test_blocks_of_every_kind_can_be_forced(block: type[networks.Block]) -> None:
    reference = run(model(), r"layers.\d:(input|output)$")
    broken = model(block)
    with torch.no_grad():
        broken.module.layers[0].mix.bias.add_(5)  # type: ignore[union-attr, index, operator]
    local = run(broken, r"layers.\d:(input|output)$", forced=reference)
    for k in range(3):
        assert [*map(torch.equal, local[OUTPUTS[k]], reference[OUTPUTS[k]])] == [k > 0] * 4
        assert torch.equal(local[f"layers.{k}:input"][1], reference[f"layers.{k}:input"][1])


def test_transformers_own_outputs_are_read_and_replaced() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Own(networks.InOutput):
        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            return outputs.BaseModelOutput(last_hidden_state=output.last_hidden_state)

    reference = run(model(), OUTPUTS)
    assert torch.equal(run(model(Own), OUTPUTS)[OUTPUTS[2]][0], reference[OUTPUTS[2]][0])
    mode = modes.Mode("t", "t", rules=(Rule("layers.0:output", "int4", of="block"),))
    ours = run(modes.apply(mode, model(Own)).model, ["layers.0:output", "layers.1:input"])
    expected = qgate.quantize(reference[OUTPUTS[0]][0], "int4")
    assert torch.equal(ours["layers.0:output"][0], expected)
    assert torch.equal(ours["layers.1:input"][0], expected)


# What is left behind -----------------------------------------------------------------------------


class Raises(networks.Block):
    def forward(self, x: Tensor) -> Any:
        if x.shape[1] == 9:
            raise RuntimeError("in the middle")
        return super().forward(x)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("block", [networks.Block, Raises])
def test_no_trace_is_left_even_after_an_error(block: type[networks.Block], gradients: bool) -> None:
    it = model(block)
    grads = [torch.randn_like(p) for p in it.module.parameters()]
    for p, grad in zip(it.module.parameters(), grads, strict=True):
        p.grad = grad
    before = hooks(it.module)
    if block is Raises:
        with pytest.raises(RuntimeError, match="in the middle"):
            run(it, "layers", samples=it.inputs[:2], gradients=gradients)
    else:
        run(it, "layers", gradients=gradients)
    with pytest.raises(QgateError):
        run(it, ["unused:output"], samples=it.inputs[:1], gradients=gradients)
    assert hooks(it.module) == before
    for p, grad in zip(it.module.parameters(), grads, strict=True):
        assert p.grad is grad


def test_a_capture_keeps_no_graph_alive() -> None:
    record = run(model(), "layers", gradients=True)
    tensors = [t for ts in (*record.tensors.values(), *record.gradients.values()) for t in ts]
    assert len(tensors) > 100
    assert all(tensor.grad_fn is None for tensor in tensors)


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_those_of_autograd(twice: bool) -> None:
    it = model(twice=twice)
    record = run(it, r"mix:|norm:output|layers.\d:(input|output)", gradients=True)
    grads_by_site: dict[str, list[Tensor]] = {}

    def keep(site: str) -> Any:
        def hook(_: nn.Module, __: Any, result: Tensor) -> None:
            result.retain_grad()
            grads_by_site.setdefault(site, []).append(result)

        return hook

    outputs = [site for site in record if site.endswith(":output")]
    assert len(outputs) == 9
    handles = [
        it.module.get_submodule(site.partition(":")[0]).register_forward_hook(keep(site))
        for site in outputs
    ]
    it.module.zero_grad()
    for sample in it.inputs:
        logits, single = it.module(sample), sample.shape[1] == 1
        loss = (
            next_token_loss(logits, sample)
            if single
            else cross_entropy(logits[0, :-1], sample[0, 1:])
        )
        loss.backward()
    for handle in handles:
        handle.remove()
    for site in outputs:
        for ours, theirs in zip(record.gradients[site], grads_by_site[site], strict=True):
            torch.testing.assert_close(ours, theirs.grad)
            assert ours.abs().max() > 0
    for k in range(3):
        site = f"layers.{k}.mix:weight"
        assert len(record.gradients[site]) == 1
        weight: Any = it.module.get_submodule(f"layers.{k}.mix").weight
        torch.testing.assert_close(record.gradients[site][0], weight.grad)
        assert len(record.gradients[f"layers.{k}.mix:input"]) == (8 if twice and k == 2 else 4)


def test_what_two_modules_read_has_a_gradient_from_each() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            return self.a(x) + 3 * self.b(x)

    it = Model(Pair(), [torch.ones(1, 4, requires_grad=True)], "pair")
    grads = run(it, "input", gradients=True, loss=lambda y, _: y.sum()).gradients
    pair: Any = it.module
    torch.testing.assert_close(grads["a:input"][0][0], pair.a.weight.sum(0).detach())
    torch.testing.assert_close(grads["b:input"][0][0], 3 * pair.b.weight.sum(0).detach())


def test_gradients_in_float16_are_those_of_a_loss_that_is_scaled() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def gradients(dtype: torch.dtype, at_outputs: float) -> list[Tensor]:
        it = Model(net.to(dtype), [x.to(dtype).requires_grad_()], "two")
        record = run(
            it, r".:(input|weight)", gradients=True, loss=lambda y, _: (y * at_outputs).sum()
        )
        return [grad.detach() for grads in record.gradients.values() for grad in grads]

    small = gradients(torch.float32, 2.0**-27)
    for half, single in zip(gradients(torch.float16, 2.0**-27), small, strict=True):
        torch.testing.assert_close(half, single, rtol=0.2, atol=2.0**-30)
    assert all(grad.abs().max() < 2.0**-22 for grad in small)


@pytest.mark.parametrize("view", [False, True])
def test_gradients_of_what_is_written_into_are_right_or_refused(view: bool) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(6, 6), nn.Flatten(0, 1) if view else nn.Identity())
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.first(x))

    torch.manual_seed(0)
    it = Model(Two(), [torch.randn(2, 6)], "two")
    record = run(
        it, ["first.0:output", "first.1:output"], gradients=True, loss=lambda y, _: y.sum()
    )
    expected = (record["first.0:output"][0] > 0).float()
    assert 0 < expected.sum() < 12
    for site in record:
        assert torch.equal(record.gradients[site][0].view(2, 6), expected)
    with pytest.raises(QgateError, match="act writes into its input in place"):
        run(it, "act:input", gradients=True, loss=lambda y, _: y.sum())


def test_gradients_of_another_loss() -> None:
    it = model()
    record = run(it, ["layers.2:output"], gradients=True, loss=lambda logits, _: logits.sum())
    expected = it.module.lm_head.weight.sum(0)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(record.gradients["layers.2:output"][0], expected.expand(1, 5, -1))


def test_what_takes_no_gradient_is_an_error() -> None:
    frozen = model()
    net: Any = frozen.module
    net.embed.requires_grad_(False)
    with pytest.raises(QgateError, match=r"no gradient reaches layers\.0:input"):
        run(frozen, r"layers.\d:input", gradients=True)
    net.layers[1].requires_grad_(False)
    with pytest.raises(QgateError, match=r"layers\.1\.mix:weight of net takes no gradient"):
        run(frozen, "mix:weight", gradients=True)
    net.requires_grad_(False)
    with pytest.raises(QgateError, match=r"the loss of net takes no gradient.*requires_grad_"):
        run(frozen, gradients=True)


def test_forced_gradients_are_those_of_each_block_alone() -> None:
    """Each block by itself, given the reference's input and the reference's gradient."""
    reference = model()
    sites = r"layers.\d:(input|output)|mix:weight"
    free = run(reference, sites, gradients=True)
    changed = model()
    net: Any = changed.module
    with torch.no_grad():
        for layer in net.layers:
            layer.mix.weight.mul_(1.5)
    forced = run(changed, sites, gradients=True, forced=free)
    for number, layer in enumerate(net.layers):
        weight = torch.zeros_like(layer.mix.weight)
        for index, x in enumerate(free[f"layers.{number}:input"]):
            leaf = x.clone().requires_grad_()
            arriving = free.gradients[f"layers.{number}:output"][index]
            own = torch.autograd.grad(layer(leaf), (leaf, layer.mix.weight), arriving)
            torch.testing.assert_close(forced.gradients[f"layers.{number}:input"][index], own[0])
            weight += own[1]
        torch.testing.assert_close(forced.gradients[f"layers.{number}.mix:weight"][0], weight)
        assert forced.gradients[f"layers.{number}:output"][0].equal(
            free.gradients[f"layers.{number}:output"][0]
        )


def test_gradients_are_forced_at_outputs_that_the_reference_has() -> None:
    reference = run(model(), r"layers.\d:input", gradients=True)
    with pytest.raises(QgateError, match=r"cannot be forced without layers\.0:output"):
        run(model(), r"layers.\d:output", gradients=True, forced=reference)


def test_gradients_work_where_they_are_switched_off() -> None:
    with torch.no_grad():
        record = run(model(), gradients=True)
    assert all(grad.abs().max() > 0 for grad in record.gradients["layers.0:output"])
