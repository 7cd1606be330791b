"""Exports of the small mixture of experts by the libraries, from weights in 3-D and in a list."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints.comparison import compare
from tests.checkpoints import torchao_exports
from tests.checkpoints.exports import SCHEMES, compress, configuration, fused_with, library, write
from tests.shares import share

EXPERTS, NUMBER = "mlp.experts.", 4


def fused() -> dict[str, Tensor]:
    """Return trained weights of a layer: gate_up_proj and down_proj of experts in one tensor."""
    tensors = load_file(str(files("qgate.models") / "data" / "tiny-moe.safetensors"))
    layer = {name: x for name, x in tensors.items() if ".layers.0." in name}
    return {name: x[:NUMBER].clone() if EXPERTS in name else x for name, x in layer.items()}


def listed() -> dict[str, Tensor]:
    """Return the same weights under the names of a list of modules."""
    tensors = {}
    for name, x in fused().items():
        before, experts, part = name.partition(EXPERTS)
        for number, weight in enumerate(x if experts else ()):
            stem = f"{before}{EXPERTS}{number}."
            if part == "gate_up_proj":
                gate, up = weight.chunk(2)
                tensors[f"{stem}gate_proj.weight"] = gate
                tensors[f"{stem}up_proj.weight"] = up
            else:
                tensors[f"{stem}{part}.weight"] = weight
        if not experts:
            tensors[name] = x
    return tensors


def by_compressed_tensors(folder: Path, scheme: str) -> Path:
    declared = SCHEMES[scheme]
    stored: dict[str, Tensor] = {}
    listed_weights = listed()
    for name, x in listed_weights.items():
        if "_proj" not in name:
            stored[name] = x
            continue
        whole = None
        if declared.arguments["strategy"] == "tensor_group":
            fused_parts = [listed_weights[part] for part in fused_with(name)]
            whole = library("quantization.utils").generate_gparam(*torch.cat(fused_parts).aminmax())
        parts, _ = compress(declared, x, whole)
        module = name.removesuffix("weight")
        stored |= {f"{module}{ending}": part for ending, part in parts.items()}
    return write(folder, stored, configuration(declared))


def stacked_mxfp4(folder: Path) -> Path:
    """Store experts as gpt-oss does: blocks and scales of all experts in one tensor."""
    stored: dict[str, Tensor] = {}
    for name, x in fused().items():
        if EXPERTS not in name:
            stored[name] = x
            continue
        parts, _ = compress(SCHEMES["mxfp4"], x.reshape(-1, x.shape[-1]))
        blocks = parts["weight_packed"].reshape(*x.shape[:2], -1, 16)
        stored |= {
            f"{name}_blocks": blocks,
            f"{name}_scales": parts["weight_scale"].reshape(blocks.shape[:3]),
        }
    return write(folder, stored, {"quantization_config": {"quant_method": "mxfp4"}})


def by_torchao(folder: Path, scheme: str) -> Path:
    quantize = torchao_exports.SCHEMES[scheme][0]
    state = {name: quantize(x.bfloat16()) if "_proj" in name else x for name, x in listed().items()}
    tensors, metadata = torchao_exports.flatten_tensor_state_dict(state)
    settings = torchao_exports.configuration(scheme)
    return torchao_exports.write(folder, dict(tensors), dict(metadata), settings)


CHILDREN = {
    **{f"compressed-tensors {s}": (by_compressed_tensors, s) for s in ("int8", "w4a16-zero-points", "fp8-block", "nvfp4")},
    **{f"torchao {s}": (by_torchao, s) for s in ("int8", "mxfp8")},
}  # fmt: skip


@share(4)
@pytest.mark.parametrize("parent", [fused, listed])
@pytest.mark.parametrize("child", CHILDREN)
def test_listed_experts_are_compared_with_stacked_and_listed_ones(
    child: str, parent: Callable[[], dict[str, Tensor]], tmp_path: Path
) -> None:
    make, scheme = CHILDREN[child]
    write(tmp_path / "parent", parent(), {})
    record = compare(str(make(tmp_path / "child", scheme)), str(tmp_path / "parent"))
    assert record.findings == []
    assert record.unmatched_parents == []
    experts = [weight for weight in record.weights if EXPERTS in weight.name]
    assert len(experts) == 3 * NUMBER
    assert {weight.outcome for weight in experts} == {"quantized"}
    figures = [weight.figures for weight in experts if weight.figures is not None]
    assert len(figures) == len(experts)


@pytest.mark.parametrize("parent", [fused, listed])
def test_stacked_experts_are_compared_with_listed_ones(
    parent: Callable[[], dict[str, Tensor]], tmp_path: Path
) -> None:
    write(tmp_path / "parent", parent(), {})
    record = compare(str(stacked_mxfp4(tmp_path / "child")), str(tmp_path / "parent"))
    assert record.findings == []
    assert record.unmatched_parents == []


@pytest.mark.parametrize("parent", [fused, listed])
def test_exchanged_experts_are_found(
    parent: Callable[[], dict[str, Tensor]], tmp_path: Path
) -> None:
    tensors = parent()
    write(tmp_path / "parent", tensors, {})
    child = by_compressed_tensors(tmp_path / "child", "int8")
    stored = load_file(child / "model.safetensors")
    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in (1, 3)]
    for ending in ("", "_scale"):
        first, second = (f"{name}{ending}" for name in names)
        stored[first], stored[second] = stored[second], stored[first]
    write(tmp_path / "child", stored, configuration(SCHEMES["int8"]))
    record = compare(str(tmp_path / "child"), str(tmp_path / "parent"))
    assert sorted(finding.subject for finding in record.findings) == names
    assert names[1] in record.findings[0].cause or names[0] in record.findings[0].cause
