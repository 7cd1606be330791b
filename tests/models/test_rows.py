"""Rows of samples, padding, and the tensors in nested results."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from qgate.models.rows import (
    cut_sample,
    fullest_row,
    map_tensors,
    real_tokens,
    row_count,
    split_rows,
    tensors_of,
    without_padding,
)

IDS = torch.arange(12).reshape(3, 4)
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
PADDED = {"input_ids": IDS, "attention_mask": MASK}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Output:
    hidden: Tensor
    more: tuple[Tensor, ...]


def test_tensors_are_listed_by_their_path() -> None:
    x = torch.zeros(1)
    labels = [label for label, _ in tensors_of(Output(x, (x, x)))]
    assert labels == [".hidden", ".more.0", ".more.1"]
    assert [label for label, _ in tensors_of({"a": Pair(x, x), "b": 3})] == [".a.0", ".a.1"]


def test_every_tensor_of_a_sample_is_changed_and_nothing_else() -> None:
    sample = UserDict({"x": Pair(IDS, IDS), "flag": True, "list": [IDS]})
    changed = map_tensors(sample, lambda tensor: tensor + 1)
    assert type(changed) is dict
    assert isinstance(changed["x"], Pair)
    assert torch.equal(changed["x"].second, IDS + 1)
    assert changed["flag"] is True
    assert type(changed["list"]) is list
    assert torch.equal(changed["list"][0], IDS + 1)


@pytest.mark.parametrize(
    ("sample", "rows"),
    [(IDS, 3), (PADDED, 3), ((IDS[:1], IDS), 1), ({"flag": True}, 1), (torch.tensor(2.0), 1)],
)
def test_the_first_tensor_counts_the_rows(sample: object, rows: int) -> None:
    assert row_count(sample) == rows


def test_padding_is_taken_out_of_each_row() -> None:
    hidden = torch.randn(3, 4, 5)
    rows = split_rows(hidden, PADDED)
    assert [tuple(row.shape) for row in rows] == [(1, 2, 5), (1, 3, 5), (1, 1, 5)]
    assert torch.equal(rows[1][0], hidden[1, :3])
    assert torch.equal(without_padding(hidden, real_tokens(PADDED)), torch.cat(rows, 1)[0])


def test_what_has_no_tokens_keeps_its_rows() -> None:
    pooled = torch.randn(3, 5)
    assert [tuple(row.shape) for row in split_rows(pooled, PADDED)] == [(1, 5)] * 3
    assert len(split_rows(torch.randn(6, 5), PADDED)) == 1
    assert split_rows(torch.tensor(1.0), PADDED)[0].shape == (1,)


def test_a_mask_without_padding_is_none() -> None:
    assert real_tokens({"input_ids": IDS, "attention_mask": torch.ones(3, 4)}) is None
    assert real_tokens(IDS) is None


def test_the_fullest_row_is_cut_to_its_real_tokens() -> None:
    more = {"pixels": torch.randn(3, 5, 8, 8), "table": torch.randn(7, 4)}
    row = fullest_row(PADDED | more)
    assert torch.equal(row["input_ids"], IDS[1:2, :3])
    assert bool(row["attention_mask"].all())
    assert row["pixels"].shape == (1, 5, 8, 8)
    assert row["table"].shape == (7, 4), "a table that is shared by all rows"
    assert torch.equal(cut_sample(IDS, slice(0, 2), 3), IDS[:2, :3])
    left_padded = {"input_ids": IDS, "attention_mask": MASK.flip(1)}
    assert torch.equal(fullest_row(left_padded)["input_ids"], IDS[1:2])
