"""Folders of encoders, vision and sound: they are fed what they take, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate.activation_stats.subjects import subject_of
from qgate.errors import QgateError
from qgate.models import Sampling, load
from qgate.models.huggingface import tokenizer
from qgate.models.model import inputs_hash
from tests.models.checkpoints import FoldersByName, changed
from tests.models.fed_folders import VOCABULARY, save_network
from tests.shares import share

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_network")

TWO = Sampling(samples=2, seqlen=16, calib_samples=3, calib_seqlen=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return FoldersByName(lambda kind: save_network(kind, tmp_path_factory.mktemp("fed") / "model"))


def shapes(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {name: tuple(tensor.shape) for name, tensor in sample.items()}
    return tuple(sample.shape)


@share(6)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("BertModel", (1, 16)),
        ("BertForSequenceClassification", (1, 16)),
        ("RobertaForMaskedLM", (1, 16)),
        ("T5EncoderModel", (1, 16)),
        ("ViTForImageClassification", (1, 1, 16, 16)),
        ("ConvNextForImageClassification", (1, 3, 16, 16)),
        ("ResNetModel", (1, 3, 224, 224)),
        ("VideoMAEModel", (1, 4, 3, 16, 16)),
        (
            "CLIPModel",
            {"input_ids": (1, 16), "attention_mask": (1, 16), "pixel_values": (1, 3, 16, 16)},
        ),
        (
            "ViltModel",
            {"input_ids": (1, 16), "attention_mask": (1, 16), "pixel_values": (1, 3, 16, 16)},
        ),
        ("DetrForObjectDetection", (1, 3, 224, 224)),
        (
            "ClapModel",
            {
                "input_ids": (1, 16),
                "attention_mask": (1, 16),
                "input_features": (1, 1, 256, 16),
                "is_longer": (1, 1),
            },
        ),
        (
            "ClapAudioModelWithProjection",
            {"input_features": (1, 4, 256, 16), "is_longer": (1, 1)},
        ),
        ("Wav2Vec2ForCTC", (1, 16000)),
        ("HubertModel", (1, 16000)),
        ("ASTModel", (1, 32, 16)),
        ("WhisperForAudioClassification", (1, 16, 40)),
    ],
)
def test_a_network_is_fed_what_it_takes(
    kind: str, shape: Any, folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"hf:{folders[kind]}"
    capfd.readouterr()
    model = load(name, sampling=TWO)
    assert type(model.module).__name__ == kind
    assert [shapes(sample) for sample in model.inputs] == [shape, shape]
    calibration = model.calibration_samples()
    assert len(calibration) == 3
    all_samples = [*model.inputs, *calibration]
    assert len({inputs_hash([sample]) for sample in all_samples}) == 5, "no two samples are alike"
    assert inputs_hash(load(name, sampling=TWO).inputs) == inputs_hash(model.inputs)
    outputs = [model.outputs(sample) for sample in model.inputs]
    assert all(tensor.isfinite().all() for of in outputs for tensor in of.values())
    assert any(not torch.equal(outputs[0][site], outputs[1][site]) for site in outputs[0])
    assert model.sites()
    assert capfd.readouterr() == ("", "")


def test_more_samples_keep_those_there_were_and_a_seed_gives_others(
    folders: dict[str, Path],
) -> None:
    name = f"hf:{folders['ViTForImageClassification']}"
    three, two, other = (
        load(name, sampling=Sampling(samples=samples, seed=seed)).inputs
        for samples, seed in ((3, 0), (2, 0), (2, 1))
    )
    assert inputs_hash(three[:2]) == inputs_hash(two)
    assert inputs_hash(two) != inputs_hash(other)


def test_texts_of_two_inputs_are_framed_and_fit(folders: dict[str, Path]) -> None:
    """CLIP reads the output at the end token, so a text without one would be read at its start."""
    folder = folders["CLIPModel"]
    words = tokenizer(folder)
    model = load(f"hf:{folder}", sampling=Sampling(samples=2, calib_samples=2))
    for sample in (*model.inputs, *model.calibration_samples()):
        assert shapes(sample)["input_ids"] == (1, 24), "the positions there are"
        assert int(sample["input_ids"][0, 0]) == words.bos
        assert words.decode(sample["input_ids"][0, -1:].tolist()) == ["</s>"]
        assert bool(sample["attention_mask"].all())
    assert model.part == ""
    modules = {site.module for site in model.sites() if site.kind == "linear"}
    assert {name.partition(".")[0] for name in modules} >= {"text_model", "vision_model"}


def test_token_ids_of_two_inputs_stay_as_they_are(folders: dict[str, Path]) -> None:
    ids = torch.arange(96) % VOCABULARY
    model = load(
        f"hf:{folders['CLIPModel']}",
        sampling=Sampling(samples=2, seqlen=16, calib_samples=2, calib_seqlen=8, tokens=ids),
    )
    rows = {tuple(sample["input_ids"][0].tolist()) for sample in model.inputs}
    assert rows <= {tuple(range(k, k + 16)) for k in (0, 16, 32)}
    with pytest.raises(QgateError, match=r"from 0 to 319, .* from 0 to 400\."):
        load(
            f"hf:{folders['CLIPModel']}",
            sampling=Sampling(samples=2, seqlen=16, tokens=torch.arange(401)),
        )


def test_views_of_a_long_sound_are_fused(folders: dict[str, Path]) -> None:
    alone, fused = (
        load(f"hf:{folders[kind]}", sampling=TWO).inputs[0]
        for kind in ("ClapModel", "ClapAudioModelWithProjection")
    )
    assert not alone["is_longer"].any()
    assert fused["is_longer"].all()
    views = fused["input_features"][0]
    assert len({inputs_hash([view]) for view in views}) == 4, "no two views are alike"


def test_a_network_that_draws_numbers_draws_the_same_ones(folders: dict[str, Path]) -> None:
    """ViLT draws the order of its patches in evaluation too."""
    model = load(f"hf:{folders['ViltModel']}", sampling=TWO)
    first = model(model.inputs[0])
    torch.rand(3)
    assert torch.equal(model(model.inputs[0]), first)


def test_the_encoder_of_whisper_alone(tmp_path: Path) -> None:
    """Its class is not exported by transformers, and its config says that it has a decoder."""
    folder = save_network(
        "WhisperForConditionalGeneration", tmp_path / "whisper", lambda whole: whole.get_encoder()
    )
    model = load(f"hf:{folder}", sampling=TWO)
    assert type(model.module).__name__ == "WhisperEncoder"
    assert shapes(model.inputs[0]) == (1, 16, 40)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"size": 40}, (40, 40)),
        ({"size": {"shortest_edge": 48}}, (48, 48)),
        ({"size": {"shortest_edge": 48}, "crop_size": {"height": 32, "width": 40}}, (32, 40)),
        ({"size": "large"}, (224, 224)),
        ({"size": {"height": -3, "width": 8}}, (224, 224)),
        ([1], (224, 224)),
    ],
)
def test_the_size_of_images_where_the_config_has_none(
    fields: Any, size: tuple[int, int], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(folders["ResNetModel"], tmp_path / "model", lambda _: None)
    for name, settings in (
        ("preprocessor_config.json", fields),
        ("processor_config.json", {"image_processor": fields}),
    ):
        (folder / name).write_text(json.dumps(settings))
        assert shapes(load(f"hf:{folder}", sampling=TWO).inputs[0]) == (1, 3, *size)
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("T5ForConditionalGeneration", ["t5", "an encoder and a decoder", "get_encoder()"]),
        ("WhisperForConditionalGeneration", ["whisper", "an encoder and a decoder"]),
        ("PatchTSTModel", ["PatchTSTModel", "takes past_values", "pixel_values", "input_features"]),
        ("SwinModel", ["cannot run sample 0 of 0 to 1", "(float32 1 x 3 x 32 x 32)"]),
    ],
)
def test_what_cannot_be_fed_is_one_line(
    kind: str, words: list[str], folders: dict[str, Path]
) -> None:
    with pytest.raises(QgateError) as caught:
        load(f"hf:{folders[kind]}", sampling=TWO)
    message = str(caught.value)
    for word in [*words, str(folders[kind]), "package.module:build"]:
        assert word in message, message
    assert "\n" not in message
    assert len(message) < 700


@pytest.mark.parametrize("field", ["text", "tokens", "calib_text"])
def test_a_text_that_no_sample_would_have(
    field: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    option_value = torch.arange(200) if field == "tokens" else tmp_path / "text.txt"
    (tmp_path / "text.txt").write_text("words " * 200)
    with pytest.raises(QgateError) as caught:
        load(f"hf:{folders['HubertModel']}", sampling=Sampling(**{field: option_value}))  # type: ignore[arg-type]
    option = "--" + field.replace("_", "-")
    assert str(caught.value).startswith(f"{option} would change nothing, as hf:")
    assert str(caught.value).endswith(f"model is fed input_values: leave out {option}.")


def test_positions_of_roberta_begin_behind_its_padding(folders: dict[str, Path]) -> None:
    name = f"hf:{folders['RobertaForMaskedLM']}"
    fits = load(name, sampling=Sampling(samples=1, seqlen=24))
    assert fits(fits.inputs[0]).shape[1] == 24
    with pytest.raises(QgateError, match="has 24 positions, fewer than the 25 tokens"):
        load(name, sampling=Sampling(samples=1, seqlen=25))


@pytest.mark.parametrize("samples", [0, -1])
def test_numbers_of_images_are_from_1(samples: int, folders: dict[str, Path]) -> None:
    with pytest.raises(QgateError, match=f"samples {samples} is not allowed"):
        load(f"hf:{folders['ViTForImageClassification']}", sampling=Sampling(samples=samples))


def test_activations_of_images_are_measured_on_the_same_samples(folders: dict[str, Path]) -> None:
    for kind in ("ViTForImageClassification", "CLIPModel"):
        name = f"hf:{folders[kind]}"
        subject = subject_of(name)
        assert subject.inputs is not None
        assert inputs_hash(subject.inputs) == inputs_hash(load(name).inputs)
    assert subject_of(f"hf:{folders['BertModel']}").inputs is None
