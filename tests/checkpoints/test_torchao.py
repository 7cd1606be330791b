from __future__ import annotations

import json
import os
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
from qgate.errors import QgateError
from tests.checkpoints import torchao_exports
from tests.checkpoints.exports import parent_tensors
from tests.checkpoints.torchao_exports import SCHEMES, configuration, export, flattened, write
from tests.checkpoints.work import decoded
from tests.shares import share

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


@share(4)
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


# Files of torch.save -----------------------------------------------------------------------------


def saved(folder: Path, scheme: str, plant: Callable[[Any], object] | None = None) -> Path:
    """Write a state_dict of torchao's tensors by torch.save, with a fault in one of them."""
    quantize = SCHEMES[scheme][0]
    state = {n: quantize(x) if "_proj" in n else x for n, x in parent_tensors().items()}
    if plant is not None:
        plant(state[f"{UP}.weight"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configuration(scheme)), encoding="utf-8")
    torch.save({"state_dict": state, "epoch": 3}, folder / "model.pt")
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_saved_tensor_is_decoded_as_by_the_library_and_runs_nothing(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = SCHEMES[scheme][0](weight)
    torch.save({"up.weight": quantized}, tmp_path / "model.pt")
    expected = quantized.dequantize().float()

    def run(*_: object, **__: object) -> None:
        raise AssertionError("code of the library ran")

    for name in ("__new__", "__init__", "__setstate__", "__torch_dispatch__"):
        monkeypatch.setattr(type(quantized), name, run, raising=False)
    allowed = set(torch.serialization.get_safe_globals())
    assert torch.allclose(decoded(tmp_path), expected, rtol=2**-7, atol=1e-9)
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize("scheme", ["int4-asymmetric", "fp8", "nvfp4"])
def test_a_right_saved_export_is_as_declared(scheme: str, parent: str, tmp_path: Path) -> None:
    record = compare(str(saved(tmp_path / "child", scheme)), parent)
    outcomes = [weight.outcome for weight in record.weights]
    assert record.findings == []
    assert (outcomes.count("quantized"), outcomes.count("equal")) == (14, 7)


@pytest.mark.parametrize(
    ("scheme", "words", "plant"),
    [
        ("int8", "all scales are 2 times too high", lambda w: w.scale.mul_(2)),
        ("int4-asymmetric", "zero points are 1 too high", lambda w: w.zero_point.add_(1)),
        ("nvfp4", "the order of nibbles", lambda w: w.qdata.copy_(w.qdata >> 4 | w.qdata << 4)),
    ],
)
def test_a_fault_of_a_saved_tensor_is_named(
    scheme: str, words: str, plant: Callable[[Any], object], parent: str, tmp_path: Path
) -> None:
    findings = compare(str(saved(tmp_path / "child", scheme, plant)), parent).findings
    assert [f.subject for f in findings] == [f"{UP}.weight"]
    assert words in findings[0].cause


class Runs:
    """An object whose file would run a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("saved_object", "words"),
    [
        ({"up.weight": Runs()}, "would have to run posix.system to be read, which is refused"),
        (torch.ones(2), "holds no tensors by name: save the model's state_dict"),
        ({"epoch": 3}, "holds no tensors by name"),
        ({"up.weight": torch.ones(2, 2).to_sparse()}, "is torch.sparse_coo; save it dense"),
        ({"up.weight": torch.ones(2, dtype=torch.complex64)}, "is torch.complex64, and F64, F32"),
    ],
)
def test_a_file_of_something_else_is_refused(
    saved_object: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(saved_object, tmp_path / "model.pt")
    with pytest.raises(QgateError, match=re.escape(words)):
        open_checkpoint(str(tmp_path / "model.pt"))
    assert not (tmp_path / "ran").exists()


def test_a_torch_file_is_a_parent(tmp_path: Path) -> None:
    plain = tmp_path / "parent"
    plain.mkdir()
    torch.save(parent_tensors(), plain / "pytorch_model.bin")
    (plain / "training_args.bin").write_bytes(b"no weights")
    assert compare(str(export(tmp_path / "child", "int8")), str(plain)).findings == []
