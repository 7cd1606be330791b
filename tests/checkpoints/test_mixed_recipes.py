"""Recipes that treat modules otherwise: other bits, modules that are left out, what is no linear layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.checkpoints.comparison import compare
from qgate.errors import QgateError
from tests.checkpoints.exports import SCHEMES, compress, configuration, parent_tensors, write
from tests.checkpoints.references import gptq_parts, nearest, with_stored_scales

Tensors = dict[str, Tensor]
DYNAMIC = {"-:.*up_proj": {}, "+:.*down_proj": {"bits": 8}, ".*o_proj": {"group_size": 64}}
LISTED = [["self_attn.q_proj", "self_attn.o_proj"], ["mlp.gate_proj"]]
WITH_ALL = [[*LISTED[0], "self_attn.k_proj", "self_attn.v_proj"], [*LISTED[1], "mlp.down_proj"]]


def gptq(folder: Path, **settings: Any) -> Path:
    """Export by GPTQ: down in 8 bits, o in groups of 64, and up not at all."""
    stored: Tensors = {}
    for name, x in parent_tensors().items():
        if "_proj" not in name or "up_proj" in name:
            stored[name] = x
            continue
        bits, group = 8 if "down" in name else 4, 64 if "o_proj" in name else 32
        parts = gptq_parts(with_stored_scales(nearest(x.float(), bits, group)))
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{ending}": part for ending, part in parts.items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, **settings}
    return write(folder, stored, {"quantization_config": config})


def findings_of(child: Path, parent: Tensors, folder: Path) -> list[tuple[str, str]]:
    record = compare(str(child), str(write(folder / "parent", parent, {})))
    return [(finding.subject, finding.cause) for finding in record.findings]


def test_gptq_with_other_settings_by_module_is_right(tmp_path: Path) -> None:
    child = gptq(tmp_path / "child", dynamic=DYNAMIC)
    assert findings_of(child, parent_tensors(), tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "module", "words"),
    [
        ({"-:.*up_proj": ...}, "mlp.up_proj", "it is not quantized, and the recipe declares uint4"),
        ({"-:.*q_proj": {}}, "self_attn.q_proj", "with zero points, and the recipe ignores it"),
        (
            {".*o_proj": ...},
            "self_attn.o_proj",
            "per row with zero points, and the recipe declares",
        ),
    ],
)
def test_gptq_that_is_not_as_its_modules_declare_is_found(
    changes: dict[str, Any], module: str, words: str, tmp_path: Path
) -> None:
    settings = {key: x for key, x in (DYNAMIC | changes).items() if x is not ...}
    gptq_findings = findings_of(
        gptq(tmp_path / "child", dynamic=settings), parent_tensors(), tmp_path
    )
    assert {subject for subject, _ in gptq_findings} == {
        f"model.layers.{n}.{module}.weight" for n in (0, 1)
    }
    assert all(words in cause for _, cause in gptq_findings), gptq_findings


def test_modules_that_a_list_of_gptq_leaves_out_are_right(tmp_path: Path) -> None:
    positive_rules: dict[str, Any] = {key: x for key, x in DYNAMIC.items() if key[0] != "-"}
    child = gptq(tmp_path / "a", dynamic=positive_rules, modules_in_block_to_quantize=WITH_ALL)
    assert findings_of(child, parent_tensors(), tmp_path) == []


def test_embeddings_are_no_linear_layers_and_routers_are(tmp_path: Path) -> None:
    """T5 has embeddings of other names; engines load a router that is not ignored as quantized."""
    home = "model.layers.0.mlp"
    plain = (f"{home}.gate", "shared", "decoder.block.0.SelfAttention.relative_attention_bias")
    experts = [f"{home}.experts.{n}.{part}_proj" for n in (0, 1) for part in ("up", "down")]
    parent = {f"{name}.weight": torch.randn(32, 32) for name in (*plain, *experts)}
    scheme, stored = SCHEMES["int8"], dict(parent)
    for module in experts:
        parts, _ = compress(scheme, stored.pop(f"{module}.weight"))
        stored |= {f"{module}.{ending}": part for ending, part in parts.items()}
    child = write(tmp_path / "child", stored, configuration(scheme))
    named = [
        where for where, cause in findings_of(child, parent, tmp_path) if "pattern" not in cause
    ]
    assert named == [f"{home}.gate.weight"]
    stored[f"{experts[0]}.weight"] = parent[f"{experts[0]}.weight"]
    del stored[f"{experts[0]}.weight_scale"]
    child = write(tmp_path / "other", stored, configuration(scheme))
    cause_by_subject = dict(findings_of(child, parent, tmp_path))
    assert (
        "it is not quantized, and the recipe declares int8"
        in cause_by_subject[f"{experts[0]}.weight"]
    )


def test_odd_settings_of_modules_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match="declares what gptq does not have"):
        findings_of(
            gptq(tmp_path / "child", dynamic={"-:a": {}, "b": 3}), parent_tensors(), tmp_path
        )
    child = gptq(tmp_path / "other", dynamic=None, modules_in_block_to_quantize=None)
    odd_findings = findings_of(child, parent_tensors(), tmp_path)
    assert {subject.split(".")[-2] for subject, _ in odd_findings} == {
        "down_proj",
        "o_proj",
        "up_proj",
    }
