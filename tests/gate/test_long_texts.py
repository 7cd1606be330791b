"""Code that is right for all samples and wrong for longer texts: held against FP32 code there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate.gate.measured import Measured
from tests.gate.benches import LLAMA, MAMBA, mode_of
from tests.gate.benches import bench as short
from tests.gate.own_kernels import FORMATS, own_model
from tests.gate.test_own_kernel_faults import causes, gates_of
from tests.shares import share, slow_file

pytestmark = slow_file

Change = Callable[[Any], None]


def _wrap(network: Any) -> None:
    """Let the positions of one layer begin anew after 512 tokens."""
    attention = network.model.layers[1].self_attn
    rope = attention.rope
    attention.rope = lambda x, _start: torch.cat([rope(part, 0) for part in x.split(512, 2)], 2)


def _skip(network: Any) -> None:
    """Let the positions of one layer leave one out after 900 tokens."""
    attention = network.model.layers[1].self_attn
    rope = attention.rope
    attention.rope = lambda x, start: torch.cat(
        [rope(x, start)[:, :, :900], rope(x, start + 1)[:, :, 900:]], 2
    )


def red(mode: str, change: Change | None = None, model: str = LLAMA) -> list[Measured]:
    of = short(model, layers=2)
    chosen = mode_of(of, mode)
    if change is not None:
        change(of.quantized(chosen).model.module)
    rows = [row for row in of.measure(chosen) if row.scope == "isolated"]
    assert rows
    return [row for row in rows if row.why]


@share(3)
@pytest.mark.parametrize("mode", ["int8", "bf16", "w4"])
@pytest.mark.parametrize(
    ("change", "words"),
    [(_wrap, r"tokens .*\b512"), (_skip, r"tokens .*\b900")],
    ids=["wrap", "skip"],
)
def test_a_fault_beyond_the_samples_is_red_at_its_place(
    change: Change, words: str, mode: str
) -> None:
    (row,) = red(mode, change)
    assert row.site == "model.layers.1.self_attn.o_proj:input"
    assert "a text longer than the samples" in row.why["isolated"]
    assert re.search(words, row.why["isolated"]), row.why["isolated"]


@share(3)
@pytest.mark.parametrize(
    ("model", "mode"), [(LLAMA, "int8"), (LLAMA, "bf16"), (LLAMA, "nvfp4"), (MAMBA, "2-1"), (MAMBA, "fp16")]
)  # fmt: skip
def test_right_code_is_right_beyond_the_samples(model: str, mode: str) -> None:
    assert red(mode, model=model) == []


@share(3)
@pytest.mark.parametrize("fmt", FORMATS)
def test_own_code_between_kernels_is_held_beyond_the_samples(fmt: str, tmp_path: Path) -> None:
    cause_lines = causes(gates_of(own_model(fmt, None, "positions wrap"), tmp_path), layers=2)
    assert "layers.0.attention.o_proj:input" in cause_lines[0]
    assert "tokens 512" in cause_lines[0], cause_lines[0]
