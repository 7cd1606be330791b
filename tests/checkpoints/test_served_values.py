"""What is shipped beside weights: scales of activations, and settings of the network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.model_settings import changed_settings
from qgate.checkpoints.stored import Checkpoint
from tests.checkpoints.exports import LAYERS, PROJECTIONS, parent_tensors, write

Tensors = dict[str, Tensor]
Settings = dict[str, Any]
NETWORK: Settings = {
    "model_type": "llama", "hidden_size": 64, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "torch_dtype": "bfloat16",
    "eos_token_id": 2, "transformers_version": "4.50.0", "num_attention_heads": 4,
}  # fmt: skip
LARGEST = {"q_proj": 4.0, "k_proj": 4.0, "v_proj": 4.0, "o_proj": 1.5, "gate_proj": 5.0,
           "up_proj": 5.0, "down_proj": 30.0}  # fmt: skip
LAYER_COUNT = 5
UP = "model.layers.1.mlp.up_proj"


def more_layers(tensors: Tensors) -> Tensors:
    """Repeat the layers of the small network."""
    grown = {name: x for name, x in tensors.items() if ".layers." not in name}
    for layer in range(LAYER_COUNT):
        source = f"model.layers.{layer % LAYERS}."
        grown |= {
            name.replace(source, f"model.layers.{layer}."): x.clone()
            for name, x in tensors.items()
            if name.startswith(source)
        }
    return grown


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a parent, and an FP8 child with static scales of activations."""
    root = tmp_path_factory.mktemp("served")
    tensors = more_layers(parent_tensors())
    parent = write(root / "parent", tensors, NETWORK)
    child: Tensors = {}
    for name, x in tensors.items():
        if "_proj" not in name:
            child[name] = x
            continue
        scale = x.float().abs().amax().reshape(1) / 448
        child[name] = (x.float() / scale).to(torch.float8_e4m3fn)
        child[f"{name}_scale"] = scale
        kind, layer = name.split(".")[-2], int(name.split(".")[2])
        # Massive activations of one layer.
        most = LARGEST[kind] * (60 if (kind, layer) == ("down_proj", 1) else 1 + 0.1 * layer)
        child[name.replace(".weight", ".input_scale")] = torch.tensor([most / 448])
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    settings = NETWORK | {"quantization_config": recipe, "transformers_version": "5.0.0"}
    return write(root / "child", child, settings), parent


def changed(
    pair: tuple[Path, Path], folder: Path, change: Callable[[Tensors, Settings], object]
) -> list[tuple[str, str]]:
    tensors = load_file(pair[0] / "model.safetensors")
    settings = json.loads((pair[0] / "config.json").read_text())
    change(tensors, settings)
    write(folder / "child", tensors, settings)
    findings = compare(str(folder / "child"), str(pair[1])).findings
    return [(finding.subject, finding.cause) for finding in findings]


def test_right_scales_and_settings_are_no_finding(pair: tuple[Path, Path]) -> None:
    assert compare(*map(str, pair)).findings == []


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_found(
    value: float, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    name = f"{UP}.input_scale"
    ((subject, cause),) = changed(
        pair, tmp_path, lambda t, _: t.update({name: torch.tensor([value])})
    )
    assert subject == name
    if value - value == 0:
        assert cause == f"it is {value:.4g}, and a scale is more than 0"
    else:
        assert cause == "1 of 1 values are NaN or infinite"


def test_a_divisor_of_zero_is_found(pair: tuple[Path, Path], tmp_path: Path) -> None:
    name = f"{UP}.input_global_scale"

    def plant(tensors: Tensors, _: Settings) -> None:
        del tensors[f"{UP}.input_scale"]
        tensors[name] = torch.zeros(1)

    ((subject, cause),) = changed(pair, tmp_path, plant)
    assert (subject, cause) == (name, "it is 0, and a scale is more than 0")


@pytest.mark.parametrize(
    ("module", "factor", "words"),
    [
        ("model.layers.3.self_attn.v_proj", 1000, "weights that read one input have other scales"),
        ("model.layers.1.mlp.up_proj", 0.01, "weights that read one input have other scales"),
        ("model.layers.2.self_attn.o_proj", 1000, "those of other layers are for"),
        ("model.layers.0.mlp.down_proj", 1 / 1000, "those of other layers are for"),
    ],
)
def test_one_scale_that_is_off_is_named(
    module: str, factor: float, words: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def plant(tensors: Tensors, _: Settings) -> None:
        tensors[f"{module}.input_scale"] *= factor

    ((subject, cause),) = changed(pair, tmp_path, plant)
    assert subject == f"{module}.input_scale"
    assert words in cause


def test_all_scales_that_are_off_are_more_than_norms_give(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def plant(tensors: Tensors, _: Settings) -> None:
        for name in tensors:
            if name.endswith("input_scale"):
                tensors[name] *= 1000

    findings = changed(pair, tmp_path, plant)
    readers = [name for name in PROJECTIONS if name.split(".")[1] not in ("o_proj", "down_proj")]
    assert len(findings) == LAYER_COUNT * len(readers)
    assert all("the norm before gives at most" in cause for _, cause in findings)


@pytest.mark.parametrize(
    ("change", "subject", "words"),
    [
        ({"rope_theta": 10000.0}, "rope_theta", "10000.0 here and 500000.0 in the parent"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps", "1e-06 here and 1e-05 in the parent"),
        ({"rope_scaling": {"factor": 4.0, "rope_type": "llama3"}}, "rope_scaling.factor", "4.0 here"),
        ({"rope_theta": None}, "rope_theta", "None here and 500000.0"),
        ({"num_attention_heads": 8}, "num_attention_heads", "8 here and 4"),
    ],
)  # fmt: skip
def test_another_setting_than_the_parents_is_found(
    change: Settings, subject: str, words: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    ((where, cause),) = changed(pair, tmp_path, lambda _, settings: settings.update(change))
    assert where == f"config.json {subject}"
    assert words in cause


def test_a_lost_setting_is_found(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ((where, cause),) = changed(pair, tmp_path, lambda _, settings: settings.pop("rope_theta"))
    assert (where, cause) == (
        "config.json rope_theta",
        "it is missing here and 500000.0 in the parent: copy the parent's value",
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 500000, "rope_type": "llama3"}, "rope_theta": 500000},
        {"dtype": "bfloat16", "eos_token_id": [2, 3], "use_cache": False, "_name_or_path": "x"},
        {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    ],
)
def test_what_exporters_change_rightly_is_no_finding(
    change: Settings, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert changed(pair, tmp_path, lambda _, settings: settings.update(change)) == []


def test_settings_without_an_effect_may_differ() -> None:
    """Libraries write what follows from other settings, and leave out what is off."""
    older: Settings = {
        **NETWORK, "use_sliding_window": False, "sliding_window": 4096, "head_dim": None,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 2]},
    }  # fmt: skip
    newer: Settings = {
        **older, "sliding_window": None, "head_dim": 16,
        "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]},
    }  # fmt: skip
    sides = [Checkpoint(name, {}, lambda _: torch.empty(0), {"config.json": settings})
             for name, settings in (("child", newer), ("parent", older))]  # fmt: skip
    assert list(changed_settings(*sides)) == []
    older |= {"use_sliding_window": True}
    assert "config.json sliding_window" in {f.subject for f in changed_settings(*sides)}


def test_a_setting_that_moved_is_the_same(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def move(_: Tensors, settings: Settings) -> None:
        rope = settings.pop("rope_scaling")
        settings["rope_parameters"] = rope | {"rope_theta": settings.pop("rope_theta")}

    assert changed(pair, tmp_path, move) == []
