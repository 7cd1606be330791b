"""Modes written as rules: what a plan decides, and that the model computes what the plan says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import qgate
from qgate import Mode, Model, QgateError, Rule, capture, modes
from qgate.models import Sampling, load
from qgate.models.mamba.network import Mamba, MambaConfig
from qgate.models.mamba.rotation import rotate
from qgate.modes.formats import FORMAT_MODES
from tests.models.checkpoints import randomize

WIDTH, INNER = 48, 80  # neither is a multiple of 32
FORMATS = [mode.name for mode in FORMAT_MODES if mode.rules]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.act = nn.GELU()
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def small(**more: Any) -> Model:
    torch.manual_seed(0)
    net = Net()
    randomize(net)
    return Model(net, [torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7, 10]])], "net", **more)


def plan_of(*rules: Rule, model: Model | None = None) -> modes.Plan:
    return modes.make_plan(Mode("mine", "a test", rules=rules), model or small())


def put(model: Model, *rules: Rule) -> Model:
    return modes.apply(Mode("mine", "a test", rules=rules), model).model


def by_rows(x: Tensor, fmt: str) -> Tensor:
    """One scale per row of the last axis, the long way."""
    flat = x.reshape(-1, x.shape[-1])
    return torch.stack([qgate.quantize(row, fmt, granularity="tensor") for row in flat]).view_as(x)


def by_groups(x: Tensor, fmt: str, size: int) -> Tensor:
    parts = [by_rows(part.contiguous(), fmt) for part in x.split(size, -1)]
    return torch.cat(parts, -1)


def passed(model: Model, *sites: str) -> list[list[Tensor]]:
    record = capture.run(model, list(sites))
    return [record[site] for site in sites]


# Plans -------------------------------------------------------------------------------------------


def test_the_first_rule_that_finds_a_site_decides_it() -> None:
    plan = plan_of(
        Rule(r"layers\.0\.up:weight", "mxfp4"),
        Rule(r"layers\.1\.", None),
        Rule(r":weight$", "int8", per="row"),
        Rule(r"\.down:", "mxfp8"),
    )
    assert [(e.site, e.does) for e in plan.entries] == [
        ("layers.0.up:weight", "mxfp4_e2m1 per 32"),
        ("layers.0.down:input", "mxfp8_e4m3 per 32"),
        ("layers.0.down:weight", "int8 per output channel"),
        ("layers.0.down:output", "mxfp8_e4m3 per 32"),
    ]
    assert list(plan.quantizers()) == [entry.site for entry in plan.entries]


def test_a_site_left_alone_is_left_alone() -> None:
    model = small()
    q = put(model, Rule(r"up:", None), Rule(r":(input|weight)$", "int8", per="row"))
    (a, b), (ra, rb) = (
        passed(q, "layers.0.up:input", "layers.0.up:weight"),
        passed(model, "layers.0.up:input", "layers.0.up:weight"),
    )
    assert torch.equal(a[0], ra[0])
    assert torch.equal(b[0], rb[0])
    assert not torch.equal(*(passed(m, "layers.0.down:weight")[0][0] for m in (q, model)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_head_stays_as_it_is(name: str) -> None:
    for model in (small(), load("tiny-llama", sampling=Sampling(samples=1, seqlen=8))):
        plan = modes.make_plan(modes.find_mode(name, "other"), model)
        assert model.head == ("lm_head",)
        assert len(plan.entries) >= 4
        assert not any(entry.site.startswith("lm_head") for entry in plan.entries)
    headless_plan = modes.make_plan(modes.find_mode(name, "other"), small(head=()))
    assert any(entry.site.startswith("lm_head") for entry in headless_plan.entries)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([Rule(r"mlp.*:weight", "int8")], ["'mlp.*:weight'", "linear sites", "layers.0.up:input"]),
        ([Rule(r"lm_head", "int8")], ["'lm_head'", "layers.1.down:output"]),
        ([Rule(r"up:", "int8"), Rule(r"0\.up:w", "int4")], ["'0\\\\.up:w'", "rules before it"]),
        ([Rule(r"up:", "int8", of="conv")], ["conv sites", "none of that kind"]),
        ([Rule(r"up:", "int8", of="linaer")], ["unknown kind", "'linaer'", "Did you mean linear"]),
        ([Rule(r"up:(", "int8")], ["'up:('", "rule of mode mine", "not a regular expression"]),
        ([Rule(r"up:", "int9")], ["unknown format", "'int9'", "int8"]),
        ([Rule(r"up:w", "mxfp8", per="row")], ["mxfp8", "no option 'granularity'"]),
        ([Rule(r"up:w", "int8", options={"blocks": 3})], ["blocks"]),
    ],
)
def test_a_rule_that_cannot_work_is_an_error(rules: list[Rule], words: list[str]) -> None:
    with pytest.raises((QgateError, TypeError)) as caught:
        plan_of(*rules)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"), [("2-1", "Mamba models"), ("fp16", "models other than Mamba")]
)
def test_a_mode_that_does_not_fit_the_model_is_an_error(name: str, kind: str) -> None:
    network = Mamba(MambaConfig(16, 16, 1, 32))
    mamba = Model(network, [torch.tensor([[1, 2]])], "m", bases={"rotated": rotate})
    mode, model = (
        (modes.find_mode(name, "other"), mamba)
        if name == "fp16"
        else (modes.find_mode(name, "mamba"), small())
    )
    with pytest.raises(
        QgateError, match=f"mode '{name}' does not fit {model.name}: it is for {kind}"
    ):
        modes.apply(mode, model)


def test_a_plan_as_text_and_as_data() -> None:
    plan = plan_of(
        Rule(r"up:input", "int8", options={"scale": 0.25}), Rule(r"up:w", "int8", per="row")
    )
    data = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert (data["mode"], data["model"], data["basis"]) == ("mine", "net", "plain")
    assert data["sites"][:2] == [
        {"site": "layers.0.up:input", "does": "int8 per tensor", "scale": 0.25, "origin": "given"},
        {"site": "layers.0.up:weight", "does": "int8 per output channel", "scale": None, "origin": "amax of the channel"},
    ]  # fmt: skip
    lines = str(plan).splitlines()
    assert lines[0] == "mode mine on net, basis plain: a test"
    assert [line.split()[0] for line in lines[4:]] == [entry["site"] for entry in data["sites"]]
    assert lines[4].split() == ["layers.0.up:input", "int8", "per", "tensor", "0.25", "given"]
    assert str(modes.make_plan(modes.find_mode("fp32", "other"), small())).endswith(
        "Nothing is quantized."
    )


def test_linear_layers_in_a_list_are_no_blocks() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            return sum((head(x) for head in self.heads), torch.zeros(()))

    model = Model(Many(), [torch.ones(1, 8)])
    plan = modes.make_plan(modes.find_mode("int8", "other"), model)
    assert [entry.site for entry in plan.entries][:2] == ["heads.0:input", "heads.0:weight"]
    assert len(plan.entries) == 10
    net = small().module
    assert small().layers == ("layers.0", "layers.1")
    assert all(type(net.get_submodule(name)) is Block for name in small().layers)


# What is computed --------------------------------------------------------------------------------

Obvious = Callable[[Tensor], Tensor]
OBVIOUS: dict[str, tuple[Obvious, Obvious]] = {  # weight (out, in), then input
    "int8": (lambda w: by_rows(w, "int8"),) * 2,
    "fp8_e4m3": (lambda w: by_rows(w, "fp8_e4m3"),) * 2,
    "mxfp8": (lambda w: qgate.quantize(w, "mxfp8"),) * 2,
    "mxfp4": (lambda w: qgate.quantize(w, "mxfp4"),) * 2,
    "nvfp4": (lambda w: qgate.quantize(w, "nvfp4"),) * 2,
    "hif8": (lambda w: qgate.quantize(w, "hif8"),) * 2,
    "w8": (lambda w: by_rows(w, "int8"), lambda x: x),
    "w4": (lambda w: by_groups(w, "int4", 128), lambda x: x),
}


@pytest.mark.parametrize("name", OBVIOUS)
def test_linear_layers_read_what_the_mode_says(name: str) -> None:
    weight, read_input = OBVIOUS[name]
    model = small()
    quantized = modes.apply(modes.find_mode(name, "other"), model).model
    before = {"up": "norm", "down": "act"}
    for at, first in before.items():
        module: Any = model.module.get_submodule(f"layers.1.{at}")
        for index in range(2):
            x, w, y, real = (
                tensors[index]
                for tensors in passed(
                    quantized,
                    f"layers.1.{at}:input",
                    f"layers.1.{at}:weight",
                    f"layers.1.{at}:output",
                    f"layers.1.{first}:output",
                )
            )
            assert torch.equal(w, weight(module.weight.detach()))
            assert torch.equal(x, read_input(real))
            assert torch.equal(y, linear(x, w, module.bias))


@pytest.mark.parametrize("name", OBVIOUS)
def test_transposed_weights_are_quantized_along_their_inputs(name: str) -> None:
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(1)
    module = nn.Sequential(conv(INNER, WIDTH))
    with torch.no_grad():
        module[0].weight.copy_(torch.randn(WIDTH, INNER) * torch.logspace(-2, 2, INNER))
    sample = torch.randn(2, 7, WIDTH)
    model = Model(module, [sample], "gpt2")
    weight, read_input = OBVIOUS[name]
    x, w, y = passed(
        modes.apply(modes.find_mode(name, "other"), model).model, "0:input", "0:weight", "0:output"
    )
    expected = weight(module[0].weight.detach().t().contiguous())
    assert torch.equal(w[0].t(), expected)
    assert torch.equal(x[0], read_input(sample))
    torch.testing.assert_close(
        y[0], linear(x[0], expected, module[0].bias.detach()), rtol=1e-5, atol=1e-5
    )
    assert not torch.equal(weight(module[0].weight.detach()), expected.t()) or name == "hif8"


@pytest.mark.parametrize("size", [16, 20, 80, 1000])
def test_groups_of_any_size(size: int) -> None:
    model = small()
    rule = Rule(r"down:(input|weight)$", "int4", per="group", group=size)
    x, w, real = passed(
        put(model, rule), "layers.0.down:input", "layers.0.down:weight", "layers.0.act:output"
    )
    assert torch.equal(w[0], by_groups(model.module.layers[0].down.weight.detach(), "int4", size))  # type: ignore[index, union-attr]
    assert torch.equal(x[1], by_groups(real[1], "int4", size))
    assert plan_of(rule).entries[0].does == f"int4 per {min(size, INNER)}"


@pytest.mark.parametrize(
    ("site", "kind"),
    [
        ("0.up:output", "linear"),
        ("1.norm:output", "norm"),
        ("0.act:input", "activation"),
        ("layers.1:output", "block"),
    ],
)
def test_a_scale_per_token_where_the_width_is_not_that_of_an_input(site: str, kind: str) -> None:
    model = small()
    name = site if site.startswith("layers") else f"layers.{site}"
    quantized = put(model, Rule(site, "int8", of=kind, per="row"))
    assert [torch.equal(x, by_rows(x, "int8")) for x in passed(model, name)[0]] == [False] * 2
    following = {
        "layers.0.up:output": "layers.0.act:input",
        "layers.1:output": "lm_head:input",
    }.get(name, name)
    got = passed(quantized, following)[0]
    exact = passed(model, following)[0]
    assert all(torch.equal(a, by_rows(r, "int8")) for a, r in zip(got, exact, strict=True))


def test_blocks_that_do_not_divide_the_width_end_with_a_short_one() -> None:
    model = small()
    for fmt, block in (("mxfp8", 32), ("mxfp6_e2m3", 32), ("hif4", 64), ("nvfp4", 16)):
        w = passed(put(model, Rule(r"up:weight", fmt)), "layers.0.up:weight")[0][0]
        exact = model.module.layers[0].up.weight.detach()  # type: ignore[index, union-attr]
        assert w.shape == exact.shape == (INNER, WIDTH)
        padded = nn.functional.pad(exact, (0, -WIDTH % block))
        assert torch.equal(w, qgate.quantize(padded, fmt)[:, :WIDTH])
        assert plan_of(Rule(r"up:weight", fmt)).entries[0].does.endswith(f"per {block}")
