from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.opening import open_checkpoint
from tests.checkpoints import torchao_exports
from tests.checkpoints.torchao_exports import SCHEMES, configuration, export, flattened, write
from tests.checkpoints.work import decoded

UP = "model.layers.1.mlp.up_proj"
Tensors = dict[str, Tensor]
Metadata = dict[str, str]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_right_export_is_as_declared(scheme: str, parent: str, tmp_path: Path) -> None:
    record = compare(str(export(tmp_path / "child", scheme)), parent)
    assert record.findings == []
    outcomes = [weight.outcome for weight in record.weights]
    assert (outcomes.count("quantized"), outcomes.count("equal")) == (14, 7)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_is_decoded_as_by_the_library(scheme: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 128, generator=generator).bfloat16()
    quantized = SCHEMES[scheme][0](weight)
    tensors, metadata = torchao_exports.flatten_tensor_state_dict({"up.weight": quantized})
    write(tmp_path, dict(tensors), dict(metadata), {})
    # The library dequantizes to bfloat16, or multiplies in it.
    ours, theirs = decoded(tmp_path), quantized.dequantize().float()
    assert torch.allclose(ours, theirs, rtol=2**-7, atol=1e-9)
    if not scheme.startswith("int"):
        assert torch.equal(ours.bfloat16().float(), theirs)


@dataclass(frozen=True)
class TorchaoFault:
    """A fault: the scheme it is planted in, and words of its finding."""

    name: str
    scheme: str
    words: str
    plant: Callable[[Tensors, Metadata], object]


def _change(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Metadata], object]:
    def plant(tensors: Tensors, _metadata: Metadata) -> None:
        name = f"{UP}._weight_{part}"
        tensors[name] = change(tensors[name].clone()).to(tensors[name].dtype)

    return plant


def _state(**changed: Any) -> Callable[[Tensors, Metadata], object]:
    """Change attributes in the head."""

    def plant(_tensors: Tensors, metadata: Metadata) -> None:
        entry = json.loads(metadata[f"{UP}.weight"])
        entry["_type"] = changed.get("_type", entry["_type"])
        entry["_data"] |= {name: value for name, value in changed.items() if name != "_type"}
        metadata[f"{UP}.weight"] = json.dumps(entry)

    return plant


FAULTS = (
    TorchaoFault("scales twice too high", "int8", "all scales are 2 times too high", _change("scale", lambda x: x * 2)),
    TorchaoFault("scales of the row before", "int8", "every scale belongs to the group before it", _change("scale", lambda x: x.roll(1, 0))),
    TorchaoFault("scales inverted", "fp8", "scales are stored inverted", _change("scale", lambda x: 1 / x)),
    TorchaoFault("zero points off by one", "int4-asymmetric", "zero points are 1 too high", _change("zero_point", lambda x: x + 1)),
    TorchaoFault("codes truncated", "int8", "codes keep the upper 6 of their 8 bits", _change("qdata", lambda x: x // 4 * 4)),
    TorchaoFault("nibbles swapped", "mxfp4", "the order of nibbles", _change("qdata", lambda x: x >> 4 | x << 4)),
    TorchaoFault("nibbles of NVFP4 swapped", "nvfp4", "the order of nibbles", _change("qdata", lambda x: x >> 4 | x << 4)),
    TorchaoFault("not declared swizzled", "nvfp4", "if they are swizzled in tiles of 128 x 4, its head does not state it", _state(is_swizzled_scales=False)),
    TorchaoFault("another block size", "int4", "its head states blocks of 1 x 64, and its scales are of 1 x 32", _state(block_size=[1, 64])),
    TorchaoFault("a class of another layout", "int4", "is a Int4Tensor of torchao, whose layout is not known", _state(_type="Int4Tensor")),
    TorchaoFault("no scales", "fp8", "has no scale", lambda tensors, _: tensors.pop(f"{UP}._weight_scale")),
    TorchaoFault("NaN scales", "mxfp8", "2 of 256 scales are NaN", _change(
        "scale", lambda x: x.view(torch.uint8).index_fill(0, torch.tensor([0]), 255).view(torch.uint8).reshape(x.shape).view(x.dtype))),
    TorchaoFault("rows moved", "fp8", "rows stand in another order: moved by one", lambda tensors, metadata: (
        _change("qdata", lambda x: x.view(torch.uint8).roll(1, 0).view(x.dtype))(tensors, metadata),
        _change("scale", lambda x: x.roll(1, 0))(tensors, metadata))),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_tensor_and_cause(
    fault: TorchaoFault, parent: str, tmp_path: Path
) -> None:
    tensors, metadata = flattened(fault.scheme)
    fault.plant(tensors, metadata)
    write(tmp_path / "child", tensors, metadata, configuration(fault.scheme))
    record = compare(str(tmp_path / "child"), parent)
    causes = [f.cause for f in record.findings if f.subject.startswith(UP)]
    assert any(re.search(fault.words, cause) for cause in causes), record.findings


def test_another_configuration_than_declared_is_found(parent: str, tmp_path: Path) -> None:
    write(tmp_path / "child", *flattened("int4"), configuration("int8"))
    record = compare(str(tmp_path / "child"), parent)
    assert len(record.findings) == 14
    assert record.findings[0].cause.startswith("it is int4 per 32, and the recipe declares int8")


def test_a_head_without_json_is_damaged(tmp_path: Path) -> None:
    tensors, metadata = flattened("int8")
    metadata[f"{UP}.weight"] = "{"
    write(tmp_path / "child", tensors, metadata, configuration("int8"))
    with pytest.raises(Exception, match=rf"its head describes '{UP}\.weight' in no JSON"):
        open_checkpoint(str(tmp_path / "child"))
