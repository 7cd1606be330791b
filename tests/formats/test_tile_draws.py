"""Draws by tiles against threads that take their words one by one, in the kernel's order.

The order is that of NVIDIA/TransformerEngine, `common/cast/nvfp4/quantize_transpose_nvfp4.cuh` and
`common/util/curanddx.hpp` at 00b8d306.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qgate
from qgate.formats import RandomWords, TransformerEnginePhilox
from qgate.formats.philox import philox

CPU = torch.device("cpu")
ROWS, COLUMNS = 150, 272


def philox_words(counter: list[int], seed: int, rounds: int) -> list[int]:
    """Four words, in whole numbers."""
    key = [seed & 0xFFFFFFFF, seed >> 32]
    x, y, z, w = counter
    for _ in range(rounds):
        first, second = x * 0xD2511F53, z * 0xCD9E8D57
        x, y, z, w = (
            (second >> 32) ^ y ^ key[0], second & 0xFFFFFFFF,
            (first >> 32) ^ w ^ key[1], first & 0xFFFFFFFF,
        )  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [x, y, z, w]


class Thread:
    """A thread's generator: `take` returns its next word."""

    def __init__(self, source: TransformerEnginePhilox, sequence: int) -> None:
        self.source, self.sequence, self.call = source, sequence, source.offset
        self.words: list[int] = []

    def take(self) -> int:
        if not self.words:
            counter = [self.call % 2**32, self.call >> 32, self.sequence, 0]
            self.words = philox_words(counter, self.source.seed, self.source.rounds)
            self.call += 1
        return self.words.pop(0)


def words_of_threads(source: TransformerEnginePhilox) -> dict[tuple[int, int], int]:
    """The word of each four elements of some threads, by the row and column of the first."""
    words = {}
    wide = -(-COLUMNS // 128)
    for tile_y in range(2):
        for tile_x in range(wide):
            for number in range(0, 128, 7):
                thread = Thread(source, number + tile_x * 128 + tile_y * wide * 128)
                lane_group = number % 32 // 8
                for stage in range(4):
                    if source.transposed:
                        for _ in range(2 * 4):
                            thread.take()
                    for half_stage in range(2):
                        row = tile_y * 128 + stage * 32 + half_stage * 16 + number // 8
                        for wave in range(2):
                            start = (wave + lane_group) * 8 % 16
                            for four in range(2):
                                column = tile_x * 128 + number % 8 * 16 + start + four * 4
                                words[row, column] = thread.take()
    return words


@pytest.mark.parametrize(
    "source",
    [
        TransformerEnginePhilox(5),
        TransformerEnginePhilox(2**40 + 1, 2**32 - 2, transposed=True),
        TransformerEnginePhilox(7, 3, rounds=7),
    ],
    ids=str,
)
def test_words_are_those_that_threads_take(source: TransformerEnginePhilox) -> None:
    words = source.words(ROWS, COLUMNS)
    assert words.shape == (ROWS, COLUMNS)
    compared = 0
    for (row, column), word in words_of_threads(source).items():
        if row < ROWS and column < COLUMNS:
            assert words[row, column : column + 4].tolist() == [word] * 4
            compared += 1
    assert compared > 500
    assert words.unique().numel() == ROWS * COLUMNS // 4


def test_the_other_philox_is_the_same_function() -> None:
    counter = [2**32 - 1, 5, 77, 2]
    for rounds in (7, 10):
        expected = philox(torch.tensor(counter), 2**63 + 9, rounds).tolist()
        assert philox_words(counter, 2**63 + 9, rounds) == expected


def test_a_quantizer_rounds_by_a_byte_of_the_word() -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    for order in ((0, 2, 1, 3), (3, 2, 1, 0)):
        source = TransformerEnginePhilox(11, 4, bytes=order)
        shift = 8 * torch.tensor(order).repeat(16)
        own = RandomWords(source.words(40, 64) >> shift, bits=8, carry=True)
        rounded = [
            qgate.quantize(x, "nvfp4", rounding="stochastic", generator=generator)
            for generator in (source, own)
        ]
        assert torch.equal(*rounded)
        exact = qgate.Quantizer("nvfp4")(x)
        assert not torch.equal(rounded[0], exact)
    assert source.uniform((2, 20, 64), CPU).shape == (2, 20, 64)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TransformerEnginePhilox(-1), "seed=-1 is not allowed; it is from 0"),
        (lambda: TransformerEnginePhilox(1, rounds=0), "rounds=0 is not allowed; it is from 1"),
        (lambda: TransformerEnginePhilox(1, bytes=(0, 0, 1, 2)), "an order of 0, 1, 2, 3"),
        (
            lambda: qgate.quantize(
                torch.ones(3, 20), "nvfp4", rounding="stochastic",
                generator=TransformerEnginePhilox(1),
            ),
            "its last axis is a multiple of 16",
        ),
    ],
)  # fmt: skip
def test_what_is_not_allowed(make: Any, words: str) -> None:
    with pytest.raises(qgate.QgateError, match=words):
        make()
