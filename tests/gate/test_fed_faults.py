"""Faults in detectors and in models of two inputs, loaded as folders: red at their layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from qgate import Model
from qgate.models import Sampling, load
from qgate.modes import Kernel
from tests.gate.test_any_model import Fused, failures_after_accepting, fused
from tests.models.fed_folders import save_network
from tests.shares import share, slow_file

pytestmark = slow_file

pytest.importorskip("transformers")

TWO = Sampling(samples=2, seqlen=16, calib_samples=2, calib_seqlen=16)


def loaded(folder: Path, zeroed: str = "") -> Model:
    """Return the model of a folder with a mode of its own, in which one weight may be zeros."""

    def build(reference: Model) -> nn.Module:
        module = fused(reference, "int8")
        for part in module.modules():
            if isinstance(part, Fused):
                vars(part)["weight"] = part.plain.weight  # ViLT reads the shape of one
        if zeroed:
            layer = module.get_submodule(f"{zeroed}.plain")
            layer.weight = nn.Parameter(torch.zeros_like(layer.weight))  # type: ignore[arg-type]
        return module

    model = load(f"hf:{folder}", sampling=TWO)
    model.modes = {"mine": Kernel(build, "int8")}
    return model


@share(16)
@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("DetrForObjectDetection", "model.backbone.model.encoder.stages.0.layers.0.layer.0.convolution"),
        ("DetrForObjectDetection", "model.decoder.layers.1.encoder_attn.v_proj"),
        ("ViltModel", "encoder.layer.1.attention.attention.key"),
        ("ClapModel", "audio_model.audio_encoder.layers.0.blocks.0.output.dense"),
    ],
)  # fmt: skip
def test_a_weight_of_zeros_is_red_at_its_layer(kind: str, module: str, tmp_path: Path) -> None:
    folder = save_network(kind, tmp_path / "model")
    lines = failures_after_accepting(
        loaded(folder), loaded(folder, module), tmp_path / "baselines", "mine"
    )
    assert lines[0].startswith(f"{module}:output (mode mine) "), lines
