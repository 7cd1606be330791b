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
from qgate.checkpoints.texts import first_line
from tests.checkpoints.bnb_exports import RIGHT, configuration, export, stored, tensors_of
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.work import decoded
from tests.shares import share

UP = "model.layers.1.mlp.up_proj"
Tensors = dict[str, Tensor]


@pytest.mark.parametrize("scheme", RIGHT)
def test_a_right_export_is_as_declared(scheme: str, parent: str, tmp_path: Path) -> None:
    folder = export(tmp_path / "child", scheme)
    record = compare(str(folder), parent)
    assert record.findings == []
    outcomes = [weight.outcome for weight in record.weights]
    assert (outcomes.count("quantized"), outcomes.count("equal")) == (14, 7)
    overs = [w.figures.over_ideal_db for w in record.weights if w.figures is not None]
    assert all(over is not None and -0.1 < over < 0.2 for over in overs)


@pytest.mark.parametrize("shape", [(48, 128), (6, 96), (5, 7), (3, 64)])
@pytest.mark.parametrize("scheme", RIGHT)
def test_a_weight_is_decoded_to_the_bits_of_the_library(
    scheme: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts, values = stored(weight, scheme)
    write(tmp_path, {f"up.{ending}": x for ending, x in parts.items()}, {})
    ours = decoded(tmp_path).reshape(shape)
    if scheme == "int8":  # it multiplies by 1 / 127
        assert torch.allclose(ours, values, rtol=1e-6, atol=0)
    else:
        assert torch.equal(ours, values)


@dataclass(frozen=True)
class BnbFault:
    """A fault: the scheme it is planted in, and words of its finding."""

    name: str
    scheme: str
    words: str
    plant: Callable[[Tensors], None]
    subject: str = f"{UP}.weight"


def _change(ending: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def plant(tensors: Tensors) -> None:
        name = f"{UP}.{ending}"
        tensors[name] = change(tensors[name].clone()).to(tensors[name].dtype)

    return plant


def _state(**changed: Any) -> Callable[[Tensors], None]:
    """Change entries of the quant_state."""

    def plant(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.startswith(f"{UP}.weight.quant_state"))
        state = json.loads(bytes(tensors[name].tolist())) | changed
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return plant


def _table_of(scheme: str) -> Callable[[Tensors], None]:
    table = stored(torch.randn(4, 64), scheme)[0]["weight.quant_map"]
    return _change("weight.quant_map", lambda _: table)


def _other_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(f"{UP}.")]:
        tensors[name] = tensors[name.replace("layers.1", "layers.0")].clone()


def _lose(ending: str) -> Callable[[Tensors], None]:
    return lambda tensors: (
        tensors.__delitem__(f"{UP}.{ending}") if f"{UP}.{ending}" in tensors else None
    )


FAULTS = (
    BnbFault("nibble order", "nf4", "the order of nibbles", _change("weight", lambda x: x >> 4 | x << 4)),
    BnbFault("nibble order of FP4", "fp4", "the order of nibbles", _change("weight", lambda x: x >> 4 | x << 4)),
    BnbFault("absmax of the neighbor", "nf4", "every scale belongs to the group before it", _change("weight.absmax", lambda x: x.roll(1))),
    BnbFault("absmax of the next", "fp4", "every scale belongs to the group after it", _change("weight.absmax", lambda x: x.roll(-1))),
    BnbFault("absmax twice too high", "nf4", "all scales are 2 times too high", _change("weight.absmax", lambda x: x * 2)),
    BnbFault("absmax infinite", "nf4", "3 of 128 scales are NaN or infinite", _change("weight.absmax", lambda x: x.index_fill(0, torch.arange(3), torch.inf))),
    BnbFault("table of FP4", "nf4", "its quant_map is that of fp4, and its quant_state declares nf4", _table_of("fp4")),
    BnbFault("table of NF4", "fp4", "its quant_map is that of nf4, and its quant_state declares fp4", _table_of("nf4")),
    BnbFault("offset forgotten", "nf4-double", "all absmax are .* too low .the offset of double quantization", _state(nested_offset=0.0)),
    BnbFault("blocks of another size", "nf4", "128 absmax for 8,192 elements in blocks of 32", _state(blocksize=32)),
    BnbFault("another shape", "nf4", "4,096 bytes hold 8,192 codes", _state(shape=[128, 128])),
    BnbFault("truncated", "nf4", "4,095 bytes hold 8,190 codes", _change("weight", lambda x: x[:-1])),
    BnbFault("no nested table", "nf4-double", "nested_quant_map are not there", _lose("weight.nested_quant_map")),
    BnbFault("damaged state", "nf4", "its quant_state is damaged", _change("weight.quant_state.bitsandbytes__nf4", lambda x: x[:-5])),
    BnbFault("another layer", "nf4", "it was made from model.layers.0.mlp.up_proj.weight", _other_layer),
    BnbFault("blocks never written", "nf4", "blocks? w(as|ere) never written", lambda tensors: (
        _change("weight.absmax", lambda x: x.index_fill(0, torch.arange(2), 0.0))(tensors))),
    BnbFault("rows moved", "int8", "rows stand in another order: moved by one", lambda tensors: (
        _change("weight", lambda x: x.roll(1, 0))(tensors), _change("SCB", lambda x: x.roll(1, 0))(tensors))[0]),
    BnbFault("scales of the row before", "int8", "every scale belongs to the group before it", _change("SCB", lambda x: x.roll(1))),
)  # fmt: skip


@share(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_tensor_and_cause(
    fault: BnbFault, parent: str, tmp_path: Path
) -> None:
    tensors = tensors_of(fault.scheme)
    fault.plant(tensors)
    write(tmp_path / "child", tensors, configuration(fault.scheme))
    record = compare(str(tmp_path / "child"), parent)
    causes = [finding.cause for finding in record.findings if finding.subject == fault.subject]
    assert any(re.search(fault.words, cause) for cause in causes), record.findings
    assert first_line(record).startswith(fault.subject)


def test_another_type_than_declared_is_found(parent: str, tmp_path: Path) -> None:
    write(tmp_path / "child", tensors_of("fp4"), configuration("nf4"))
    record = compare(str(tmp_path / "child"), parent)
    assert len(record.findings) == 14
    assert "it is bnb_fp4 per 64, and the recipe declares nf4 per 64" in record.findings[0].cause


def test_an_unquantized_layer_is_found(parent: str, tmp_path: Path) -> None:
    tensors = tensors_of("nf4")
    for name in [name for name in tensors if name.startswith(f"{UP}.weight.")]:
        del tensors[name]
    tensors[f"{UP}.weight"] = parent_tensors()[f"{UP}.weight"]
    write(tmp_path / "child", tensors, configuration("nf4"))
    (finding,) = compare(str(tmp_path / "child"), parent).findings
    assert finding.cause.startswith("it is not quantized, and the recipe declares nf4 per 64")
