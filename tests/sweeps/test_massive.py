"""A sweep's recommended level with and without massive elements, against quantized tensors."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

import qgate
from qgate.stats import block_counts, counts, massive_beyond
from qgate.sweeps import texts
from qgate.sweeps.findings import entry_of, findings


def tensor(*, massive: bool = True) -> Tensor:
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    if massive:
        x[3, 5], x[7, 1] = 3000.0, -2500.0
    return x


def ratio(x: Tensor, q: Tensor, beyond: float) -> float:
    ordinary = x.abs() <= beyond
    noise = (q - x)[ordinary].square().sum()
    return 10 * math.log10(float(x[ordinary].square().sum() / noise))


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "hif8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_sweep_tells_its_level_without_them(fmt: str, dtype: torch.dtype) -> None:
    x = tensor().to(dtype)
    swept = qgate.sweep(x, fmt)
    level, wide = swept.recommended, x.double()
    beyond = massive_beyond(wide)
    q = qgate.quantize(wide, fmt, scale=float(level["factor"]))
    assert swept.record["advice"]["massive"]["elements"] == 2
    assert swept.record["advice"]["massive"]["beyond"] == pytest.approx(beyond, rel=1e-6)
    assert level["sqnr_db_without_massive"] == pytest.approx(ratio(wide, q, beyond), abs=1e-6)
    other_levels = [
        candidate for candidate in swept.levels if candidate["exponent"] != level["exponent"]
    ]
    assert all(other_level["sqnr_db_without_massive"] is None for other_level in other_levels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_sweep_tells_its_offset_without_them(dtype: torch.dtype) -> None:
    x = tensor().to(dtype)
    swept = qgate.sweep(x, "fp4_e2m1", granularity="block", max_exp=0, min_exp=0)
    wide = x.double()
    expected = ratio(wide, qgate.quantize(wide, "mxfp4_e2m1"), massive_beyond(wide))
    assert swept.recommended["sqnr_db_without_massive"] == pytest.approx(expected, abs=1e-6)
    if dtype == torch.bfloat16:
        from_counts = qgate.sweep(
            block_counts(x), "fp4_e2m1", granularity="block", max_exp=0, min_exp=0
        )
        assert from_counts.recommended == swept.recommended


def test_where_nothing_is_massive_it_is_the_sqnr() -> None:
    level = qgate.sweep(counts(tensor(massive=False).bfloat16()), "int8").recommended
    assert level["sqnr_db_without_massive"] == level["metrics"]["sqnr_db"]


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_unit_does_not_matter(scale: float) -> None:
    x = tensor().double()
    one, other = (qgate.sweep(scaled, "int8").recommended for scaled in (x, x * scale))
    # Another power of two is another scale, but int8 makes zeros of all but two either way.
    assert one["sqnr_db_without_massive"] == other["sqnr_db_without_massive"] == 0.0


def test_a_difference_is_a_reason_and_stands_in_every_text() -> None:
    swept = qgate.sweep(tensor(), "int8")
    assert any("2 massive elements" in reason for reason in swept.reasons)
    record = swept.to_dict()
    json.dumps(record, allow_nan=False)
    for text in ("\n".join(texts.lines(record)), texts.results_text(record)):
        assert "SQNR without massive elements: 0.00 dB" in text
    entry = entry_of(record, "folder", [])
    assert entry["rest_db"] == 0.0
    (finding,) = [text for level, text, _ in findings([entry], []) if "massive" in text]
    assert "0.00 dB without them" in finding
    plain = qgate.sweep(tensor(massive=False), "int8")
    assert not any("massive" in reason for reason in plain.reasons)
    plain_findings = findings([entry_of(plain.to_dict(), "folder", [])], [])
    assert not any("massive" in text for _, text, _ in plain_findings)
