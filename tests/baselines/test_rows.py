"""Rows drawn from a seed: the same ones everywhere, and a live tensor cut to them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgate import QgateError
from qgate.baselines import BaselineRows, ReferenceTensor, row_sample, same_rows

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.integers(0, 200), st.integers(0, 2**40))
def test_a_sample_is_rows_of_the_tensor(shape: tuple[int, ...], cap: int, seed: int) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    cut, rows = row_sample(array, cap, seed)
    tensor = ReferenceTensor.of(array, cap, seed)
    assert tensor.values.shape == cut.shape == tensor.stored_shape
    assert np.array_equal(tensor.live(array), cut)
    if array.nbytes <= cap:
        assert rows is None
        assert cut is array
        return
    assert rows is not None
    width = shape[-1] if len(shape) > 1 else 1
    assert rows.of * width == array.size
    assert rows.count == max(1, cap // (4 * width))
    flat = array.reshape(-1, width)
    assert np.array_equal(cut.reshape(-1, width), flat[rows.indices()])
    assert len(set(rows.indices().tolist())) == rows.count
    assert sorted(rows.indices()) == rows.indices().tolist()


def test_the_draw_is_pinned() -> None:
    """Other indices would compare a live tensor with other rows of the stored one."""
    assert BaselineRows(0, 4, 12).indices().tolist() == PINNED[0]
    assert BaselineRows(7, 4, 12).indices().tolist() == PINNED[7]
    large = BaselineRows(1, 500, 5120).indices()
    assert hashlib.sha256(large.astype("<i8").tobytes()).hexdigest()[:16] == PINNED_LARGE


PINNED = {0: [0, 3, 7, 10], 7: [2, 4, 5, 9]}
PINNED_LARGE = "c0023b9f8d7327dd"


def test_the_draw_is_spread() -> None:
    indices = BaselineRows(1, 500, 5120).indices()
    quarters = np.histogram(indices, bins=4, range=(0, 5120))[0]
    assert (quarters > 90).all()
    assert len(set(indices) & set(BaselineRows(2, 500, 5120).indices())) < 120


def test_another_tensor_is_refused() -> None:
    array = np.zeros((3, 4, 8), np.float32)
    tensor = ReferenceTensor.of(array, 64)
    with pytest.raises(QgateError, match="10 rows, but the stored ones were drawn from 12"):
        same_rows(np.zeros((10, 8), np.float32), tensor.rows)
    with pytest.raises(QgateError, match=r"shape \(12, 8\) is compared with .* shape \(3, 4, 8\)"):
        tensor.live(array.reshape(12, 8))
    assert same_rows(array, None) is array


@pytest.mark.parametrize(("cap", "seed"), [(-1, 0), (8, -1)])
def test_a_negative_cap_or_seed_is_refused(cap: int, seed: int) -> None:
    with pytest.raises(QgateError, match="both are from 0"):
        row_sample(np.zeros(100, np.float32), cap, seed)


def test_a_hash_is_of_the_values_in_order() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = hashlib.sha256(array.tobytes()).hexdigest()
    assert ReferenceTensor.of(array).sha256() == expected
    assert ReferenceTensor.of(np.asfortranarray(array)).sha256() == expected
    assert ReferenceTensor.of(array.T).sha256() != expected
