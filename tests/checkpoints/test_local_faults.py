"""Single rows and groups that are broken: red and named, and green in twins of all formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord
from tests.checkpoints.exports import SCHEMES, compress, configuration, write
from tests.checkpoints.references import (
    activations,
    awq_parts,
    gptq,
    gptq_parts,
    nearest,
    with_stored_scales,
)
from tests.shares import share

Tensors = dict[str, Tensor]
SHAPE = 256, 128
NAMES = [f"model.layers.{layer}.mlp.{part}" for layer in range(2) for part in ("up", "down")]
SPOT = NAMES[2]
FORMATS = (*SCHEMES, "gptq", "gptq-act", "awq")


def drawn(kind: int, generator: torch.Generator, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Draw a weight: normal, with heavy tails, or with columns or rows of other sizes."""
    x = torch.randn(shape, generator=generator)
    if kind == 1:
        freedom = torch.randn(4, *shape, generator=generator).square().mean(0)
        x = x / freedom.sqrt()
    elif kind == 2:
        x = x * torch.exp(torch.randn(1, shape[1], generator=generator))
    elif kind == 3:
        x = x * torch.exp(0.7 * torch.randn(shape[0], 1, generator=generator))
    return (0.02 * x).bfloat16()


def export(folder: Path, name: str, seed: int) -> Path:
    """Write `parent`, and `child` in a format, and return the child."""
    generator = torch.Generator().manual_seed(seed)
    parent = {f"{n}.weight": drawn(kind, generator) for kind, n in enumerate(NAMES)}
    write(folder / "parent", parent, {})
    child: Tensors = {}
    settings: dict[str, Any] = {}
    for number, module in enumerate(NAMES):
        weight = parent[f"{module}.weight"].float()
        if name in SCHEMES:
            parts, _ = compress(SCHEMES[name], weight)
            settings = configuration(SCHEMES[name])
        elif name.startswith("gptq"):
            inputs = activations(weight.shape[1], seed=seed + number)
            order = name == "gptq-act"
            parts = gptq_parts(
                with_stored_scales(gptq(weight, inputs, 4, 32, by_activation=order)), 1
            )
            settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": order}
            settings = {"quantization_config": settings}
        else:
            parts = awq_parts(with_stored_scales(nearest(weight, 4, 32)))
            settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
            settings = {"quantization_config": settings}
        child |= {f"{module}.{ending}": x for ending, x in parts.items()}
    return write(folder / "child", child, settings)


def compared(folder: Path) -> CheckpointRecord:
    return compare(str(folder / "child"), str(folder / "parent"))


@share(40, by=("name",))
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", FORMATS)
def test_clean_checkpoints_are_green(name: str, seed: int, tmp_path: Path) -> None:
    export(tmp_path, name, seed)
    record = compared(tmp_path)
    assert record.findings == []
    assert len([w for w in record.weights if w.outcome == "quantized"]) == len(NAMES)


def planted(
    folder: Path, name: str, plant: Callable[[Tensors], object], seed: int = 0
) -> CheckpointFinding:
    """Export, plant a fault, and return the only finding."""
    child = export(folder, name, seed)
    tensors = load_file(child / "model.safetensors")
    settings = json.loads((child / "config.json").read_text(encoding="utf-8"))
    plant(tensors)
    write(child, tensors, settings)
    findings = compared(folder).findings
    assert len(findings) == 1, findings
    return findings[0]


def _codes(name: str) -> str:
    ending = {"gptq": "qweight", "gptq-act": "qweight", "awq": "qweight"}.get(name, "weight_packed")
    return (
        ending
        if name not in ("int8", "int8-tensor", "fp8", "fp8-tensor", "fp8-block")
        else "weight"
    )


def _of(tensors: Tensors, ending: str) -> Tensor:
    """Return a tensor of the spot, FP8 as bytes."""
    x = tensors[f"{SPOT}.{ending}"]
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


ROWS = ("int8", "w4a16", "w4a16-zero-points", "fp8-block", "fp8-tensor", "mxfp4",
        "nvfp4")  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_with_its_neighbors_codes_is_named(name: str, tmp_path: Path) -> None:
    def plant(tensors: Tensors) -> None:
        codes = _of(tensors, _codes(name))
        codes[41] = codes[42]

    finding = planted(tmp_path, name, plant)
    assert finding.subject == f"{SPOT}.weight"
    assert re.match(
        r"1 row of 256 has far more error than the others, most row 41, ", finding.cause
    )
    # Other zero points shift foreign codes.
    words = "codes are not those" if "zero" in name else "it has the codes of row 42"
    assert words in finding.cause


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_an_output_with_foreign_codes_is_found_in_words_of_columns(
    name: str, tmp_path: Path
) -> None:
    def plant(tensors: Tensors) -> None:
        codes = _of(tensors, _codes(name))
        if name == "gptq":
            codes[:, 41] = codes[:, 42]
        else:
            codes[:, 5] = codes[:, 6]

    finding = planted(tmp_path, name, plant)
    assert finding.subject == f"{SPOT}.weight"
    rows = (
        r"1 row of 256 has .* most row 41, " if name == "gptq" else r"8 rows of 256 have .* row 4\d"
    )
    assert re.match(rows, finding.cause), finding.cause


@share(4)
@pytest.mark.parametrize(
    ("name", "count", "change"),
    [
        ("w4a16", 8, lambda x: x * 2),
        ("w4a16-zero-points", 8, lambda x: x * 2),
        ("mxfp4", 16, lambda x: x + 1),
        ("nvfp4", 8, lambda x: x * 2),
        ("awq", 8, lambda x: x * 2),
        ("fp8-block", 1, lambda x: x * 2),
    ],
)
def test_some_scales_that_are_doubled_are_counted(
    name: str, count: int, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """8 of 1,024 scales of W4A16 are doubled, for one."""
    ending = "scales" if name == "awq" else "weight_scale"

    def plant(tensors: Tensors) -> None:
        scales = tensors[f"{SPOT}.{ending}"]
        flat = scales.reshape(-1).clone()
        places = torch.arange(count) * (len(flat) // count - 3) + 5
        wide = flat.float() if flat.dtype == torch.float8_e4m3fn else flat
        wide[places] = change(wide[places])
        tensors[f"{SPOT}.{ending}"] = wide.to(flat.dtype).reshape(scales.shape)

    finding = planted(tmp_path, name, plant)
    match = re.match(
        r"(\d+) groups? of [\d,]+ ha\w+ far more error than the others, most row", finding.cause
    )
    assert match, finding.cause
    assert count * 0.6 <= int(match[1]) <= count
    assert "its scale is 2 times too high" in finding.cause


@pytest.mark.parametrize("name", ["w4a16", "mxfp4", "nvfp4"])
def test_two_groups_of_foreign_codes_are_named(name: str, tmp_path: Path) -> None:
    def plant(tensors: Tensors) -> None:
        codes = _of(tensors, _codes(name))
        width = {torch.int32: 4, torch.uint8: 16}[codes.dtype] // (2 if name == "nvfp4" else 1)
        for row in (7, 19):
            codes[row, :width] = codes[row + 1, :width]

    finding = planted(tmp_path, name, plant)
    last = 15 if name == "nvfp4" else 31
    assert re.match(r"2 groups of [\d,]+ have far more error", finding.cause), finding.cause
    assert re.search(rf"most row (7|19), columns 0 to {last}, ", finding.cause)
    assert re.search(rf"it has the codes of row (8|20), columns 0 to {last}$", finding.cause)


@pytest.mark.parametrize(
    ("name", "plant", "words"),
    [
        ("int8", lambda t: _of(t, "weight")[9].zero_(), "row 9, .*: its values are zero"),
        ("int8", lambda t: t[f"{SPOT}.weight_scale"][9].mul_(3), "row 9, .*: its scales are 3 times"),
        ("fp8", lambda t: _of(t, "weight")[9].bitwise_xor_(128), "row 9, .*: its signs are flipped"),
    ],
)  # fmt: skip
def test_what_a_row_has_is_said(
    name: str, plant: Callable[[Tensors], object], words: str, tmp_path: Path
) -> None:
    finding = planted(tmp_path, name, plant)
    assert re.search(words, finding.cause), finding.cause
