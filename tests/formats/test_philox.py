"""Philox against Random123's vectors, Triton's interpreter and what torch prints on CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import qgate
from qgate.formats import Philox, RandomWords
from qgate.formats.philox import philox
from qgate.testing import CheckFailure, check_kernel
from tests.shares import proof

CPU = torch.device("cpu")
VECTORS = [
    ([0, 0, 0, 0], 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        0x299F31D0A4093822,
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
"""Lines "philox4x32 10" of kat_vectors in DEShawResearch/random123."""
TORCH = {
    0: [0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290],
    4: [0.9722, 0.7910, 0.4690, 0.3300, 0.3345, 0.3783, 0.7640, 0.6405, 0.1103],
}
"""What torch.rand(3, 3, device="cuda") prints after manual_seed(0), the first and second time."""
X = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_known_answers(counter: list[int], key: int, words: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox(torch.tensor(counter), key).tolist()) == words


@pytest.mark.parametrize("offset", TORCH)
def test_what_torch_prints_on_cuda(offset: int) -> None:
    draws = Philox(0, offset, "torch", blocks=1056).uniform((3, 3), CPU)
    assert [round(draw, 4) for draw in draws.flatten().tolist()] == TORCH[offset]


def test_a_large_tensor_uses_all_words_of_a_call() -> None:
    """Of 2048 numbers by 2 blocks of 256 threads, each thread draws one call of four words."""
    words = Philox(7, 8, "torch", blocks=2).words(4096)
    for index in (0, 511, 512, 1600, 2047, 2048, 4095):
        counter = torch.tensor([8 // 4 + index // 2048, 0, index % 512, 0])
        assert words[index] == philox(counter, 7)[index % 2048 // 512]


KERNEL = """
import json, sys, torch, triton, triton.language as tl

@triton.jit
def draw(rand, words, seed, offset, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(rand + i, tl.rand(seed, offset + i))
    w = tl.randint4x(seed, offset + i)
    for k in tl.static_range(4):
        tl.store(words + 4 * i + k, w[k].to(tl.int64))

results = []
for seed, offset in json.loads(sys.argv[1]):
    rand, words = torch.empty(64), torch.empty(256, dtype=torch.int64)
    draw[(1,)](rand, words, seed, offset, 64)
    results.append([rand.tolist(), words.tolist()])
print(json.dumps(results))
"""
SEEDS = [(0, 0), (5, 1000), (2**40 + 123, 2**31 - 200)]


@proof
def test_both_layouts_are_those_of_triton(tmp_path: Any) -> None:
    (tmp_path / "drawing.py").write_text(KERNEL)
    printed = subprocess.run(
        [sys.executable, str(tmp_path / "drawing.py"), json.dumps(SEEDS)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for (seed, offset), (rand, words) in zip(SEEDS, json.loads(printed.stdout), strict=True):
        assert Philox(seed, offset, "triton").uniform((64,), CPU).tolist() == rand
        unsigned = [word % 2**32 for word in words]
        assert Philox(seed, offset).words(256).tolist() == unsigned


@pytest.mark.parametrize("generator", [Philox(3), Philox(3, 4, "torch", blocks=1)], ids=str)
@pytest.mark.parametrize("name", qgate.formats.names())
def test_draws_follow_the_element_not_the_way_it_is_computed(name: str, generator: Philox) -> None:
    """Views, threads, and codes have the same bits; and so has a tensor that is cut in chunks."""
    q = qgate.Quantizer(name, rounding="stochastic", generator=generator)
    y = q(X)
    assert torch.equal(q(X.t().contiguous().t()), y)
    assert torch.equal(q.encode(X).decode(), y)
    assert not torch.equal(y, qgate.Quantizer(name, rounding="stochastic", generator=Philox(4))(X))
    if name == "mxfp4_e2m1":
        long = X.repeat(300, 1)
        whole = q(long)
        words = generator.uniform(tuple(long.shape), CPU)
        last = RandomWords((words[-24:] * 2.0**32).long())
        if generator.layout == "words":
            late_quantizer = qgate.Quantizer(name, rounding="stochastic", generator=last)
            assert torch.equal(whole[-24:], late_quantizer(long[-24:]))


def test_bf16_is_rounded_as_kernels_do_that_add_bits_and_cut() -> None:
    words = Philox(11).words(X.numel()).view(X.shape)
    bits = X.view(torch.int32).long() & 0xFFFFFFFF
    cut = (bits + (words & 0xFFFF)) >> 16 << 16
    expected = torch.where(cut >= 2**31, cut - 2**32, cut).int().view(torch.float32)
    generator = Philox(11, bits=16, carry=True)
    y = qgate.quantize(X, "bf16", rounding="stochastic", generator=generator)
    assert torch.equal(y, expected)


FORMATS = ["mxfp4", "nvfp4", "nf4", "lloyd3", "bf16", "hif4", "fp8_e4m3", "int4"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_kernel_with_the_same_draws_is_green(name: str) -> None:
    for generator in (Philox(5), Philox(5, 8, "torch", blocks=2), Philox(5, bits=16, carry=True)):
        q = qgate.Quantizer(name, rounding="stochastic", generator=generator)
        report = check_kernel(q, X, like=lambda x: x, output=q)
        assert report.held == ["the example, draw by draw"]


SOURCE = Philox(5, 16)
OTHER_DRAWS = {
    "its draws are those of seed 0, not 5": Philox(0, 16),
    "its draws are those of offset 0, not 16": Philox(5),
    "its draws are those of offset 15, not 16": Philox(5, 15),
    "it rounds up where the random bits carry over": Philox(5, 16, carry=True),
    "each element has the first word of a counter of its own": RandomWords(
        Philox(5, 16, "triton").words(X.numel()).view(X.shape)
    ),
    "its draws run down the columns, not along the rows": RandomWords(
        SOURCE.words(X.numel()).view(64, 24).t().contiguous()
    ),
    "every row has the draws of the first one": RandomWords(
        SOURCE.words(X.numel()).view(X.shape)[:1].repeat(24, 1)
    ),
    "values are the other neighbor than Philox": Philox(9, 16),
}


@pytest.mark.parametrize("words", OTHER_DRAWS)
def test_other_draws_are_named(words: str) -> None:
    declared = qgate.Quantizer("mxfp4", rounding="stochastic", generator=SOURCE)
    kernel = qgate.Quantizer("mxfp4", rounding="stochastic", generator=OTHER_DRAWS[words])
    with pytest.raises(CheckFailure, match=words):
        check_kernel(kernel, X, like=lambda x: x, output=declared)


def test_rounding_to_the_nearest_and_wrong_values_are_red() -> None:
    declared = qgate.Quantizer("mxfp4", rounding="stochastic", generator=SOURCE)
    with pytest.raises(CheckFailure, match="the other neighbor"):
        check_kernel(qgate.Quantizer("mxfp4"), X, like=lambda x: x, output=declared)
    with pytest.raises(CheckFailure, match="neither neighbor"):
        check_kernel(lambda x: declared(x) * 1.01, X, like=lambda x: x, output=declared)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Philox(-1), "seed=-1 is not allowed; it is from 0"),
        (lambda: Philox(1, bits=33), "bits=33"),
        (lambda: Philox(1, layout="cuda"), "unknown layout of Philox 'cuda'"),  # type: ignore[arg-type]
        (lambda: Philox(1, layout="torch"), "needs the device's blocks"),
        (lambda: Philox(1, 2, "torch", blocks=4), "multiple of 4"),
        (lambda: Philox(1, layout="triton", carry=True), "are for layout 'words'"),
        (lambda: qgate.quantize(X, "mxfp4", generator=Philox(1)), "needs rounding 'stochastic'"),
        (
            lambda: qgate.quantize(
                X, "mxfp4", rounding="stochastic", generator=RandomWords(torch.zeros(3))
            ),
            "do not fit a tensor of shape",
        ),
        (
            lambda: check_kernel(
                lambda x: x, X, like=lambda x: x,
                inputs={0: qgate.Quantizer("mxfp4", rounding="stochastic", generator=Philox(1))},
            ),
            "a named generator is for the result",
        ),
    ],
)  # fmt: skip
def test_what_is_not_allowed(make: Any, words: str) -> None:
    with pytest.raises(qgate.QgateError, match=words):
        make()
