"""Each recipe is a gate: it records, passes, compares what its page says, and fails at a fault."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

# Imported here, since a run in this process forgets what it imported first.
import _pytest.pytester
import pytest
import torch
import torch.onnx
from torch import nn

import qgate
import qgate.analysis
import qgate.formats.engine.effects
import qgate.gate.measuring.model_gates
import qgate.metrics
import qgate.results
from qgate import models, modes
from qgate.errors import QgateError
from qgate.modes import Kernel
from tests.gate.test_any_model import failures, gates
from tests.shares import always, proof, slow_file

pytestmark = slow_file

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "docs" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))
COMMAND = re.compile(r"^    pytest suites --model docs/recipes/(\w+)\.py:build --mode (\S+)$", re.M)
SHORT = models.Sampling(samples=2, seqlen=32, calib_samples=2, calib_seqlen=32)
# The kernels of torchao are gated in full by tests below; of an encoder of real size the task is.
SUITES = {"sentence_encoder": ("task",)}
MODES = {"torchao_int8": "torchao_int8", "bitsandbytes_int8": "bnb_int8"}
OUTPUTS_ALONE = ("compiled", "exported", "onnx_session", "pt2e")
# As above, but they take seconds: only the process that runs these tests needs them.
SLOW_TO_IMPORT = (
    "torch._inductor.compile_fx", "torchao.quantization.pt2e.quantize_pt2e",
    "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer", "torchao.utils",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def imported_first() -> None:
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)


@pytest.fixture(autouse=True)
def kept_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a run in this process imports of libraries: torch and transformers load once."""
    plain = _pytest.pytester.SysModulesSnapshot

    def snapshot(preserve: Callable[[str], bool]) -> Any:
        return plain(lambda name: preserve(name) or _is_library(name))

    monkeypatch.setattr(_pytest.pytester, "SysModulesSnapshot", snapshot)


def _is_library(name: str) -> bool:
    return "site-packages" in str(getattr(sys.modules[name], "__file__", ""))


@pytest.fixture(autouse=True)
def without_traces() -> Iterator[None]:
    """Forget compiled code, and modules of recipes."""
    yield
    torch._dynamo.reset()
    for name in NAMES:
        sys.modules.pop(name, None)


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def modes_in_command(name: str) -> str:
    text = (RECIPES / f"{name}.py").read_text(encoding="utf-8")
    (command,) = COMMAND.findall(text)
    assert command[0] == name
    return str(command[1]).strip("'")


def compile_something() -> None:
    """Import what torch imports to compile, which a run in this process would forget."""
    torch.compile(nn.Linear(2, 2), backend=recipe("compiled").BACKEND)(torch.ones(1, 2))


def build(name: str) -> qgate.Model:
    return models.load(name, build=recipe(name).build, sampling=SHORT)


@proof
@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_recipe_records_and_then_passes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    root = pytester.path
    shutil.copytree(RECIPES, root / "docs" / "recipes")
    (root / "suites").mkdir()
    for suite in SUITES.get(name, ("layer_outputs", "outputs", "task")):
        shutil.copy(ROOT / "suites" / f"test_{suite}.py", root / "suites")
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider")
    if name == "compiled":
        monkeypatch.setenv("PATH", "")  # no compiler, which takes long to compile
        compile_something()
    words = ["suites", "--model", f"docs/recipes/{name}.py:build", "--no-report"]
    words += ["--mode", MODES.get(name, modes_in_command(name))]
    words += ["--samples=2", "--seqlen=32", "--calib-samples=2"]
    recorded = pytester.runpytest_inprocess(*words, "--update-baselines")
    assert recorded.ret == 0, recorded.stdout.str()
    passed = pytester.runpytest_inprocess(*words)
    assert passed.ret == 0, passed.stdout.str()
    assert ("outputs alone" in passed.stdout.str()) == (name in OUTPUTS_ALONE)


def test_the_page_has_every_recipe_with_its_command() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name in NAMES:
        text = (RECIPES / f"{name}.py").read_text(encoding="utf-8")
        assert f"(recipes/{name}.py)" in page
        assert f"`{COMMAND.search(text)[0].strip()}`" in page  # type: ignore[index]


# The mode of a kernel, its recipe, and what makes the scale of one of its layers wrong.
OFF: dict[str, tuple[str, Callable[[Any], object]]] = {
    "torchao_int8": ("torchao_int8", lambda layer: layer.weight.scale.mul_(1.02)),
    "torchao_w8": ("torchao_int8", lambda layer: layer.weight.scale.mul_(1.02)),
    "bnb_int8": ("bitsandbytes_int8", lambda layer: layer.weight.SCB.mul_(1.1)),
    "packed_int8": ("packed_checkpoint", lambda layer: layer.weight_scale.data.mul_(1.02)),
}


@proof
@pytest.mark.parametrize("mode", OFF)
def test_a_scale_that_is_off_is_over_the_budget(mode: str, tmp_path: Path) -> None:
    name, spoil = OFF[mode]
    model = build(name)
    kernel = model.modes[mode]
    assert isinstance(kernel, Kernel)

    def scaled(reference: qgate.Model) -> nn.Module:
        module = kernel(reference)
        layer = module.get_submodule("model.layers.1.mlp.up_proj")
        assert hasattr(layer, "weight") is (name != "packed_checkpoint")
        spoil(layer)
        return module

    model.modes = {mode: replace(kernel, build=scaled)}
    lines = failures(gates(model, tmp_path, updating="all"), mode)
    assert any("up_proj:output" in line and "over the ideal" in line for line in lines), lines


def test_what_torchao_refuses_is_one_line_with_its_words() -> None:
    torchao_int8 = recipe("torchao_int8").torchao
    quantization = importlib.import_module("torchao.quantization")
    config = quantization.Float8DynamicActivationFloat8WeightConfig()
    model = build("torchao_int8")
    model.modes = {"fp8": torchao_int8(config)}
    with pytest.raises(QgateError) as error:
        modes.apply(modes.modes_of(model, "fp8")[0], model)
    assert str(error.value).startswith("mode 'fp8' of torchao-llama cannot be built: Assertion")
    assert "CUDA" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_cosine_of_the_same_embeddings_is_one_and_padding_has_no_part_in_it() -> None:
    module, model = recipe("sentence_encoder"), build("sentence_encoder")
    hidden = [torch.randn(*sample["input_ids"].shape, 4) for sample in model.inputs]
    padded = [
        torch.where(sample["attention_mask"][..., None] == 0, 9.0, tensor)
        for sample, tensor in zip(model.inputs, hidden, strict=True)
    ]
    assert any(not torch.equal(a, b) for a, b in zip(padded, hidden, strict=True))
    assert module.cosine(padded, hidden, model.inputs) == pytest.approx([1.0] * len(hidden))


@always
def test_packed_weights_have_gradients_at_the_inputs_of_blocks(tmp_path: Path) -> None:
    model = build("packed_checkpoint")
    session = gates(model, tmp_path, updating="all")
    (mode,) = modes.modes_of(model, "packed_int8")
    rows = session.bench.gradients(mode)
    assert {row.site for row in rows} == {"model.layers.0:input", "model.layers.1:input"}
    assert all(0 < row.value("relative_mse") < 0.01 for row in rows)
