"""Draws of Mamba states against kernels that round them, element by element.

The orders are those of vllm-project/vllm, `model_executor/layers/mamba/ops` (`mamba_ssm.py` at
007ad216, and the emulation of `cvt.rs` that came later), and of flashinfer-ai/flashinfer,
`include/flashinfer/mamba`, with the bits that its tests of `cvt_rs_f16x2_f32` state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import StatePhilox
from qgate.testing import CheckFailure, check_kernel
from tests.formats.test_tile_draws import philox_words
from tests.shares import proof

SHAPE = (3, 8, 16)
X = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-20, -4)


def towards_zero(x: float) -> tuple[np.float16, np.float16]:
    """The fp16 number at or below a magnitude, and the next one away from zero."""
    low = np.float16(x)
    if abs(float(low)) > abs(x):
        low = (low.view(np.int16) - np.int16(1)).view(np.float16)
    return low, (low.view(np.int16) + np.int16(1)).view(np.float16)


def emulated(x: float, word: int) -> float:
    """Up in size where a draw in the middle of 2^-23 is below the share of the way."""
    low, high = towards_zero(x)
    step = abs(float(high) - float(low))
    return float(high if ((word >> 9) + 0.5) * 2.0**-23 * step < abs(x - float(low)) else low)


def carried(x: float, bits: int) -> float:
    """Add 13 bits to those that fp16 cuts off, in units of its last place, and cut."""
    low, high = towards_zero(x)
    step = abs(float(high) - float(low))
    cut = abs(x - float(low)) / step * 2**13
    return float(high if int(cut) + bits >= 2**13 else low)


def by_threads(x: torch.Tensor, source: StatePhilox, strides: tuple[int, ...]) -> list[float]:
    result = []
    for index in np.ndindex(*x.shape):
        storage_index = source.offset + sum(
            i * stride for i, stride in zip(index, strides, strict=True)
        )
        column, number = index[-1], float(x[index])
        shared = {"vllm": 1, "vllm-pairs": 2, "flashinfer": 4}[source.order]
        counter = storage_index - column % shared * strides[-1]
        words = philox_words([counter % 2**32, counter >> 32, 0, 0], source.seed, source.rounds)
        if source.order == "vllm":
            result.append(emulated(number, words[0]))
            continue
        word = words[column % shared // 2]
        result.append(carried(number, word >> 16 * (column % 2) & 0x1FFF))
    return result


@pytest.mark.parametrize(
    ("source", "strides"),
    [
        (StatePhilox(5), (128, 16, 1)),
        (StatePhilox(2**40 + 1, 4, offset=2**32 - 100), (128, 16, 1)),
        (StatePhilox(7, strides=(500, 20, 1)), (500, 20, 1)),
        (StatePhilox(7, 5, order="vllm-pairs"), (128, 16, 1)),
        (StatePhilox(8, order="flashinfer", offset=4096), (128, 16, 1)),
        (StatePhilox(8, order="flashinfer", strides=(4096, 64, 2)), (4096, 64, 2)),
    ],
    ids=str,
)
def test_states_are_those_of_kernels(source: StatePhilox, strides: tuple[int, ...]) -> None:
    """The bits that fp16 cuts off are 13 but for its subnormal numbers, where carries are more."""
    x = X if source.order == "vllm" else X.clamp(-1, 1) + X.sign()
    y = qgate.quantize(x, "fp16", rounding="stochastic", generator=source)
    assert y.flatten().tolist() == by_threads(x, source, strides)


KERNEL = """
import json, sys, torch, triton, triton.language as tl

@triton.jit
def draw(words, seed, offset, n: tl.constexpr, rounds: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(words + i, tl.randint(seed, offset + i, rounds).to(tl.int64))

results = []
for seed, offset, rounds in json.loads(sys.argv[1]):
    words = torch.empty(64, dtype=torch.int64)
    draw[(1,)](words, seed, offset, 64, rounds)
    results.append([word % 2**32 for word in words.tolist()])
print(json.dumps(results))
"""


@proof
def test_words_are_those_of_triton(tmp_path: Path) -> None:
    cases = [(0, 0, 10), (5, 1000, 4), (2**40 + 123, 2**31 - 200, 5)]
    (tmp_path / "drawing.py").write_text(KERNEL)
    printed = subprocess.run(
        [sys.executable, str(tmp_path / "drawing.py"), json.dumps(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for (seed, offset, rounds), words in zip(cases, json.loads(printed.stdout), strict=True):
        draws = StatePhilox(seed, rounds, offset=offset).uniform((64,), torch.device("cpu"))
        assert draws.tolist() == [((word >> 9) + 0.5) * 2.0**-23 for word in words]


def test_a_kernel_with_the_same_draws_is_green_and_one_with_others_red() -> None:
    def update(state: torch.Tensor, generator: StatePhilox) -> torch.Tensor:
        return qgate.quantize(state, "fp16", rounding="stochastic", generator=generator)

    quantizer = qgate.Quantizer("fp16", rounding="stochastic", generator=StatePhilox(3, 5))
    options: Any = {"like": lambda state: state, "output": quantizer}
    report = check_kernel(lambda state: update(state, StatePhilox(3, 5)), X, **options)
    assert report.held == ["the example, draw by draw"]
    for other in (StatePhilox(3), StatePhilox(3, 5, order="vllm-pairs"), StatePhilox(4, 5)):
        with pytest.raises(CheckFailure):
            check_kernel(lambda state, other=other: update(state, other), X, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StatePhilox(-1), "seed=-1 is not allowed"),
        (lambda: StatePhilox(1, rounds=0), "rounds=0"),
        (lambda: StatePhilox(1, order="sglang"), "unknown order of states"),
        (lambda: StatePhilox(1, strides=(4, 1)).uniform((2, 2, 2), "cpu"), "one for each axis"),
        (lambda: StatePhilox(1, order="flashinfer").uniform((2, 6), "cpu"), "a multiple of 4"),
    ],
)
def test_what_is_not_allowed(make: Any, words: str) -> None:
    with pytest.raises(qgate.QgateError, match=words):
        make()
