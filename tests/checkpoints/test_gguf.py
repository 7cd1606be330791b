from __future__ import annotations

import itertools
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.compute import measure
from qgate.checkpoints.conventions import CONVENTIONS
from qgate.checkpoints.gguf.codebook_errors import SHARES, book_error
from qgate.checkpoints.gguf.weights import KINDS, decode_blocks
from qgate.checkpoints.texts import first_line
from tests.checkpoints.faults import ExportFault
from tests.checkpoints.gguf_exports import RIGHT, export
from tests.checkpoints.gguf_faults import FAULTS, planted
from tests.shares import share

BLOCKS = np.load(Path(__file__).parent / "files" / "ggml_blocks.npz")
"""Blocks that ggml's own quantizers wrote of one weight, some for weights of importance."""
NOT_DECODED = ("Q8_K", "Q1_0", "Q2_0")
"""Types that gguf does not dequantize, or does not have."""


# Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KINDS if name not in NOT_DECODED])
def test_blocks_are_decoded_to_the_bits_of_gguf(name: str) -> None:
    kind = KINDS[name]
    raw = np.random.default_rng(0).integers(0, 256, (16, 64 * kind.bytes), np.uint8)
    if name == "MXFP4":  # 255 is NaN, and gguf reads a number
        raw.reshape(-1, kind.bytes)[:, 0] %= 255
    if name == "NVFP4":  # 127 is NaN, and gguf reads 0
        raw.reshape(-1, kind.bytes)[:, :4] %= 127
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(gguf.dequantize(raw, Kind[name]))
    ours = decode_blocks(torch.from_numpy(raw), kind).values()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_types_without_a_dequantizer_are_decoded_as_ggml_does() -> None:
    weight = np.random.default_rng(0).integers(-128, 128, (3, 256), np.int8)
    scales = np.array([[0.5], [-2.0], [1e-3]], np.float32)
    sums = np.zeros((3, 32), np.uint8)
    raw = np.concatenate([scales.view(np.uint8), weight.view(np.uint8), sums], 1)
    values = decode_blocks(torch.from_numpy(raw), KINDS["Q8_K"]).values()
    assert np.array_equal(values.numpy(), weight * scales)
    bits = np.array([[0x00, 0x3C, *[0b101] * 16]], np.uint8)
    values = decode_blocks(torch.from_numpy(bits), KINDS["Q1_0"]).values()
    assert values[0, :8].tolist() == [1, -1, 1, -1, -1, -1, -1, -1]
    values = decode_blocks(torch.from_numpy(bits), KINDS["Q2_0"]).values()
    assert values[0, :4].tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize("name", [name for name in BLOCKS.files if name != "weight"])
def test_blocks_of_ggml_are_near_the_estimate_of_an_ideal_quantizer(name: str) -> None:
    parent = torch.from_numpy(BLOCKS["weight"]).float()
    weight = decode_blocks(torch.from_numpy(BLOCKS[name]), KINDS[name.split()[0]])
    figures = measure(weight, parent)
    assert figures.over_ideal_db is not None
    assert -1.0 < figures.over_ideal_db < 1.0
    spoiled = torch.from_numpy(BLOCKS[name]).clone()
    spoiled[::4] = spoiled[::4].roll(1, 0)
    wrong = measure(decode_blocks(spoiled, KINDS[name.split()[0]]), parent)
    assert wrong.over_ideal_db is not None
    assert wrong.over_ideal_db > 1.0


@pytest.mark.parametrize("name", ["IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"])
def test_the_error_of_a_book_is_that_of_its_best_rows_and_signs(name: str) -> None:
    """Every row of gguf's table with every sign that it may have is tried."""
    book = CONVENTIONS[name.lower()].book
    assert book is not None
    tiles = np.random.default_rng(0).standard_t(4, (6, 16))
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    rows = kind.grid.reshape(kind.grid_shape).astype(np.float64)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=8)))
    signs = {"even": signs[signs.prod(1) > 0], "free": signs, "": signs[:1]}[book.signs]
    best = np.full(len(tiles), np.inf)
    for factor, shift in itertools.product(SHARES, {book.shift, -book.shift}):
        for number, tile in enumerate(tiles):
            scale = np.abs(tile).max() / book.reach * factor
            elements = np.concatenate(
                [_nearest(part, rows, signs) for part in (tile / scale - shift).reshape(-1, 8)]
            )
            values = elements + shift
            fitted = values * (values @ tile) / (values @ values)
            best[number] = min(best[number], np.square(fitted - tile).sum())
    error = book_error(book, torch.from_numpy(tiles).float())
    # Where signs must be even, the estimate turns the smallest element alone.
    most = 1.02 if book.signs == "even" else 1 + 1e-5
    assert 1 - 1e-5 <= error / best.sum() <= most


def _nearest(eight: np.ndarray, rows: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return the signed rows of a table that are nearest to eight numbers together."""
    parts = (eight * signs).reshape(len(signs), -1, 1, rows.shape[1])
    distances = np.square(parts - rows).sum(3)
    sign = distances.min(2).sum(1).argmin()
    nearest: np.ndarray = rows[distances[sign].argmin(1)].ravel() * signs[sign]
    return nearest


# Files --------------------------------------------------------------------------------------------


@share(4)
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.name)
def test_a_right_export_is_as_declared(kind: Kind, wide_parent: str, tmp_path: Path) -> None:
    path = export(kind).write(tmp_path / "child.gguf")
    record = compare(str(path), wide_parent)
    assert record.findings == []
    assert [weight.outcome for weight in record.weights].count("quantized") == 16
    assert {w.outcome for w in record.weights} == {"quantized", "cast"}
    assert {w.matched for w in record.weights} == {"llama.cpp"}
    assert record.unmatched_parents == []
    assert record.notes == ["rows of q and k are compared in the order of llama.cpp's rope"]
    assert f"{path} is as declared: 16 quantized and 5 other tensors" in first_line(record)


@share(6)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_tensor_and_cause(
    fault: ExportFault, wide_parent: str, tmp_path: Path
) -> None:
    record = compare(str(planted(fault).write(tmp_path / "child.gguf")), wide_parent)
    causes = [finding.cause for finding in record.findings if finding.subject == fault.subject]
    assert any(re.search(fault.words, cause) for cause in causes), record.findings
    assert fault.subject in first_line(record) or fault.name == "q of qwen2 reordered"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_a_parent_may_be_gguf(kind: Kind, tmp_path: Path) -> None:
    parent = export(kind).write(tmp_path / "parent.gguf")
    child = export(Kind.Q4_K).write(tmp_path / "child.gguf")
    record = compare(str(child), str(parent))
    assert record.findings == []
    assert {w.matched for w in record.weights} == {"name"}
    assert record.notes == []
