"""What held gates compared of a mode is counted, and what none of them is about is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qgate.gate.measuring.bench
import qgate.gate.measuring.passes
from tests.plugin.conftest import Run
from tests.plugin.projects import add, header, page
from tests.shares import proof, share

CONFTEST = '''
import copy
import torch, qgate
from torch import nn
from qgate.modes import Mode, Rule


class Flat(nn.Module):
    """Layers one after another, the last of which is in no block."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


class Images(nn.Module):
    """A stem, two blocks of convolutions, and a linear layer on top."""

    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.top = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.top(x.mean((2, 3)))


class Words(nn.Module):
    """An embedding, two blocks and two outputs; another module passes long samples only."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.words, self.kinds, self.rare = nn.Linear(8, 32), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if ids.shape[1] > 12:
            x = x + self.rare(x)
        return {"words": self.words(x), "kinds": self.kinds(x)}


def own(model):
    """Round all weights, also of what the first sample does not pass."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((parameter * 64).round() / 64)
    return module


def samples(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def ids(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (1, length), generator=generator) for length in lengths]


def model(module, inputs, name, **more):
    torch.manual_seed(0)
    return qgate.Model(module(), inputs, name, head=(), **more)


def pytest_qgate_models(config):
    layers = ("first", "second")
    return {
        "flat": lambda: model(Flat, samples((6, 8), (6, 8)), "flat", layers=layers),
        "images": lambda: model(Images, samples((2, 3, 6, 6), (2, 3, 6, 6)), "images"),
        "words": lambda: model(Words, ids(9, 12), "words"),
        "sparse": lambda: model(Words, ids(9, 16), "sparse", modes={"own": own}),
        "dense": lambda: model(Words, ids(9, 12), "dense", modes={"own": own}),
    }


def pytest_qgate_modes(config):
    weights = tuple(Rule(":weight$", "int8", of=kind) for kind in ("linear", "conv", "embedding"))
    return [
        Mode("linears", "INT8 weights", rules=weights[:1]),
        Mode("images8", "INT8 weights of convolutions too", rules=weights[:2]),
        Mode("words8", "INT8 weights of the embedding too", rules=(weights[0], weights[2])),
    ]
'''


@pytest.fixture
def nets(project: Path) -> Path:
    """A project of the models above, with the suites of layers and of outputs."""
    (project / "conftest.py").write_text(CONFTEST)
    (project / "suites" / "test_task.py").unlink()
    add(project, "test_outputs.py")
    return project


def coverage(project: Path) -> list[dict[str, Any]]:
    return list(header(project)["extent"]["coverage"])


def names(of: dict[str, Any], kind: str) -> list[str]:
    return sorted(part["name"] for part in of["uncovered"] if part["kind"] == kind)


WHOLE = {
    ("flat", "linears"): "3 of 3 quantized modules, 1 of 1 outputs, 2 of 2 layers; "
    "samples 12 of 12",
    ("images", "images8"): "4 of 4 quantized modules, 1 of 1 outputs, 2 of 2 layers; "
    "samples 4 of 4",
    ("words", "words8"): "5 of 5 quantized modules, 2 of 2 outputs, 2 of 2 layers; tokens 21 of 21",
    ("words", "linears"): "4 of 4 quantized modules, 2 of 2 outputs, 2 of 2 layers; "
    "tokens 21 of 21",
}
# Model and mode: outputs and modules that only the suite of outputs is about.
OUTSIDE = {
    ("flat", "linears"): (["logits"], ["last"]),
    ("images", "images8"): (["logits"], ["stem", "top"]),
    ("words", "words8"): (["logits", "output.kinds"], ["embed", "kinds", "words"]),
}


@share(4)
@pytest.mark.parametrize(("model", "mode"), WHOLE)
def test_whole_runs_say_how_much_they_compared(
    nets: Path, suites: Run, monkeypatch: pytest.MonkeyPatch, model: str, mode: str
) -> None:
    options = ("--model", model, "--mode", mode)
    assert suites(*options, "--update-baselines").ret == pytest.ExitCode.OK
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(nets / "summary.md"))
    result = suites(*options, "-v")
    assert result.ret == pytest.ExitCode.OK
    sentence = f"{mode}: {WHOLE[model, mode]}"
    result.stdout.fnmatch_lines([f"compared in {sentence}"])
    assert f"compared in {sentence}" in (nets / "summary.md").read_text(encoding="utf-8")
    assert sentence in page(nets)
    (whole,) = coverage(nets)
    assert (whole["model"], whole["mode"], whole["uncovered"]) == (model, mode, [])


@share(4)
@pytest.mark.parametrize(("model", "mode"), OUTSIDE)
def test_what_no_suite_of_the_run_is_about_is_named(
    nets: Path, suites: Run, monkeypatch: pytest.MonkeyPatch, model: str, mode: str
) -> None:
    (nets / "suites" / "test_outputs.py").unlink()
    options = ("--model", model, "--mode", mode)
    result = suites(*options, "--update-baselines")
    outputs, modules = OUTSIDE[model, mode]
    assert result.ret == pytest.ExitCode.OK
    gaps = [
        f"outputs that no gate of this run compares: {', '.join(outputs)} ({mode})",
        f"quantized modules that no gate of this run compares: {', '.join(modules)} ({mode})",
    ]
    (of,) = coverage(nets)
    assert (names(of, "output"), names(of, "module")) == (outputs, modules)
    assert of["modules"]["held"] == of["modules"]["of"] - len(modules)
    monkeypatch.setenv("CI", "true")
    result = suites(*options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = [line for line in result.stdout.lines if line]
    first = lines[next(i for i, line in enumerate(lines) if "= qgate: " in line) + 1]
    assert first.startswith("partial run, not all that the modes compute was compared: ")
    for part in (outputs, modules):
        assert all(name in first for name in part)
    assert all(gap.split(":")[0] in first for gap in gaps)
    assert suites(*options, "--allow-partial").ret == pytest.ExitCode.OK


@pytest.mark.usefixtures("nets")
def test_a_mode_of_ones_own_that_quantizes_what_the_first_sample_does_not_pass(
    suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", "sparse", "--mode", "own")
    result = suites(*options, "--update-baselines")
    assert result.ret == pytest.ExitCode.OK
    monkeypatch.setenv("CI", "true")
    result = suites(*options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    gap = "quantized modules that the first sample does not pass: rare (own)"
    result.stdout.fnmatch_lines([f"partial run, not all *: {gap}. Run all of them, *"])
    result.stdout.fnmatch_lines(["compared in own: 5 of 6 quantized modules, 2 of 2 outputs, *"])


def test_what_no_sample_passes_is_not_asked_for(nets: Path, suites: Run) -> None:
    result = suites("--model", "dense", "--mode", "own", "--update-baselines", "--no-report")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["compared in own: 5 of 5 quantized modules, 2 of 2 outputs, *"])
    assert coverage(nets)[0]["uncovered"] == []


def one_batch(batches: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: list(batches(*given))[:1]


@proof
def test_samples_and_tokens_that_are_not_compared_are_counted(
    nets: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = qgate.gate.measuring.passes
    options = ("--model", "words", "--mode", "words8")
    assert suites(*options, "--update-baselines", "--no-report").ret == pytest.ExitCode.OK
    batches, passing = passes.batches, passes.pass_through
    monkeypatch.setattr(passes, "batches", one_batch(batches))
    suites(*options, "--no-report")
    (of,) = coverage(nets)
    assert (of["tokens"], of["unit"]) == ({"held": 9, "of": 21}, "tokens")
    monkeypatch.setattr(passes, "batches", batches)

    def masked(model: Any, sites: Any, index: int, sample: Any, *more: Any) -> Any:
        outputs = passing(model, sites, index, sample, *more)
        return {name: tensor[:, :8] for name, tensor in outputs.items()}

    monkeypatch.setattr(passes, "pass_through", masked)
    monkeypatch.setenv("CI", "true")
    result = suites(*options, "--no-report")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["partial run, *: masked or cut: 5 tokens (words8). *"])
    result.stdout.fnmatch_lines(["compared in words8: *; tokens 16 of 21"])


def test_a_module_that_is_left_out_of_the_comparison_is_named(
    nets: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = qgate.gate.measuring.bench.Bench
    measure = bench.measure

    def less(self: Any, mode: Any) -> Any:
        return [row for row in measure(self, mode) if not row.site.startswith("blocks.1.0:")]

    monkeypatch.setattr(bench, "measure", less)
    options = ("--model", "words", "--mode", "linears", "--no-report")
    suites(*options, "--update-baselines")
    (of,) = coverage(nets)
    assert of["uncovered"] == [
        {"kind": "module", "name": "blocks.1.0", "layer": "blocks.1", "cause": "not compared",
         "reason": "no gate of this run compares"}
    ]  # fmt: skip
    assert of["modules"] == {"held": 3, "of": 4}


@proof
def test_what_gates_that_are_left_out_are_about_has_their_reason(nets: Path, suites: Run) -> None:
    options = ("--model", "words", "--mode", "words8,linears", "--no-report")
    assert suites(*options, "--update-baselines").ret == pytest.ExitCode.OK
    result = suites(*options, "-v")
    texts = {f"compared in {mode}: {WHOLE['words', mode]}" for mode in ("words8", "linears")}
    assert texts == {line for line in result.stdout.lines if line.startswith("compared")}
    file = nets / "suites" / "test_outputs.py"
    skip = "\npytestmark = pytest.mark.skip(reason='no time')\n"
    file.write_text(file.read_text(encoding="utf-8") + skip, encoding="utf-8")
    result = suites(*options, "--layers", "first")
    for of in coverage(nets):
        reasons = {
            (part["kind"], part["layer"], part["cause"], part["reason"]) for part in of["uncovered"]
        }
        assert ("layer", "blocks.1", "layers", "first") in reasons
        assert ("output", "", "skipped", "no time") in reasons
        assert ("module", "blocks.1", "layers", "first") in reasons
        assert {cause for _, _, cause, _ in reasons} == {"layers", "skipped"}
    result.stdout.fnmatch_lines(["gates held: 2 of 6; *left out by --layers first*skipped: no*"])
    result.stdout.fnmatch_lines(
        ["compared in words8: 1 of 5 quantized modules, 0 of 2 outputs, 1 of 2 layers; *"]
    )


def test_what_fails_as_expected_is_not_compared(nets: Path, suites: Run) -> None:
    options = ("--model", "words", "--mode", "words8", "--no-report")
    file = nets / "suites" / "test_layer_outputs.py"
    mark = "\npytestmark = pytest.mark.xfail(reason='bug 17')\n"
    file.write_text(file.read_text(encoding="utf-8") + mark, encoding="utf-8")
    assert suites(*options).ret != pytest.ExitCode.OK, "nothing was recorded for outputs"
    (of,) = coverage(nets)
    assert of["layers"] == {"held": 0, "of": 2}
    assert {part["cause"] for part in of["uncovered"]} == {"xfailed"}


@proof
def test_formats_that_were_accepted_as_modes_too(
    nets: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats of sweeps are not asked for the layers and outputs of modes with their names."""
    add(nets, "test_overflow.py", "test_scaling.py")
    formats, options = ("fp8_e4m3", "hif8"), ("--model", "dense", "--no-report", "--mode")
    result = suites(*options, ",".join(("linears", *formats)), "--update-baselines")
    assert result.ret == pytest.ExitCode.OK
    monkeypatch.setenv("CI", "true")
    assert suites(*options, "linears").ret == pytest.ExitCode.OK
    (nets / "suites" / "test_overflow.py").rename(nets / "suites" / "overflows.py")
    result = suites(*options, "linears")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["partial run, not all *: overflow (fp8_e4m3, hif8, *). *"])
    (nets / "suites" / "overflows.py").rename(nets / "suites" / "test_overflow.py")
    (nets / "suites" / "test_outputs.py").unlink()
    result = suites(*options, "linears")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["partial run, not all *: outputs (linears); *"])
