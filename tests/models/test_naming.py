"""Names that people give to models: hf:PATH=NAME, and those that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgate.errors import QgateError
from qgate.models import Model, Sampling, load
from qgate.models.naming import TINY_NAMES, check_names, shown_name, split_name
from qgate.models.tiny import TINY
from tests.models.fed_folders import save_network

TWO = Sampling(samples=2, seqlen=16, calib_samples=2, calib_seqlen=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_network("BertModel", tmp_path_factory.mktemp("named") / "lr=3" / "bert")


@pytest.mark.parametrize("scheme", ["hf", "HF", "mamba"])
def test_a_name_is_behind_the_last_sign(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=b").mkdir()
    (tmp_path / "plain").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_name(f"{scheme}:plain") == (f"{scheme}:plain", None)
    assert split_name(f"{scheme}:plain=mine") == (f"{scheme}:plain", "mine")
    assert split_name(f"{scheme}:a=b") == (f"{scheme}:a=b", None)
    assert split_name(f"{scheme}:a=b=mine") == (f"{scheme}:a=b", "mine")
    assert split_name(f"{scheme}:gone=mine") == (f"{scheme}:gone", "mine")
    assert split_name(f"{scheme}:gone=3/mine") == (f"{scheme}:gone=3/mine", None)
    assert shown_name(f"{scheme}:plain=mine") == "mine"


@pytest.mark.parametrize("model", ["tiny-llama", "own.module:build", "a=b.py:build", "tiny=llama"])
def test_only_folders_have_names(model: str) -> None:
    assert split_name(model) == (model, None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("a/b", "it reads like a path"),
        ("a\\b", "it reads like a path"),
        ("..", "it reads like a path"),
        ("a\nb", "do not print"),
        ("a\x1b[31m", "do not print"),
        (" a", "blanks around it"),
        ("tiny-mamba", "a model of qgate has it"),
        ("Tiny_Llama", "a model of qgate has it"),
    ],
)
def test_names_that_cannot_be(name: str, reason: str, tmp_path: Path) -> None:
    expected = rf"name .* of model .* is not allowed: .*{reason}.*hf:checkpoints/mine=mine"
    if name.strip() == name:  # a model is read without blanks around it
        with pytest.raises(QgateError, match=expected) as caught:
            load(f"hf:{tmp_path}={name}")
        assert str(caught.value).isprintable()
    with pytest.raises(QgateError, match=expected):
        load("tiny-llama", name=name)


def test_names_of_the_tiny_models_are_all_refused() -> None:
    assert {tiny.title for tiny in TINY} == set(TINY_NAMES)


def test_a_named_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(f"hf:{folder}", sampling=TWO).name == f"hf:{folder}"
    assert load(f"hf:{folder}=mein Modell é", sampling=TWO).name == "mein Modell é"
    assert load(f"hf:{folder}=mine", name="other", sampling=TWO).name == "other"
    assert load("tiny-llama", name="mine", sampling=TWO).name == "mine"
    monkeypatch.chdir(folder.parent)
    assert load("hf:bert=mine", sampling=TWO).name == "mine"
    with pytest.raises(QgateError, match=r"'hf:gone=mine': there is no folder 'gone'"):
        load("hf:gone=mine")
    with pytest.raises(QgateError, match=r"there is no folder '.*lr=4/bert'"):
        load(f"hf:{tmp_path}/lr=4/bert")


def test_a_callable_is_called_as_asked() -> None:
    built = load("tiny-llama", sampling=TWO)
    model = load("own", name="mine", build=lambda: Model(built.module, built.inputs, "theirs"))
    assert model.name == "mine"


def test_two_models_of_one_name() -> None:
    check_names(["hf:a=x", "hf:b=y", "tiny-llama", "tiny-mamba"])
    with pytest.raises(QgateError, match="models 'hf:a=x' and 'mamba:b=x' are all called 'x'"):
        check_names(["hf:a=x", "mamba:b=x"])
