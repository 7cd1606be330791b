from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.pairing import match_by_content, match_by_name
from tests.checkpoints.exports import export, parent_tensors, write


def test_names_match_but_for_prefixes_and_fused_parts() -> None:
    parent = ["model.layers.0.q_proj.weight", "model.layers.0.k_proj.weight",
              "model.layers.0.v_proj.weight", "model.norm.weight"]  # fmt: skip
    child = ["layers.0.qkv_proj.weight", "language_model.model.norm.weight", "model.other.weight"]
    matches = match_by_name(child, parent)
    assert matches["layers.0.qkv_proj.weight"].names == tuple(parent[:3])
    assert matches["language_model.model.norm.weight"].how == "prefix"
    assert "model.other.weight" not in matches


def test_content_tells_weights_of_one_shape_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    parents = {f"p{i}": torch.randn(40, 60, generator=generator) for i in range(6)}
    parents["square"] = torch.randn(50, 50, generator=generator)
    children: dict[str, Tensor] = {f"c{i}": parents[f"p{5 - i}"].T for i in range(6)}
    children["turned"] = parents["square"].T
    children["stranger"] = torch.randn(40, 60, generator=generator)
    noisy = {
        name: x + 0.1 * torch.randn(x.shape, generator=generator) for name, x in children.items()
    }
    matches = match_by_content(
        {name: tuple(x.shape) for name, x in noisy.items()},
        {name: tuple(x.shape) for name, x in parents.items()},
        noisy.__getitem__,
        parents.__getitem__,
    )
    assert {name: match.names[0] for name, match in matches.items()} == {
        **{f"c{i}": f"p{5 - i}" for i in range(6)},
        "turned": "square",
    }
    assert all(match.transposed for match in matches.values())


def test_an_export_with_other_names_is_matched_by_content(tmp_path: Path) -> None:
    write(tmp_path / "parent", parent_tensors(), {})
    tensors = load_file(export(tmp_path / "child", "int8") / "model.safetensors")
    renamed = {}
    for name, x in tensors.items():
        stem, _, ending = name.rpartition(".")
        is_quantized = f"{stem}.weight_scale" in tensors
        renamed[f"{stem.replace('proj', 'linear')}.{ending}" if is_quantized else name] = x
    write(tmp_path / "child", renamed, {"quantization_config": {"quant_method": "fp8"}})
    record = compare(str(tmp_path / "child"), str(tmp_path / "parent"))
    matched = [weight for weight in record.weights if weight.matched == "content"]
    assert len(matched) == 14
    assert all(w.parents[0] == w.name.replace("linear", "proj") for w in matched)
    assert all(w.figures is not None and (w.figures.over_ideal_db or 0) < 0.5 for w in matched)


def test_a_fused_weight_is_compared_with_its_parts(tmp_path: Path) -> None:
    parent = parent_tensors()
    write(tmp_path / "parent", parent, {})
    tensors = load_file(export(tmp_path / "child", "int8") / "model.safetensors")
    for ending in ("weight", "weight_scale"):
        for layer in (0, 1):
            stem = f"model.layers.{layer}.mlp."
            parts = [tensors.pop(f"{stem}{part}_proj.{ending}") for part in ("gate", "up")]
            tensors[f"{stem}gate_up_proj.{ending}"] = torch.cat(parts)
    write(tmp_path / "child", tensors, {"quantization_config": {"quant_method": "fp8"}})
    record = compare(str(tmp_path / "child"), str(tmp_path / "parent"))
    fused = [weight for weight in record.weights if weight.matched == "fused"]
    assert [len(weight.parents) for weight in fused] == [2, 2]
    assert record.unmatched_parents == []
    assert all("declares" in finding.cause for finding in record.findings)
