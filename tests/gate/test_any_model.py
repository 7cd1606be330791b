"""Gates of convolutions, flat models, padded batches, recurrent layers and graphs: red at a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qgate
from qgate import Model, modes
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.coverage import mode_scope
from qgate.gate.measuring.model_gates import ModelGates
from qgate.modes import Kernel
from qgate.modes.setups import ModelSetup
from qgate.results.coverage import coverage_of, share_text
from tests.models.networks import NAMES, ids, network
from tests.shares import proof, share

Change = Callable[[nn.Module], Any]


def unchanged(_module: nn.Module) -> None:
    """Leave a kernel as it should be."""


def with_kernel(name: str, change: Change = unchanged, stands_for: str = "int8") -> Model:
    """Return a model whose own mode computes what another one says, and then a change of it."""

    def build(reference: Model) -> nn.Module:
        module = fused(reference, stands_for)
        change(module)
        return module

    return network(name, modes={"mine": Kernel(build, stands_for)})


class Fused(nn.Module):
    """A product that quantizes its input and its weight inside."""

    def __init__(self, source: nn.Module, quantizers: dict[str, qgate.Quantizer]) -> None:
        super().__init__()
        self.plain, self.cast = copy.deepcopy(source), quantizers["input"]
        self.plain.weight = nn.Parameter(quantizers["weight"](source.weight.detach()))  # type: ignore[operator, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.cast(x))


def fused(reference: Model, stands_for: str) -> nn.Module:
    quantizers = modes.make_plan(modes.modes_of(reference, stands_for)[0], reference).quantizers()
    module = copy.deepcopy(reference.module)
    for name in dict.fromkeys(site.rpartition(":")[0] for site in quantizers):
        ports = {port: quantizers[f"{name}:{port}"] for port in ("input", "weight")}
        module.set_submodule(name, Fused(reference.module.get_submodule(name), ports))
    return module


def gates(model: Model, folder: Path, **options: Any) -> ModelGates:
    return ModelGates(Bench(ModelSetup(model.name), _model=model), folder, Policy(), **options)


def failures(session: ModelGates, name: str = "mine") -> list[str]:
    """Run the gates of one mode and return the first lines of those that fail."""
    mode = session.bench.setup.select(name, session.bench.model)[0]
    layers = [] if session.needs.is_graph(name) else session.bench.layers
    outcomes = [session.layer("layer_outputs", mode, layer) for layer in layers]
    outcomes.append(session.outputs("outputs", mode))
    return [outcome.text.splitlines()[0] for outcome in outcomes if not outcome.passed]


def failures_after_accepting(right: Model, wrong: Model, folder: Path, mode: str) -> list[str]:
    session = gates(right, folder, updating="all")
    session.reference("reference")
    assert failures(session, mode) == []
    session.commit()
    assert failures(gates(right, folder), mode) == []
    return failures(gates(wrong, folder), mode)


@share(12)
@pytest.mark.parametrize("mode", ["int8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", NAMES)
def test_every_gate_of_a_right_mode_passes(name: str, mode: str, tmp_path: Path) -> None:
    model = network(name)
    session = gates(model, tmp_path, updating="all")
    assert failures(session, mode) == []
    bench, chosen = session.bench, session.bench.setup.select(mode, model)[0]
    rows = bench.measure(chosen)
    budgets = [row for row in rows if row.ideal is not None and row.scope == "local"]
    quantized = bench.quantized(chosen)
    planned = {site.partition(":")[0] for site in quantized.plan.quantizers()}
    assert planned <= {row.site.partition(":")[0] for row in budgets}
    assert mode_scope(bench, quantized).modules.keys() == planned
    assert session.canary("canary").passed
    assert session.reference("reference").passed


def zeroed(module: nn.Module) -> None:
    classifier = module.get_submodule("classifier")
    classifier.weight = nn.Parameter(torch.zeros(10, 32))


@proof
def test_a_convolution_without_scales_per_channel_is_red_at_its_layer(tmp_path: Path) -> None:
    def outlying(model: Model) -> Model:
        for conv in model.module.modules():
            if isinstance(conv, nn.Conv2d):
                conv.weight.data[0] *= 40
        return model

    def one_scale(module: nn.Module) -> None:
        conv = module.get_submodule("layer2.0.conv1.plain")
        conv.weight = nn.Parameter(qgate.quantize(weights[0], "int8"))

    right = outlying(with_kernel("resnet"))
    weights = [right.module.get_submodule("layer2.0.conv1").weight.detach()]  # type: ignore[operator, union-attr]
    wrong = outlying(with_kernel("resnet", one_scale))
    assert failures(gates(right, tmp_path, updating="all")) == []
    lines = failures(gates(wrong, tmp_path, updating="all"))
    assert len(lines) == 1
    assert "layer2.0.conv1:output" in lines[0]


@proof
def test_a_flat_model_that_lost_a_bias_is_red_at_its_layer(tmp_path: Path) -> None:
    def unbiased(module: nn.Module) -> None:
        linear = module.get_submodule("2.plain")
        linear.bias = nn.Parameter(torch.zeros(128))

    lines = failures(gates(with_kernel("flat", unbiased), tmp_path, updating="all"))
    assert [line for line in lines if line.startswith("2:output (mode mine) is wrong: its bias is")]


def halved(module: nn.Module) -> None:
    lstm = module.get_submodule("lstm")
    for name, parameter in list(lstm._parameters.items()):
        rounded = parameter.detach().bfloat16().float()  # type: ignore[union-attr]
        setattr(lstm, name, nn.Parameter(rounded))


# Padding ------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Reads rows of ids with a mask, and may write anything where it pads."""

    def __init__(self, noise: float = 0.0, shift: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(Mixing() for _ in range(2))
        self.noise, self.shift = noise, shift

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
            padding = (attention_mask == 0).unsqueeze(-1)
            x = x + self.noise * padding
        real = attention_mask.unsqueeze(-1).float()
        pooled = (x * real).sum(1) / real.sum(1)
        return {"logits": x, "pooled": pooled + self.shift * (torch.arange(len(x)) == 5)[:, None]}


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        real = mask.unsqueeze(-1).float()
        mean = (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        return x + functional.gelu(self.linear(x + mean))


def padded(**faults: float) -> Model:
    """Return an encoder on two samples of eight rows; row k lacks its last k tokens."""
    samples = [
        {
            "input_ids": of_sample,
            "attention_mask": (torch.arange(24) < 24 - torch.arange(8)[:, None]).long(),
        }
        for of_sample in ids(8, count=2)
    ]

    def build(reference: Model) -> nn.Module:
        module = fused(reference, "int8")
        vars(module).update(faults)
        return module

    torch.manual_seed(0)
    return Model(Encoder(), samples, "encoder", modes={"mine": Kernel(build, "int8")})


def test_what_stands_at_padding_is_not_compared(tmp_path: Path) -> None:
    assert failures_after_accepting(padded(), padded(noise=3.0), tmp_path, "mine") == []


def test_every_real_token_of_every_row_is_counted() -> None:
    bench = Bench(ModelSetup("encoder"), _model=padded())
    mode = bench.setup.select("int8", bench.model)[0]
    rows = bench.measure(mode)
    scope = mode_scope(bench, bench.quantized(mode))
    assert sum(scope.tokens) == 2 * sum(24 - k for k in range(8))
    at_outputs = next(row for row in rows if row.site == "logits" and row.scope == "carried")
    assert list(at_outputs.positions) == list(scope.tokens)


# Graphs without modules ---------------------------------------------------------------------------


def exported(name: str, change: Change = unchanged) -> Model:
    """Return a model whose own mode is an exported graph of it with weights in int8."""

    def build(reference: Model) -> nn.Module:
        module = copy.deepcopy(reference.module)
        plan = modes.make_plan(modes.modes_of(reference, "w8")[0], reference)
        for site, quantizer in plan.quantizers().items():
            parameter = module.get_submodule(site.rpartition(":")[0]).weight
            assert isinstance(parameter, Tensor)
            parameter.data = quantizer(parameter.detach())
        change(module)
        graph: nn.Module = torch.export.export(module, (reference.inputs[0],)).module()
        return graph

    return network(name, modes={"graph": build})


def test_an_exported_graph_is_held_by_its_outputs_alone(tmp_path: Path) -> None:
    model = exported("convnet")
    session = gates(model, tmp_path, updating="all")
    assert failures(session, "graph") == []
    bench, mode = session.bench, session.bench.setup.select("graph", model)[0]
    outcome = session.outputs("outputs", mode)
    coverage = coverage_of(mode_scope(bench, bench.quantized(mode)), outcome.record["rows"], ())
    assert coverage is not None
    assert share_text(coverage).startswith("outputs alone, 1 of 1; samples")


@share(4)
@pytest.mark.parametrize(
    ("build", "fault", "mode", "site"),
    [
        (partial(with_kernel, "convnet"), zeroed, "mine", "classifier:output"),
        (partial(with_kernel, "tagger"), halved, "mine", "lstm:output"),
        (partial(exported, "convnet"), zeroed, "graph", "logits"),
        (lambda shift=0.0: padded(shift=shift), 0.1, "mine", "output.pooled"),
    ],
    ids=["zeroed-classifier", "recurrent-layer-in-bf16", "zeroed-graph", "row-of-a-sample"],
)
def test_a_fault_is_red_at_its_site(
    build: Callable[..., Model], fault: Any, mode: str, site: str, tmp_path: Path
) -> None:
    lines = failures_after_accepting(build(), build(fault), tmp_path, mode)
    assert any(site in line for line in lines), lines


def test_a_graph_is_a_reference_of_its_own(tmp_path: Path) -> None:
    whole = network("flat")
    graph = torch.export.export(whole.module, (whole.inputs[0],)).module()

    def halved(reference: Model) -> nn.Module:
        module = copy.deepcopy(reference.module)
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return module

    model = Model(graph, whole.inputs, "graph", modes={"bf16-weights": halved})
    session = gates(model, tmp_path, updating="all")
    assert session.reference("reference").passed
    assert session.canary("canary").passed
    assert failures(session, "bf16-weights") == []


def test_a_mode_that_cannot_be_built_is_one_line(tmp_path: Path) -> None:
    def build(_reference: Model) -> nn.Module:
        raise RuntimeError("the kernel wants sm_90")

    model = network("flat", modes={"mine": build})
    with pytest.raises(qgate.QgateError, match=r"mode 'mine' of flat cannot be built: RuntimeErr"):
        failures(gates(model, tmp_path, updating="all"))


class Dropping(nn.Module):
    """Drops values in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x), 0.1, training=True)


class Growing(nn.Module):
    """Returns one more row with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x[:1].expand(self.calls, -1))


class Masking(nn.Module):
    """Returns minus infinity where nothing may be chosen, as detectors and decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.linear(x)
        return {"logits": scores, "masked": scores.masked_fill(torch.arange(8) < 2, -torch.inf)}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Dropping, "dropout or sampling is on"),
        (Growing, r"is \(\d, 8\), and is \(\d, 8\) when"),
        (Masking, r"its output output\.masked has 8 infinite values of 32, which nothing"),
    ],
)
def test_a_model_that_cannot_be_a_reference_is_refused(
    module: type[nn.Module], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(module(), [torch.randn(4, 8)], "odd")
    bench = Bench(ModelSetup("odd"))
    monkeypatch.setattr(ModelSetup, "load", lambda _setup: model)
    with pytest.raises(qgate.QgateError, match=words):
        _ = bench.model


# Samples side by side -----------------------------------------------------------------------------


class Attended(nn.Module):
    """A block of a decoder, whose rows come behind its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, queries: Tensor, x: Tensor) -> Tensor:
        return queries + self.linear(queries * x)


class Detector(nn.Module):
    """Six queries of each image, in the shape (queries, rows, width) inside."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(6, 1, 8))
        self.blocks = nn.ModuleList(Attended() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(-1, len(x), -1)
        for block in self.blocks:
            queries = block(queries, x)
        return queries.transpose(0, 1)


def test_samples_whose_rows_come_behind_queries_run_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(Detector(), [torch.randn(1, 8) for _ in range(3)], "detector")
    session = gates(model, tmp_path, updating="all")
    assert not session.bench.joins_samples
    blocks = session.bench.fp32("plain").tensors["blocks.1:output"]
    assert [tuple(tensor.shape) for tensor in blocks] == [(6, 1, 8)] * 3
    assert failures(session, "int8") == []
    assert gates(network("convnet"), tmp_path).bench.joins_samples


class Masked(nn.Module):
    """A first output that depends on no weight, as scores of a query that is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(len(x), 1), self.linear(x)


def test_a_moved_weight_may_show_in_any_output(tmp_path: Path) -> None:
    torch.manual_seed(0)
    session = gates(Model(Masked(), [torch.randn(4, 8)], "masked"), tmp_path, updating="all")
    outcome = session.reference("reference")
    assert outcome.passed, outcome.text
