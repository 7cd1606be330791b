"""Weights of HQQ, packed by loops over their rows, in safetensors and in torch files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.checkpoints.comparison import compare
from qgate.errors import QgateError
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.work import decoded
from tests.shares import share

UP = "model.layers.1.mlp.up_proj"
GROUP = 32
PER_WORD = {8: (1, np.uint8), 4: (2, np.uint8), 3: (10, np.int32), 2: (4, np.uint8)}
Tensors = dict[str, Tensor]
Plant = Callable[[Tensors], object]


def quantized(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zero points of groups, the latter by HQQ's half-quadratic search."""
    groups, most = weight.float().reshape(-1, GROUP), 2**bits - 1
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    inverse = most / (high - low)
    zeros, best, beta = -low * inverse, float("inf"), 10.0
    for _ in range(20):
        codes = (groups * inverse + zeros).round().clamp(0, most)
        errors = groups - (codes - zeros) / inverse
        if float(errors.abs().mean()) >= best:
            break
        best = float(errors.abs().mean())
        shrunk_errors = (
            errors.abs() - errors.abs().clamp_min(1e-9).pow(-0.3) / beta
        ).relu() * errors.sign()
        zeros = (codes - (groups - shrunk_errors) * inverse).mean(1, keepdim=True)
        beta *= 1.01
    codes = (groups * inverse + zeros).round().clamp(0, most)
    return codes.to(torch.uint8), 1 / inverse, zeros


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack rows, one by one: word i has rows i, i + n/k, …, the first in its highest bits."""
    count, word = PER_WORD[bits]
    height = -(-len(codes) // count)
    words = np.zeros((height, codes.shape[1]), np.int64)
    for row, values in enumerate(codes.numpy().astype(np.int64)):
        words[row % height] |= values << bits * (count - 1 - row // height)
    return torch.from_numpy(words.astype(word))


def exported(weight: Tensor, bits: int) -> Tensors:
    codes, scales, zeros = quantized(weight, bits)
    return {
        "W_q": packed(codes, bits),
        "scale": scales.half(),
        "zero": zeros.half(),
        "shape": torch.tensor(weight.shape),
        "nbits": torch.tensor([bits]),
        "axis": torch.tensor([1]),
    }


def configuration(bits: int) -> dict[str, Any]:
    params = {"nbits": bits, "group_size": GROUP, "axis": 1}
    recipe = {"quant_method": "hqq", "quant_config": {"weight_quant_params": params}}
    return {"quantization_config": recipe | {"skip_modules": ["lm_head"]}}


def modules(bits: int, plant: Plant | None = None) -> dict[str, Tensors]:
    """Return the tensors of each module, with a fault in one."""
    by_module: dict[str, Tensors] = {}
    for name, weight in parent_tensors().items():
        module = name.removesuffix(".weight")
        by_module[module] = exported(weight, bits) if "_proj" in name else {"weight": weight}
    if plant is not None:
        plant(by_module[UP])
    return by_module


def export(folder: Path, bits: int, plant: Plant | None = None) -> str:
    tensors = {
        f"{m}.{part}": x for m, parts in modules(bits, plant).items() for part, x in parts.items()
    }
    return str(write(folder, tensors, configuration(bits)))  # fmt: skip


@pytest.mark.parametrize("bits", PER_WORD)
def test_values_are_those_of_the_codes_before_they_were_packed(bits: int, tmp_path: Path) -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    codes, scales, zeros = quantized(weight, bits)
    write(tmp_path, {f"up.{part}": x for part, x in exported(weight, bits).items()}, {})
    expected = (codes - zeros.half().float()) * scales.half().float()
    assert torch.allclose(decoded(tmp_path), expected.reshape(48, 96), atol=1e-6)


@pytest.mark.parametrize("bits", PER_WORD)
def test_a_right_export_is_as_declared(bits: int, parent: str, tmp_path: Path) -> None:
    record = compare(export(tmp_path / "child", bits), parent)
    assert record.findings == []
    formats = {w.format for w in record.weights if w.outcome == "quantized"}
    assert formats == {f"uint{bits} per {GROUP} with zero points"}


@share(4)
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda t: t["scale"].mul_(2), "all scales are 2 times too high"),
        (lambda t: t["zero"].add_(1), "zero points are 1 too high"),
        (
            lambda t: t.update(W_q=t["W_q"] >> 4 | t["W_q"] << 4),
            "codes of each half of the rows are in",
        ),
        (lambda t: t.pop("scale"), "its scale is missing"),
        (lambda t: t.update(axis=torch.tensor([0])), "are columns of HQQ's axis 0"),
        (lambda t: t.update(nbits=torch.tensor([5])), "its nbits is 5; 1, 2, 3, 4 and 8 are read"),
        (lambda t: t.update(W_q=t["W_q"][1:].clone()), "codes of 4 bits, and its shape"),
        (lambda t: t.update(scale=t["scale"][1:].clone()), "scales fit no groups of a weight"),
    ],
)
def test_a_planted_fault_is_named(plant: Plant, words: str, parent: str, tmp_path: Path) -> None:
    findings = compare(export(tmp_path / "child", 4, plant), parent).findings
    assert {f.subject for f in findings} == {f"{UP}.weight"}
    assert words in findings[0].cause


def test_the_file_that_the_library_saves_is_read(parent: str, tmp_path: Path) -> None:
    def plain(parts: Tensors) -> dict[str, Any]:
        numbers = {"nbits": 4, "axis": 1, "shape": torch.Size(parts["shape"].tolist())}
        return {**parts, **numbers, "packing": "4bit_u8", "compute_dtype": torch.float16}

    child = tmp_path / "child"
    child.mkdir()
    state = {m: plain(x) if "W_q" in x else x for m, x in modules(4).items()}
    torch.save(state, child / "qmodel.pt")
    (child / "config.json").write_text(json.dumps(configuration(4)), encoding="utf-8")
    record = compare(str(child), parent)
    assert record.findings == []
    assert [weight.outcome for weight in record.weights].count("quantized") == 14


def test_a_configuration_of_layers_by_name(parent: str, tmp_path: Path) -> None:
    child = Path(export(tmp_path / "child", 4))
    settings = configuration(4)
    recipe = settings["quantization_config"]
    whole = recipe["quant_config"]
    recipe["quant_config"] = {"self_attn.q_proj": whole, "mlp.up_proj": {"weight_quant_params": {
        "nbits": 8, "group_size": GROUP}}}  # fmt: skip
    (child / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    findings = compare(str(child), parent).findings
    assert {f.subject.split(".")[-2] for f in findings} == {"up_proj"}
    recipe["quant_config"] = {"mlp.up_proj": 4}
    (child / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(QgateError, match="declares what hqq does not have: quant_config has"):
        compare(str(child), parent)
