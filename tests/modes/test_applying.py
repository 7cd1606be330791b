"""A model in a mode beside the one it was made from: nothing leaks, weights and gradients are shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, mse_loss
from torch.nn.utils import parametrize

import qgate
from qgate import Mode, Model, QgateError, Rule, capture, modes
from qgate.models import Sampling, load
from qgate.models.mamba.network import Mamba, MambaConfig
from qgate.models.mamba.rotation import ROTATED, rotate
from qgate.modes import CalibrationSettings, Quantized, find_mode
from qgate.modes.formats import FORMAT_MODES
from tests.models.checkpoints import randomize
from tests.shares import share

ROW = Rule(":(input|weight)$", "int8", per="row")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


def mlp() -> Model:
    torch.manual_seed(0)
    return Model(MLP(), [torch.randn(3, 24), torch.randn(2, 24)], "mlp")


def mamba(bias: bool = False) -> Model:
    config = MambaConfig(31, 16, 2, 32, d_state=4, bias=bias)
    network = Mamba(config).eval()
    randomize(network)
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(31, (1, n), generator=draw) for n in (9, 20, 20, 1)]
    return Model(network, ids, "small-mamba", calibration=ids[:3], bases={ROTATED: rotate})


def quantized(name: str, model: Model) -> Quantized:
    family = modes.family_of(model)
    mode = Mode(name, "rows", rules=(ROW,)) if name == "rows" else find_mode(name, family)
    calibration = modes.measure(model, CalibrationSettings()) if mode.calibrated else None
    return modes.apply(mode, model, calibration)


def state(model: Model) -> list[tuple[Any, ...]]:
    """All that could be left behind in a model."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        (name, type(m), parametrize.is_parametrized(m), m.training, *(len(getattr(m, h)) for h in hooks), *map(id, m._parameters.values()))
        for name, m in model.module.named_modules()
    ]  # fmt: skip


CASES = [("mlp", mode.name) for mode in FORMAT_MODES] + [("mlp", "rows")]
CASES += [("mamba", name) for name in ("fp16", "0", "2-4", "3", "5-3", "6-0", "int8")]


@share(4)
@pytest.mark.parametrize(("which", "name"), CASES)
def test_the_model_given_is_not_touched(which: str, name: str) -> None:
    model = mlp() if which == "mlp" else mamba()
    before, outputs, weights = state(model), [model(x) for x in model.inputs], model.weights_hash()
    applied = quantized(name, model)
    results = [applied.model(x) for x in model.inputs]
    capture.run(applied.model, ":output$")
    assert state(model) == before
    assert model.weights_hash() == weights
    assert all(torch.equal(model(x), y) for x, y in zip(model.inputs, outputs, strict=True))
    assert not any(
        torch.equal(a, b) for a, b in zip(results, outputs, strict=True) if len(a[0]) > 1
    )
    if applied.mode.dtype is None:
        shared = {id(p) for p in applied.model.module.parameters()}
        assert shared == {id(p) for p in model.in_basis(applied.mode.basis).module.parameters()}


@pytest.mark.parametrize("name", ["rows", "mxfp4", "w4", "nvfp4"])
def test_changed_weights_are_followed(name: str) -> None:
    model = mlp()
    applied = quantized(name, model)
    x = model.inputs[0]
    for change in (
        lambda net: net.up.weight.mul_(-2),
        lambda net: net.load_state_dict(MLP().state_dict()),
        lambda net: torch.optim.SGD(net.parameters(), lr=1.0).step(),
    ):
        with torch.no_grad():
            old = applied.model(x)
            assert torch.equal(old, applied.model(x))
        mse_loss(model.module(x), torch.ones(3, 24)).backward()
        with torch.no_grad():
            change(model.module)
            assert not torch.equal(applied.model(x), old)
            fresh = quantized(name, Model(copy.deepcopy(model.module), model.inputs))
            assert torch.equal(applied.model(x), fresh.model(x))


@pytest.mark.parametrize("name", ["2-1", "5-3", "6-0", "fp16", "int8"])
def test_a_mamba_in_a_mode_follows_the_weights_of_its_basis(name: str) -> None:
    model = mamba()
    applied = quantized(name, model)
    base: Any = model.in_basis(applied.mode.basis)
    x = model.inputs[1]
    with torch.no_grad():
        old = applied.model(x)
        for change in (
            lambda m: m.conv1d.weight.mul_(0.5),
            lambda m: m.A_log.add_(0.5),
            lambda m: m.out_proj.weight.mul_(-1),
            lambda m: m.dt_proj.bias.add_(1),
        ):
            change(base.module.mixers()[1])
            new = applied.model(x)
            assert not torch.equal(new, old)
            old = new


def straight(x: Tensor, value: Tensor) -> Tensor:
    return x + (value - x).detach()


@pytest.mark.parametrize(
    ("name", "weight", "given"),
    [
        ("int8", lambda w: qgate.quantize(w, "int8", granularity="channel", axis=0), lambda x: qgate.quantize(x, "int8", granularity="channel", axis=0)),
        ("mxfp4", lambda w: qgate.quantize(w, "mxfp4"), lambda x: qgate.quantize(x, "mxfp4")),
        ("w8", lambda w: qgate.quantize(w, "int8", granularity="channel", axis=0), lambda x: x),
    ],
)  # fmt: skip
def test_gradients_go_straight_through(name: str, weight: Any, given: Any) -> None:
    model = mlp()
    applied = quantized(name, model)
    net: Any = model.module
    x = model.inputs[0].clone().requires_grad_()
    applied.model.module(x).square().sum().backward()
    ours = [x.grad, *(p.grad for p in net.parameters())]

    twin: Any = copy.deepcopy(net)
    twin.zero_grad()
    y = x.detach().clone().requires_grad_()
    hidden = gelu(
        linear(
            straight(y, given(y.detach())),
            straight(twin.up.weight, weight(twin.up.weight.detach())),
            twin.up.bias,
        )
    )
    out = linear(
        straight(hidden, given(hidden.detach())),
        straight(twin.down.weight, weight(twin.down.weight.detach())),
        twin.down.bias,
    )
    out.square().sum().backward()
    for a, b in zip(ours, [y.grad, *(p.grad for p in twin.parameters())], strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert a.abs().max() > 0


def test_a_step_of_training_in_a_mode_trains_the_model() -> None:
    model = mlp()
    applied = quantized("mxfp4", model)
    optimizer = torch.optim.SGD(applied.model.module.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = mse_loss(applied.model.module(model.inputs[0]), torch.ones(3, 24))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert mse_loss(model(model.inputs[0]), torch.ones(3, 24)) < 0.6 * losses[0]


# Scan ports --------------------------------------------------------------------------------------

U, A = "backbone.layers.0.mixer.scan:u", "backbone.layers.0.mixer.x_proj:input"


@pytest.mark.parametrize("only", [U, A])
def test_u_and_what_x_proj_reads_are_apart(only: str) -> None:
    model = mamba()
    other = A if only == U else U
    rule = Rule(
        only.partition("layers.0.")[2] + "$",
        "int4",
        of="scan" if only == U else "linear",
        per="row",
    )
    exact, ours = (
        capture.run(m, [U, A])
        for m in (model, modes.apply(Mode("t", "t", rules=(rule,)), model).model)
    )
    for index in range(len(model.inputs)):
        assert torch.equal(exact[U][index], exact[A][index])
        assert torch.equal(ours[other][index], exact[other][index])
        rows = qgate.quantize(exact[only][index][0], "int4", granularity="channel", axis=0)
        assert torch.equal(ours[only][index][0], rows)
        assert not torch.equal(ours[only][index], ours[other][index])


@pytest.mark.parametrize("port", ["u", "dt", "B", "C", "z", "output", "state"])
def test_every_port_of_the_scan_can_be_quantized(port: str) -> None:
    model = mamba()
    site = f"backbone.layers.0.mixer.scan:{port}"
    applied = modes.apply(
        Mode("t", "t", rules=(Rule(f"0.*scan:{port}$", "int4", of="scan"),)), model
    )
    exact, ours = capture.run(model, [site])[site], capture.run(applied.model, [site])[site]
    assert [
        torch.equal(a, qgate.quantize(b, "int4")) for a, b in zip(ours, exact, strict=True)
    ] == [True] * 4
    assert not torch.equal(ours[0], exact[0])
    if port != "state":
        assert not torch.equal(applied.model(model.inputs[1]), model(model.inputs[1]))


# Quantized Mamba blocks --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0", "6-0"])
def test_captured_weights_are_those_of_the_codes(name: str) -> None:
    model = mamba()
    applied, base = quantized(name, model), model.in_basis(ROTATED)
    scales = {entry.site: entry.scale for entry in applied.plan.entries}
    pattern = r"mixer\.(\w+_proj|conv1d):weight$"
    ours, exact = capture.run(applied.model, pattern), capture.run(base, pattern)
    assert len(exact) == 2 * 5
    for site in exact:
        scale = scales[site]
        assert scale is not None
        assert torch.equal(ours[site][0], (exact[site][0] / scale).round().clamp(-128, 127) * scale)
        assert not torch.equal(ours[site][0], exact[site][0])


@pytest.mark.parametrize("name", ["0", "3", "6-0", "fp16"])
def test_biases_of_projections_are_not_lost(name: str) -> None:
    model = mamba(bias=True)
    applied = quantized(name, model)
    reference = model.in_basis(ROTATED)
    for sites in (r"mixer\.in_proj:output$", r"mixer\.out_proj:output$"):
        for site, stats in capture.compare_runs(
            applied.model, reference, sites, local=True
        ).items():
            assert stats.metric("relative_mse") < 1e-2, (site, stats)


def test_all_casts_are_counted() -> None:
    model = mamba()
    applied = quantized("0", model)
    tokens = 0
    for x in model.inputs:
        applied.model(x)
        tokens += x.numel()
    counts = applied.casts()
    per_token = {
        "in_cast": 16,
        "in_proj.cast": 64,
        "u_cast": 32,
        "x_proj.cast": 9,
        "dt_proj.cast": 32,
        "hadamard.cast": 32,
    }
    assert {name for name in counts if counts[name]["values"]} == {
        f"backbone.layers.{k}.mixer.{leaf}" for k in range(2) for leaf in per_token
    }
    for leaf, width in per_token.items():
        assert counts[f"backbone.layers.1.mixer.{leaf}"]["values"] == tokens * width
    assert sum(cast_count["saturated"] for cast_count in counts.values()) > 0
    assert all(cast_tally["nonfinite"] == 0 for cast_tally in counts.values())


@pytest.mark.parametrize("name", ["0", "2-0", "4", "5-3", "5-6", "6-1", "6-4"])
def test_nan_is_never_made_a_number(name: str) -> None:
    model = mamba()
    applied = quantized(name, model)
    with torch.no_grad():
        model.in_basis(ROTATED).module.mixers()[0].conv1d.bias[3] = float("nan")  # type: ignore[operator]
    record = capture.run(applied.model, [U])
    assert record[U][1].isnan().any()
    assert not applied.model(model.inputs[1]).isfinite().all()
    assert sum(tally["nonfinite"] for tally in applied.casts().values()) > 0


# Modes of a model --------------------------------------------------------------------------------


def own(make: Callable[[Model], Any]) -> tuple[Mode, Model]:
    torch.manual_seed(0)
    model = Model(MLP(), [torch.ones(2, 24)], "mlp", modes={"mine": make})
    return modes.select("mine", "other", list(model.modes))[0], model


def test_a_mode_of_the_model_is_what_it_returns() -> None:
    def rounded(model: Model) -> nn.Module:
        applied = copy.deepcopy(model.module)
        with torch.no_grad():
            for p in applied.parameters():
                p.copy_(qgate.quantize(p, "int8"))
        return applied

    mode, model = own(rounded)
    applied = modes.apply(mode, model)
    assert applied.plan.to_dict()["sites"][0]["does"] == "quantized by the model's own callable"
    expected = qgate.quantize(model.module.up.weight.detach(), "int8")  # type: ignore[union-attr, arg-type]
    assert torch.equal(capture.run(applied.model, "up:weight")["up:weight"][0], expected)
    assert not applied.casts()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: model.module, "changed the model in place"),
        (
            lambda model: model.module.half() and copy.deepcopy(model.module),
            "changed the model in place",
        ),
        (lambda _: None, "returned NoneType"),
        (lambda model: model, "returned Model"),
    ],
)
def test_a_mode_of_the_model_must_not_change_it(make: Any, words: str) -> None:
    mode, model = own(make)
    with pytest.raises(QgateError, match=words):
        modes.apply(mode, model)


def test_static_scales_have_to_be_there() -> None:
    with pytest.raises(QgateError, match=r"mode '2-1' has static scales.*calibrat"):
        modes.apply(find_mode("2-1", "mamba"), mamba())
    other = load("tiny-mamba", sampling=Sampling(1, 8, 1, 8))
    empty = modes.Calibration({}, CalibrationSettings(), "m", other.weights_hash(), "", 1)
    with pytest.raises(QgateError, match="no scale for site"):
        modes.apply(find_mode("2-1", "mamba"), other, empty)
