"""A suite that a model has nothing for is deselected with a note; what was accepted is left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugin.projects import begin
from tests.shares import proof, share

MODELS = '''
import copy

import torch
from torch import nn

import qgate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.mix(self.norm(x)).relu()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(16), nn.Parameter(torch.rand(16))

    def forward(self, x):
        return self.norm(x) * self.weight


class Encoder(nn.Module):
    """Reads in both directions where it gets token ids."""

    def __init__(self, block=Block, context=True):
        super().__init__()
        self.embed, self.context = nn.Embedding(16, 16), context
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        if not x.is_floating_point():
            x = self.embed(x)
            x = x + x.mean(1, keepdim=True) if self.context else x
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def samples():
    random = torch.Generator().manual_seed(1)
    return [torch.randn(1, 4, 16, generator=random) for _ in range(3)]


def ids():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, 16, (1, 8), generator=random) for _ in range(3)]


def made(module, inputs=None, name="own", **more):
    return qgate.Model(module, inputs or samples(), name, calibration=samples(), **more)


def seeded(*arguments):
    torch.manual_seed(0)
    return Encoder(*arguments)


def mean_size(outputs):
    return [float(output.abs().mean()) for output in outputs]


def encoder():
    return made(seeded())


def with_metric():
    return made(seeded(), metric=mean_size)


def both_directions():
    return made(seeded(), ids())


def forward_only():
    return made(seeded(Block, False), ids())


def without_weights():
    return made(seeded(Scale))


def without_layers():
    torch.manual_seed(0)
    twice = nn.Linear(16, 16)  # what runs twice is no layer
    return made(nn.Sequential(twice, nn.ReLU(), twice))


class Graph(nn.Module):
    """Runs somewhere else, as a compiled graph does."""

    def __init__(self, whole):
        super().__init__()
        self.session = [whole]

    def forward(self, x):
        return self.session[0](x)


def graph():
    def exported(reference):
        module = copy.deepcopy(reference.module)
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return Graph(module)

    return made(seeded(), modes={"graph": exported})


class Served(nn.Module):
    """A kernel for inference: packed weights, and no backward."""

    def __init__(self, layer, backward):
        super().__init__()
        self.packed = qgate.quantize(layer.weight.detach(), "int8", granularity="channel", axis=0)
        self.bias, self.backward = layer.bias, backward

    def forward(self, x):
        with torch.set_grad_enabled(self.backward):
            return nn.functional.linear(x, self.packed, self.bias)


def served(plain=False, backward=False):
    def build(reference):
        module = copy.deepcopy(reference.module)
        for layer in module.layers[1:]:
            layer.mix = Served(layer.mix, backward)
        return module

    block = Plain if plain else Block
    return made(seeded(block), modes={"served": build})


class Plain(nn.Module):
    """A block without a way around its kernel, as those of convnets are."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return self.mix(self.norm(x)).relu()


def served_plain():
    return served(plain=True)


def trained():
    return served(backward=True)


def norms():
    return made(nn.Sequential(nn.LayerNorm(16), nn.LayerNorm(16)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


def recurrent():
    torch.manual_seed(0)
    return made(Recurrent(), layers=("lstm",))


def frozen():
    return made(seeded().requires_grad_(False))


def detached():
    module = seeded()
    module.register_forward_hook(lambda _module, _inputs, output: output.detach())
    return made(module)


def broken():
    class Broken(Encoder):
        def forward(self, x):
            if torch.is_grad_enabled():
                raise ValueError("no backward pass")
            return super().forward(x)

    return made(Broken(), ids())
'''
TASK = "own predicts no next tokens and has no metric (qgate.Model(metric=…))"
KINDS = {
    "task": 1, "gradients": 2, "layer_outputs": 2, "outputs": 1, "scaling": 8, "overflow": 16,
    "activations": 2, "reference": 1, "canary": 1,
}  # fmt: skip


# What is left of a model without layers.
ALONE = {"outputs": 1, "reference": 1, "canary": 1}
Ran = Callable[..., pytest.RunResult]


@pytest.fixture
def house(pytester: pytest.Pytester) -> Path:
    """All suites on models, and models of one's own."""
    (pytester.path / "own.py").write_text(MODELS)
    return begin(pytester, *(f"test_{kind}.py" for kind in KINDS))


@pytest.fixture
def ran(pytester: pytest.Pytester, house: Path) -> Ran:  # noqa: ARG001
    def run(model: str, *options: str) -> pytest.RunResult:
        arguments = ["--model", f"own.py:{model}", "--mode", "int8", *options]
        paths = [] if any(option.startswith("suites") for option in options) else ["suites"]
        return pytester.runpytest_inprocess(*paths, *arguments)

    return run


def collected(result: pytest.RunResult) -> dict[str, int]:
    """Count the tests of each suite that are left."""
    names = re.findall(r"^suites/test_(\w+)\.py::", str(result.stdout), re.MULTILINE)
    return {name: names.count(name) for name in dict.fromkeys(names)}


def notes(result: pytest.RunResult) -> list[str]:
    lines = map(str.strip, result.outlines)
    return [line for line in lines if re.match(r"\d+ tests? deselected: ", line)]


def without(*kinds: str) -> dict[str, int]:
    return {kind: count for kind, count in KINDS.items() if kind not in kinds}


# The suites that are left of a model, and the notes beside that of the task.
LEFT: dict[str, tuple[dict[str, int], list[str]]] = {
    "encoder": (without("task"), []),
    "both_directions": (without("task"), []),
    "with_metric": (KINDS, []),
    "forward_only": (KINDS, []),
    "without_weights": ({**without("task", "scaling"), "overflow": 8}, [
        "16 tests deselected: own has no linear layers and no convolutions in layers.0, layers.1"]),
    "recurrent": ({**ALONE, "layer_outputs": 1, "gradients": 1, "overflow": 4}, [
        "1 test deselected: own has no activations to measure in lstm",
        "8 tests deselected: own has no linear layers and no convolutions in lstm"]),
    "without_layers": (ALONE, ["15 tests deselected: own has no layers (qgate.Model(layers=…))"]),
    "frozen": ({**without("task", "gradients"), "overflow": 8}, [
        "10 tests deselected: own has no gradient at layers.0.mix:weight, which takes none "
        "(requires_grad_(True))"]),
    "detached": ({**without("task", "gradients"), "overflow": 8}, [
        "10 tests deselected: own has no gradients: its output depends on no parameter"]),
}  # fmt: skip


@share(3)
@pytest.mark.parametrize("model", LEFT)
def test_what_a_model_has_nothing_for_is_deselected(ran: Ran, model: str) -> None:
    remaining, expected = LEFT[model]
    result = ran(model, "--co", "-q")
    assert result.ret == pytest.ExitCode.OK
    assert collected(result) == remaining
    of_the_task = [] if "task" in remaining else [f"1 test deselected: {TASK}"]
    assert sorted(notes(result)) == sorted(expected + of_the_task)


def test_a_model_that_cannot_say_runs_its_tests(ran: Ran) -> None:
    """What fails while a model is looked at fails in its test, with words."""
    result = ran("broken", "--co", "-q")
    assert collected(result) == without("task")


def test_a_model_that_cannot_be_built_fails_in_its_tests(ran: Ran, house: Path) -> None:
    (house / "own.py").write_text("def encoder(): raise ValueError('no weights')\n")
    (house / "suites" / "test_words.py").write_text("def test_it(gate): gate.task('int8')\n")
    result = ran("encoder", "suites/test_words.py")
    result.assert_outcomes(errors=1)
    assert "cannot be built: ValueError: no weights" in str(result.stdout)


def test_models_of_others_are_not_looked_at(ran: Ran, house: Path) -> None:
    (house / "suites" / "test_theirs.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.parametrize('model', ['theirs'])\n"
        "@pytest.mark.parametrize('layer', ['', 'x'])\n"
        "def test_it(model, layer): assert model == 'theirs'\n\n"
        "@pytest.mark.parametrize('model', ['theirs'])\n"
        "def test_gate(gate, model): gate.task('int8')\n"
    )
    result = ran("encoder", "suites/test_theirs.py")
    result.assert_outcomes(passed=2, failed=0, errors=1)
    assert "a gate needs qgate's fixture `model`" in str(result.stdout)


def test_a_graph_is_compared_by_its_outputs_alone(ran: Ran) -> None:
    result = ran("graph", "--mode", "graph", "--co", "-q")
    assert collected(result) == {**without("task"), "outputs": 2}  # int8 is asked for, too
    note = (
        "4 tests deselected: own has none of its modules in mode graph: outputs alone are compared"
    )
    assert note in notes(result)


@pytest.mark.parametrize("model", ["served", "served_plain"])
def test_kernels_for_inference_are_left_out_of_gradients(ran: Ran, model: str) -> None:
    """Each layer was an error: "the loss takes no gradient: call requires_grad_(True)"."""
    suite = "suites/test_gradients.py"
    result = ran(model, "--mode", "served", suite, "--update-baselines")
    assert "2 deselected, 2 updated in" in str(result.stdout)  # int8 is asked for, too
    assert notes(result) == [
        "2 tests deselected: own has no backward pass in mode served (its kernels are for "
        "inference; a torch.autograd.Function gives them one) in layers.0, layers.1"
    ]


def test_a_kernel_with_a_backward_is_held_at_its_gradients(ran: Ran) -> None:
    result = ran("trained", "--mode", "served", "suites/test_gradients.py", "--update-baselines")
    assert "4 updated in" in str(result.stdout)


def test_a_mode_that_has_nothing_to_quantize_fits_no_model(ran: Ran) -> None:
    result = ran("norms", "suites/test_outputs.py")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["1 test deselected: mode int8 quantizes nothing of own: *"])


def test_layers_option_with_a_model_that_has_none(ran: Ran) -> None:
    for option in ("first", r"layers\.0"):
        result = ran("without_layers", "--layers", option, "--co", "-q")
        assert result.ret == pytest.ExitCode.OK
        assert collected(result) == ALONE


def test_each_model_of_a_run_is_asked(ran: Ran) -> None:
    result = ran("encoder", "--model", "own.py:with_metric", "--co", "-q",
                 "suites/test_task.py")  # fmt: skip
    assert collected(result) == {"task": 1}
    assert notes(result) == [f"1 test deselected: {TASK}"]


def test_only_gates_that_a_test_calls_are_asked_for(ran: Ran, house: Path) -> None:
    """The name of a file says nothing: a task of one's own stays, a gate by another name goes."""
    (house / "suites" / "test_task.py").write_text(
        "from qgate.gate import Measured\n\n"
        "def test_task(gate, mode):\n"
        "    gate([Measured(site='mine', layer='', scope='carried', order=0, nonfinite=0,\n"
        "                   values={'mse': 0.0}, gated=('mse',))], mode)\n"
    )
    (house / "suites" / "test_words.py").write_text("def test_it(gate, mode): gate.task(mode)\n")
    (house / "suites" / "test_layer.py").write_text("def test_it(model, layer): assert layer\n")
    result = ran("encoder", "--co", "-q")
    assert collected(result) == {**KINDS, "layer": 2}
    result = ran("without_layers", "--co", "-q")
    assert collected(result) == {**ALONE, "task": 1}


def test_a_layer_that_a_test_names_itself_is_not_looked_at(ran: Ran, house: Path) -> None:
    (house / "suites" / "test_first.py").write_text(
        "def test_it(gate): gate.scaling('int8', 'layers.0')\n\n"
        "def test_activations(activation_gate): activation_gate.layer('layers.0')\n"
    )
    result = ran("encoder", "suites/test_first.py", "--co", "-q")
    assert collected(result) == {"first": 2}


def test_a_run_without_a_gate_left_is_not_green(ran: Ran, house: Path) -> None:
    (house / "suites" / "test_theirs.py").write_text("def test_it(): pass")
    result = ran("encoder", "suites/test_task.py", "suites/test_theirs.py")
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(
        [f"1 test deselected: {TASK.replace('[', '[[]')}", "no gate ran: *"]
    )


@proof
def test_nothing_is_missing_from_such_a_run(
    ran: Ran, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole, also in CI: what a model has nothing for was not left out."""
    result = ran("encoder", "--update-baselines")
    assert result.ret == pytest.ExitCode.OK, str(result.stdout)
    monkeypatch.setenv("CI", "1")
    result = ran("encoder")
    assert result.ret == pytest.ExitCode.OK, str(result.stdout)
    assert "partial" not in str(result.stdout)
    result = ran("encoder", "suites/test_task.py", "suites/test_canary.py")
    assert TASK in str(result.stdout)
    assert house.joinpath("baselines", "own").is_dir()


@proof
def test_what_was_accepted_once_is_left_out(
    ran: Ran, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that were held, and cannot be held any more, make a run partial."""
    suites = ("suites/test_gradients.py", "suites/test_outputs.py", "suites/test_layer_outputs.py")
    assert ran("encoder", "--update-baselines", *suites).ret == pytest.ExitCode.OK
    result = ran("frozen", *suites)
    assert result.ret == pytest.ExitCode.OK
    line = (
        "gates held: 3 of 5; 2 deselected by what it lacks now: own has no gradient at "
        "layers.0.mix:weight, which takes none (requires_grad_(True)) (int8 at layers.0, layers.1)"
    )
    assert line in str(result.stdout)
    monkeypatch.setenv("CI", "1")
    assert ran("frozen", *suites).ret == pytest.ExitCode.TESTS_FAILED
    assert house.joinpath("baselines", "own").is_dir()
