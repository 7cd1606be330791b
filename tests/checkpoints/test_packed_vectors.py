"""Compare our decoders with what libraries pack; packed_vectors.json holds their tensors.

auto-gptq 0.7.1 (`qlinear_cuda.QuantLinear.pack`), auto-round 0.16.1 (its two `QuantLinear` of GPTQ,
`WQLinear_GEMM` of AWQ) and nvidia-modelopt 0.47.0 (`NVFP4QTensor`, `FP8QTensor`) packed them on a
CPU, and read the weights below from them without a difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.packings import decode
from qgate.checkpoints.recipes import read_recipe
from qgate.errors import QgateError
from tests.checkpoints.exports import write
from tests.checkpoints.references import IntegerWeight, awq_parts, gptq_parts

VECTORS = json.loads(Path(__file__).with_name("packed_vectors.json").read_text())
COLUMNS, GROUP = 32, 16


def _weight(bits: int, rows: int, groups: Tensor | None = None) -> IntegerWeight:
    """Return the codes, scales and zero points that the libraries were given."""
    row, column = torch.arange(rows)[:, None], torch.arange(COLUMNS)[None]
    codes = (3 * row + 5 * column + row * column) % 2**bits
    group = torch.arange(COLUMNS // GROUP)[None]
    zeros = ((row + 2 * group) % (2**bits - 1) + 1).float()
    groups = torch.arange(COLUMNS) // GROUP if groups is None else groups
    return IntegerWeight(codes, 2.0 ** ((row + group) % 4 - 6), zeros, groups, bits)


def _stored(name: str) -> dict[str, Tensor]:
    dtypes = {"weight": torch.uint8, "weight_scale": torch.uint8}
    return {
        ending: torch.tensor(x["data"], dtype=dtypes.get(ending, torch.int32)).reshape(x["shape"])
        if ending not in ("values", "weight_scale_2")
        else torch.tensor(x["data"]).reshape(x["shape"])
        for ending, x in VECTORS[name].items()
    }


def _decoded(folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    write(
        folder,
        {f"up.{ending}": x for ending, x in tensors.items()},
        {"quantization_config": settings},
    )
    checkpoint = open_checkpoint(str(folder))
    recipe = read_recipe(str(folder), checkpoint.configuration)
    (weight,) = find_weights(checkpoint)
    return decode(checkpoint, weight, recipe).values()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("library", "layout"),
    [("auto_gptq", None), ("auto_round zp", "gptq"), ("auto_round", "gptq_v2")],
)
def test_gptq_is_read_as_its_libraries_pack_it(
    library: str, layout: str | None, bits: int, tmp_path: Path
) -> None:
    in_order = torch.arange(COLUMNS) // GROUP
    groups = torch.arange(COLUMNS) * 7 % COLUMNS // GROUP if library == "auto_gptq" else in_order
    weight = _weight(bits, 32, groups)
    stored = _stored(f"{library} {bits}")
    scales = {"scales": weight.scales.T.contiguous().half(), "g_idx": groups.int()}
    settings: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": GROUP}
    if layout is not None:
        settings["checkpoint_format"] = layout
    assert torch.equal(_decoded(tmp_path, {**stored, **scales}, settings), weight.values())
    packed = gptq_parts(weight, 0 if layout == "gptq_v2" else 1)
    assert torch.equal(packed["qweight"], stored["qweight"])
    assert torch.equal(packed["qzeros"], stored["qzeros"])


def test_awq_is_read_as_its_library_packs_it(tmp_path: Path) -> None:
    weight, stored = _weight(4, 16), _stored("awq")
    scales = {"scales": weight.scales.T.contiguous().half()}
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    assert torch.equal(_decoded(tmp_path, {**stored, **scales}, settings), weight.values())
    assert torch.equal(awq_parts(weight)["qweight"], stored["qweight"])
    assert torch.equal(awq_parts(weight)["qzeros"], stored["qzeros"])


def test_modelopt_is_read_as_its_library_packs_it(tmp_path: Path) -> None:
    for name, algorithm in (("modelopt nvfp4", "NVFP4"), ("modelopt fp8", "FP8")):
        stored = _stored(name)
        values = stored.pop("values")
        if algorithm == "NVFP4":
            stored["weight_scale"] = stored["weight_scale"].view(torch.float8_e4m3fn)
        else:
            data = VECTORS[name]["weight_scale"]["data"]
            stored["weight_scale"] = torch.tensor(data).reshape(())
            stored["weight"] = stored["weight"].view(torch.float8_e4m3fn)
        settings = {"quant_method": "modelopt", "quant_algo": algorithm}
        decoded = _decoded(tmp_path / algorithm, stored, settings)
        assert torch.allclose(decoded, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; gemm can be read"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3; 4 can be read"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin'; gptq and gptq_v2 can be read",
        ),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5; 2, 3, 4 and 8 can be read"),
    ],
)
def test_other_layouts_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(QgateError, match=words):
        read_recipe("child", {"config.json": {"quantization_config": settings}})


def test_an_older_configuration_of_gptq_is_read() -> None:
    files = {"quantize_config.json": {"bits": 4, "group_size": 128, "desc_act": False}}
    assert read_recipe("child", files).method == "gptq"


@pytest.mark.parametrize(
    "index", [[0] * 20 + [1] * 12, [0] * 16 + [5] * 16, [-1] * 32, [0] * 31 + [2**31 - 1]]
)
def test_a_group_index_without_whole_groups_is_named(index: list[int], tmp_path: Path) -> None:
    parts = gptq_parts(_weight(4, 32)) | {"g_idx": torch.tensor(index).int()}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    with pytest.raises(QgateError, match="g_idx is no list of 2 groups of 16 columns"):
        _decoded(tmp_path, parts, settings)
