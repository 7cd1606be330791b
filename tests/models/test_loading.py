"""Models by name: what there is, a user's own callable, devices, and which samples are cut."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import modes
from qgate.errors import QgateError
from qgate.models import Model, Sampling, language, load, names
from qgate.models.task_metric import task_figures
from qgate.models.tiny import TINY, TinyModel


@pytest.fixture(autouse=True)
def untrained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tiny models as they are built: which weights they have does not matter here."""

    def build(tiny: TinyModel) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return tiny.build()

    monkeypatch.setattr(TinyModel, "load", build)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


# Names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-mamba", "tiny-llama", "tiny_llama", " Tiny-Llama "])
def test_the_models_of_the_package(name: str) -> None:
    model = load(name, sampling=Sampling(samples=2, seqlen=16))
    assert model.name == name.strip().lower().replace("_", "-")
    assert len(model.layers) == 5
    assert model.head == ("lm_head",)
    assert model(model.inputs[0]).shape == (1, 16, 256)
    assert not model.module.training
    assert bool(model.bases) == (model.name == "tiny-mamba")


@pytest.mark.parametrize(
    ("name_given", "near"),
    [
        ("tiny-lama", "tiny-llama or tiny-mamba"),
        ("mamba", "mamba:PATH or tiny-mamba"),
        ("tiny", "tiny-llama or tiny-mamba or tiny-moe or tiny-moe-list"),
    ],
)
def test_an_unknown_name_lists_the_names_and_the_nearest(name_given: str, near: str) -> None:
    with pytest.raises(QgateError) as caught:
        load(name_given)
    message = str(caught.value)
    assert f"unknown model {name_given!r}. Did you mean {near}?" in message
    for name in names():
        assert name in message
    assert {"tiny-mamba", "tiny-llama", "mamba:PATH", "hf:PATH"} <= set(names())


@pytest.mark.parametrize("scheme", ["mamba", "hf"])
def test_a_folder_that_is_no_checkpoint(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(
        QgateError, match=rf"'{scheme}:nowhere/at-all'.* no folder 'nowhere/at-all'"
    ):
        load(f"{scheme}:nowhere/at-all")
    (tmp_path / "file").write_text("")
    with pytest.raises(QgateError, match="no folder 'file'"):
        load(f"{scheme}:file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(QgateError, match=r"'empty' has no config\.json; .* model\.safetensors"):
        load(f"{scheme}:empty")


# A callable of one's own -------------------------------------------------------------------------

OWN = """
import torch
from qgate.models import Model

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

seen = {}

def build():
    return Model(Net(), [torch.ones(2, 4)])

def sampled(samples, seqlen, *, seed=7, other="default"):
    seen.update(samples=samples, seqlen=seqlen, seed=seed, other=other)
    return Model(Net(), [torch.ones(seqlen, 4)] * samples, name="sampled")

class Maker:
    def __call__(self, tokens):
        seen.update(tokens=tokens)
        return Model(Net(), [torch.ones(1, 4)])

make = Maker()
number = 3

def wrong():
    return Net()

def broken():
    raise RuntimeError("the weights are gone")
"""


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A module in the folder one is in, inside a package, under a name no other test has."""
    package = f"package_{abs(hash(request.node.nodeid))}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "nets.py").write_text(OWN)
    return f"{package}.nets"


def test_a_callable_returns_the_model(own: str) -> None:
    model = load(f"{own}:build")
    assert model.name == f"{own}:build"
    assert model.layers == ("blocks.0", "blocks.1", "blocks.2")
    assert model(model.inputs[0]).shape == (2, 4)


def test_a_callable_is_given_the_fields_of_the_sampling_that_it_names(own: str) -> None:
    model = load(f"{own}:sampled", sampling=Sampling(samples=3, seqlen=5, seed=11))
    arguments = sys.modules[own].seen
    assert arguments == {"samples": 3, "seqlen": 5, "seed": 11, "other": "default"}
    assert model.name == "sampled"
    assert [tuple(sample.shape) for sample in model.inputs] == [(5, 4)] * 3
    tokens = torch.arange(9)
    load(f"{own}:make", sampling=Sampling(tokens=tokens))
    assert arguments["tokens"] is tokens


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("missing", ["unknown function of", "'missing'. Allowed: broken, build, sampled, wrong"]),
        ("", ["unknown function of", "Allowed: broken, build"]),
        ("number", ["is int, not a callable returning a Model"]),
        ("wrong", ["returned Net, not a qgate.Model"]),
    ],
)
def test_a_callable_that_is_none(own: str, attribute: str, words: list[str]) -> None:
    with pytest.raises(QgateError) as caught:
        load(f"{own}:{attribute}")
    for word in [f"{own}:{attribute}", *words]:
        assert word in str(caught.value)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(QgateError, match=r"'no\.such\.module:build'.*No module named 'no'"):
        load("no.such.module:build")
    with pytest.raises(QgateError, match=r"'\.\.:build'"):
        load("..:build")


def test_what_goes_wrong_inside_a_callable_is_told_with_its_line(own: str) -> None:
    words = r"cannot be built: RuntimeError: the weights are gone \(.*nets\.py:\d+\)"
    with pytest.raises(QgateError, match=words) as caught:
        load(f"{own}:broken")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_callable_in_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "their suites"
    folder.mkdir()
    (folder / "beside.py").write_text("WIDTH = 3\n")
    file = folder / "their_model.py"
    file.write_text(
        "import torch, qgate, beside\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Linear(beside.WIDTH, 3) for _ in 'ab')\n"
        "    def forward(self, x): return self.layers[1](self.layers[0](x))\n"
        "def build(): return qgate.Model(Net(), [torch.ones(1, beside.WIDTH)])\n"
    )
    for name in ("their suites/their_model.py:build", f"{file}:build"):
        model = load(name)
        assert (model.name, model(model.inputs[0]).shape) == (name, (1, 3))
    assert type(load(f"{file}:build").module) is type(load(f"{file}:build").module)
    with pytest.raises(QgateError, match=r"there is no file .*gone\.py"):
        load("gone.py:build")
    file.write_text("def build(:\n")
    sys.modules.pop("qgate_model_file_their_model")
    with pytest.raises(QgateError, match=r"cannot take 'build' from .*SyntaxError"):
        load(f"{file}:build")


_ENDING = """
import argparse, sys, torch, qgate
WHERE = {where!r}
def end(here):
    if here == WHERE:
        argparse.ArgumentParser().parse_args(["--epochs"])
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)
    def forward(self, x):
        end("forward")
        return self.fc(x)
def int9(model):
    end("mode")
    return torch.nn.Sequential(model.module)
def accuracy(outputs):
    end("metric")
def build():
    end("build")
    return qgate.Model(Net(), [torch.ones(1, 3)], modes=dict(int9=int9), metric=accuracy)
end("import")
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("import", "cannot take 'build' from .*: SystemExit: 2, the end of the program; move .*"),
        ("build", "model .* cannot be built: SystemExit: 2, the end of the program; move .*"),
        ("forward", r".* cannot run sample 0 of 0 to 0 \(float32 1 x 3\): SystemExit: 2"),
        ("mode", "mode 'int9' of .* cannot be built: SystemExit: 2"),
        ("metric", "metric accuracy of .* raised SystemExit: 2"),
    ],
)
def test_what_would_end_the_program_is_an_error(tmp_path: Path, where: str, words: str) -> None:
    """A script without a guard has argparse read the words of pytest, and end it."""
    file = tmp_path / f"ending_{where}.py"
    file.write_text(_ENDING.format(where=where))

    def go() -> None:
        model = load(f"{file}:build")
        logits = model(model.inputs[0]).detach()
        modes.apply(modes.find_mode("int9", "other", model.modes), model)
        task_figures(model.metric, "net", "int9", {"outputs": [logits]})

    with pytest.raises(QgateError, match=f"^{words}$"):
        go()


# Devices -----------------------------------------------------------------------------------------


def test_devices() -> None:
    few = Sampling(samples=1, seqlen=8)
    assert load("tiny-llama", device="cpu", sampling=few).device.type == "cpu"
    with pytest.raises(
        QgateError, match=r"unknown device 'tpu'\. Allowed: auto, cpu, cuda, cuda:N"
    ):
        load("tiny-llama", device="tpu", sampling=few)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(QgateError, match=rf"device 'cuda:{count}' was asked for.*Use auto or cpu"):
        load("tiny-llama", device=f"cuda:{count}", sampling=few)
    expected = "cuda" if count else "cpu"
    assert load("tiny-llama", device="auto", sampling=few).device.type == expected


@pytest.mark.parametrize(
    "name", ["", "cpu:", "cpu:00", "cuda:", "cuda:-1", "cuda:01", "cuda:0:1", "cuda:99999"]
)
def test_a_number_that_no_device_has_is_an_unknown_device(name: str) -> None:
    with pytest.raises(QgateError, match=f"unknown device '{name}'"):
        load("tiny-llama", device=name)


@pytest.mark.parametrize("name", ["cpu:1", "xpu:99", "MPS:7", "mtia:3"])
def test_a_device_that_is_not_here_is_named_with_those_that_are(name: str) -> None:
    with pytest.raises(QgateError, match=f"device '{name}' was asked for, but .* sees .*cpu"):
        load("tiny-llama", device=name)


@pytest.mark.parametrize("name", ["meta", "nn", "ops", "classes", "accelerator", "mkldnn", "npu"])
def test_a_name_of_torch_that_is_no_accelerator_is_an_unknown_device(name: str) -> None:
    with pytest.raises(QgateError, match=f"unknown device '{name}'"):
        load("tiny-llama", device=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(
        QgateError,
        match=r"device 'cuda' was asked for, but torch .* sees only cpu\. Use auto or cpu",
    ):
        load("tiny-llama", device="cuda")


# Samples -----------------------------------------------------------------------------------------


def rows(samples: Any) -> list[list[int]]:
    return [sample.flatten().tolist() for sample in samples]


def parts(sampling: Sampling) -> tuple[list[list[int]], list[list[int]]]:
    model = load("tiny-llama", sampling=sampling)
    return rows(model.inputs), rows(model.calibration_samples())


def test_the_same_sampling_gives_the_same_samples_and_more_keep_those_there_were() -> None:
    first = parts(Sampling(samples=4, seqlen=32, calib_samples=5, calib_seqlen=16))
    assert first == parts(Sampling(samples=4, seqlen=32, calib_samples=5, calib_seqlen=16))
    evaluation, calibration = parts(
        Sampling(samples=7, seqlen=32, calib_samples=9, calib_seqlen=16)
    )
    assert (evaluation[:4], calibration[:5]) == first
    assert parts(Sampling(samples=4, seqlen=32, seed=1, calib_samples=5))[0] != first[0]
    assert {len(row) for row in first[0]} == {32}
    assert {len(row) for row in first[1]} == {16}


def test_calibration_has_its_own_text() -> None:
    evaluation, calibration = parts(
        Sampling(samples=50, seqlen=64, calib_samples=60, calib_seqlen=64)
    )
    assert bytes(chain(*evaluation)).decode() == language.text("evaluation", 50 * 64)
    assert bytes(chain(*calibration)).decode() == language.text("calibration", 60 * 64)
    assert not {tuple(row) for row in evaluation} & {tuple(row) for row in calibration}


def test_given_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aé" * 100, encoding="utf-8")
    (tmp_path / "b.txt").write_text("b" * 100)
    sampling = Sampling(2, 30, 3, 20, text=tmp_path / "a.txt", calib_text=tmp_path / "b.txt")
    evaluation, calibration = parts(sampling)
    assert all(set(row) <= set("aé".encode()) for row in evaluation)
    assert calibration == [[ord("b")] * 20] * 3


def test_given_tokens_are_shared_between_evaluation_and_calibration(tmp_path: Path) -> None:
    ids = torch.arange(200, dtype=torch.int32)
    sampling = Sampling(10, 10, 10, 10, tokens=ids)
    evaluation, calibration = parts(sampling)
    assert sorted(chain(*evaluation)) == list(range(100))
    assert sorted(chain(*calibration)) == list(range(100, 200))
    (tmp_path / "b.txt").write_text("b" * 100)
    evaluation, calibration = parts(Sampling(20, 10, 5, 20, tokens=ids, calib_text=Path("b.txt")))
    assert sorted(chain(*evaluation)) == list(range(200))
    assert calibration == [[ord("b")] * 20] * 5
    model = load("tiny-llama", sampling=sampling)
    assert model.inputs[0].dtype == torch.int64
    assert model(model.inputs[0]).shape == (1, 10, 256)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.ones(100), ["whole numbers", "torch.float32 (100,)"]),
        (torch.ones(100, dtype=torch.bfloat16), ["whole numbers", "torch.bfloat16"]),
        (torch.ones(4, 100, dtype=torch.int64), ["one row", "(4, 100)"]),
        (torch.tensor(3), ["one row", "()"]),
        (torch.ones(0, dtype=torch.int64), ["one row", "(0,)"]),
        (torch.arange(300), ["from 0 to 255", "from 0 to 299", "tokenizer"]),
        (torch.arange(-5, 200), ["from 0 to 255", "from -5 to 199", "tokenizer"]),
    ],
)
def test_tokens_that_cannot_be_used(tokens: Tensor, words: list[str]) -> None:
    with pytest.raises(QgateError) as caught:
        load("tiny-llama", sampling=Sampling(samples=1, seqlen=4, tokens=tokens))
    for word in words:
        assert word in str(caught.value)


def test_more_samples_than_there_is_text(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("b" * 2000)
    sampling = Sampling(samples=100, seqlen=512, text=tmp_path / "short.txt")
    with pytest.raises(QgateError) as caught:
        load("tiny-llama", sampling=sampling)
    for word in ("100 samples of 512 tokens", "2000", "enough for 3", "fewer"):
        assert word in str(caught.value)


def test_the_built_in_text_gives_as_many_samples_as_are_asked_for() -> None:
    model = load("tiny-llama", sampling=Sampling(samples=400, seqlen=512, calib_samples=10**6))
    assert len({row.numpy().tobytes() for row in model.inputs}) == 400
    with pytest.raises(QgateError, match=r"512000064 characters .* up to 67108864"):
        model.calibration_samples()


@pytest.mark.parametrize(("field", "value"), [("samples", 0), ("seqlen", 0), ("samples", -3)])
def test_samples_and_lengths_are_numbers_from_1(field: str, value: int) -> None:
    with pytest.raises(QgateError, match=f"{field} {value} is not allowed; .* from 1"):
        load("tiny-llama", sampling=Sampling(**{field: value}))  # type: ignore[arg-type]


def test_a_text_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match=r"'gone\.txt' cannot be read: No such file"):
        load("tiny-llama", sampling=Sampling(text=Path("gone.txt")))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 50)
    with pytest.raises(QgateError, match=r"'latin\.txt' is not text in UTF-8"):
        load("tiny-llama", sampling=Sampling(text=Path("latin.txt")))


def test_the_tiny_models_are_all_listed() -> None:
    assert {tiny.title for tiny in TINY} == {
        "tiny-mamba",
        "tiny-llama",
        "tiny-moe",
        "tiny-moe-list",
    }
    assert isinstance(load("tiny-mamba", sampling=Sampling(samples=1, seqlen=4)), Model)
