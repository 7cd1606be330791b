"""Rows of embeddings that no sample reads: each is held against the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate.gate.measured import Conformance
from qgate.gate.modules.embedding_rows import embedding_agreements
from tests.gate.benches import LLAMA, MAMBA, mode_of
from tests.gate.benches import bench as short
from tests.shares import share, slow_file

pytestmark = slow_file

Change = Callable[[Any, Tensor], Tensor]


def _next_row(plain: Any, ids: Tensor) -> Tensor:
    return plain(ids + (ids == 200).long())  # type: ignore[no-any-return]


def _zero_beyond(plain: Any, ids: Tensor) -> Tensor:
    return plain(ids) * (ids < 240).unsqueeze(-1)  # type: ignore[no-any-return]


def _sign_of_one(plain: Any, ids: Tensor) -> Tensor:
    y = plain(ids)
    y[..., 3] = torch.where(ids == 7, -y[..., 3], y[..., 3])
    return y  # type: ignore[no-any-return]


def agreement(model: str, mode: str, change: Change | None = None) -> Conformance:
    of = short(model, layers=2)
    chosen = mode_of(of, mode)
    quantized = of.quantized(chosen)
    for module in quantized.model.module.modules():
        if isinstance(module, nn.Embedding) and change is not None:
            module.forward = lambda ids, plain=module.forward: change(plain, ids)
    base = of.model.in_basis(quantized.model.basis)
    listed = dict(embedding_agreements(quantized, base, quantized.plan.quantizers()))
    if change is not None:
        rows = [row for row in of.measure(chosen) if row.site in listed and row.conformance]
        assert [c.differing for c in rows[0].conformance if "number" in c.about] > [0]
    (only,) = listed.values()
    return only


MODES = [(LLAMA, "int8"), (LLAMA, "bf16"), (MAMBA, "2-1"), (MAMBA, "fp16")]


@share(2)
@pytest.mark.parametrize(("model", "mode"), MODES)
def test_every_row_of_right_code_is_right(model: str, mode: str) -> None:
    conformance = agreement(model, mode)
    assert conformance.differing == 0
    assert conformance.about == "the row of each of 256 numbers is right"


@share(3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_next_row, "for 1 of 256 numbers: 200; number 200 reads row 201"),
        (_zero_beyond, "for 16 of 256 numbers: 240, 241, 242, 243, 244 and 11 more"),
        (_sign_of_one, "for 1 of 256 numbers: 7"),
    ],
    ids=["next", "zero", "sign"],
)
@pytest.mark.parametrize(("model", "mode"), MODES[:2])
def test_a_row_that_no_sample_reads_is_red(
    change: Change, words: str, model: str, mode: str
) -> None:
    assert agreement(model, mode, change).about == f"gives another row than the reference {words}"
