"""Codebooks against bitsandbytes, gguf, the tables of papers, and distances as fractions."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes import functional
from gguf import quants

import qgate
from qgate.formats import _codebook as levels
from qgate.formats import definition
from qgate.formats._codebook import LLOYD
from qgate.formats._work import DOUBLE
from qgate.formats.codebook import Codebook, CodebookFormat
from qgate.formats.vector_books import code_book
from tests.formats.hard_blocks import assert_defined, hard_rows
from tests.formats.oracles import assert_same_bits
from tests.shares import share

BOOKS = [fmt.name for fmt in qgate.formats.FORMATS if isinstance(fmt, CodebookFormat)]
BNB = {"nf4": "nf4", "bnb_fp4": "fp4"}
MAX = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""Output levels for normal numbers that J. Max lists (Quantizing for Minimum Distortion, 1960)."""
DISTORTIONS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Squared errors that he lists; TurboQuant (arXiv 2504.19874) states 0.36, 0.117, 0.03, 0.009."""


def book_of(name: str) -> Codebook:
    fmt = qgate.formats.get(name)
    assert isinstance(fmt, CodebookFormat)
    return fmt.element


def bnb_codes(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and absmax of blocks of 64."""
    packed, state = functional.quantize_4bit(x, blocksize=64, quant_type=kind)
    pairs = torch.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 15], 1)
    return pairs.reshape(x.shape), state.absmax


@pytest.mark.parametrize("name", BNB)
def test_every_number_of_bf16_from_minus_one_to_one_has_the_code_of_bitsandbytes(name: str) -> None:
    """With 1 in each block nothing is divided, so codes have no excuse."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.abs() <= 1]
    padded = torch.cat([every, every.new_zeros(-len(every) % 63)]).reshape(-1, 63)
    x = torch.cat([padded, torch.ones(len(padded), 1)], 1)
    theirs, absmax = bnb_codes(x, BNB[name])
    ours = qgate.encode(x, name)
    table = functional.get_4bit_type(BNB[name], device="cpu")
    assert np.array_equal(book_of(name).code_values(), table.double().numpy())
    assert torch.equal(ours.scales.reshape(-1), absmax)
    nonzero = (table[ours.codes.long()] != 0) | (table[theirs.long()] != 0)
    assert torch.equal(ours.codes[nonzero], theirs[nonzero])
    assert len(every) > 32_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BNB)
def test_random_blocks_are_those_of_bitsandbytes(name: str, dtype: torch.dtype) -> None:
    """It multiplies by a reciprocal in float32, which decides ratios that are all but a tie."""
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[7] = 0
    theirs, absmax = bnb_codes(x, BNB[name])
    ours = qgate.encode(x, name)
    assert torch.equal(ours.scales.reshape(-1), absmax.float())
    table = torch.from_numpy(book_of(name).code_values())
    differ = table[ours.codes.long()] != table[theirs.long()]
    assert differ.float().mean() < 1e-3
    ratios = x.double() / ours.scales.double().repeat_interleave(64, 1)
    edges = torch.tensor(book_of(name)._edges("even"), dtype=torch.float64)
    assert ((ratios[differ][:, None] - edges).abs().amin(1) < 2e-7).all()
    packed, state = functional.quantize_4bit(x.float(), blocksize=64, quant_type=BNB[name])
    decoded = functional.dequantize_4bit(packed, state)
    same = ~differ
    assert torch.equal(qgate.quantize(x.float(), name)[same], decoded[same])


def test_levels_are_those_of_gguf() -> None:
    assert tuple(map(float, quants.IQ4_NL.kvalues)) == levels.IQ4
    for name, magnitudes in {
        "IQ2_XXS": levels.IQ2, "IQ2_XS": levels.IQ2, "IQ2_S": levels.IQ2, "IQ3_XXS": levels.IQ3,
        "IQ3_S": levels.IQ3_ODD, "IQ1_S": levels.TERNARY,
    }.items():  # fmt: skip
        assert tuple(code_book(name).unique().tolist()) == magnitudes


@pytest.mark.parametrize("bits", MAX)
def test_lloyd_levels_are_those_of_the_paper_and_a_fixed_point(bits: int) -> None:
    positive = LLOYD[bits][2 ** (bits - 1) :]
    assert positive == pytest.approx(MAX[bits], abs=6e-4)
    normal = statistics.NormalDist()
    edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(LLOYD[bits]))]
    error = 1.0
    for low, high, level in zip(edges, [*edges[1:], math.inf], LLOYD[bits], strict=True):
        inside = normal.cdf(high) - normal.cdf(low)
        mean = (normal.pdf(low) - normal.pdf(high)) / inside
        assert level == pytest.approx(mean, abs=1e-6)
        error -= inside * mean**2
    assert error == pytest.approx(DISTORTIONS[bits], rel=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_rotated_vector_has_the_published_error(bits: int) -> None:
    """Whatever the vector: here some channels are large, which costs the others all but a level."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(512, 128, generator=generator)
    x[:, :24] *= 30
    signs = (torch.randint(0, 2, (128,), generator=generator) * 2 - 1).tolist()
    error = qgate.stats.errors(qgate.quantize(x, f"lloyd{bits}", rotation=signs), x)
    share = error.metric("relative_mse")
    assert DISTORTIONS[bits] * 0.8 < share < DISTORTIONS[bits] * 1.2
    plain = qgate.stats.errors(qgate.quantize(x, f"lloyd{bits}"), x).metric("relative_mse")
    assert plain > 1.5 * share


def by_fractions(x: float, book: Codebook, rounding: str) -> float:
    """The level that a rounding takes, by exact distances."""
    listed = sorted({Fraction(level) for level in book.levels})
    number = Fraction(x)
    if number <= listed[0] or number >= listed[-1]:
        return float(listed[0] if number <= listed[0] else listed[-1])
    low = max(level for level in listed if level <= number)
    high = min(level for level in listed if level > number)
    if rounding == "zero" and abs(low) != abs(high):
        smaller, larger = sorted((low, high), key=abs)
        return float(larger if number == larger else smaller)
    middle = Fraction(float(np.float32(float((low + high) / 2))))
    if number == middle:
        grows = abs(high) > abs(low) and rounding != "even"
        return float(high if grows else low)
    return float(low if number < middle else high)


@share(4)
@pytest.mark.parametrize("rounding", ["even", "away", "zero"])
@pytest.mark.parametrize("name", BOOKS)
def test_ties_and_their_neighbors_by_fractions(name: str, rounding: Any) -> None:
    book = book_of(name)
    values = book.values()
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32).astype(np.float64)
    spots = np.concatenate([values, middles, [0.0, 1e-300, 9.0]])
    x = np.concatenate([spots, np.nextafter(spots, -np.inf), np.nextafter(spots, np.inf)])
    x = np.concatenate([x, np.random.default_rng(0).normal(size=2000)])
    expected = np.array([by_fractions(value, book, rounding) for value in x.tolist()])
    for ours in (
        definition.round_by_list(x, book, rounding=rounding),
        book.cast(torch.from_numpy(x), DOUBLE, rounding=rounding).numpy(),
    ):
        np.testing.assert_array_equal(ours, expected)


OPTIONS = [{}, {"axis": 0, "block": 7}, {"inf": "saturate"}, {"rounding": "away"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BOOKS)
def test_hard_blocks_by_the_definition(
    name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    x = hard_rows(dtype)
    x[8, 0] = torch.finfo(dtype).max
    exact = assert_defined(x, name, **options)
    assert options.get("axis") == 0 or not exact[3].any()


@pytest.mark.parametrize("rounding", ["even", "away", "zero"])
@pytest.mark.parametrize("name", BOOKS)
def test_the_float32_way_is_the_definition(name: str, rounding: Any) -> None:
    """Blocks have numbers at the middles of levels and beside them, zeros, and short ends."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(300, 200, generator=generator) * torch.exp(
        torch.randn(300, 1, generator=generator)
    )
    edges = torch.tensor(book_of(name)._edges("even"), dtype=torch.float32)
    sizes = torch.randint(-1, 2, (100, len(edges)), generator=generator)
    near = (edges.view(torch.int32) + sizes.int()).view(torch.float32)
    x[:100, : len(edges)], x[:100, len(edges) : 64], x[:100, 63] = near, 0.0, 1.0
    x[100], x[101, 64:128] = 0.0, -0.0
    for dtype in (torch.float32, torch.bfloat16):
        q = qgate.Quantizer(name, rounding=rounding, dtype=torch.float32)
        exact = definition.quantize(x.to(dtype).double().numpy(), q)
        assert_same_bits(q(x.to(dtype)), exact.astype(np.float32).astype(np.float64), name, x)


def test_a_codebook_is_trained_on_numbers() -> None:
    book = Codebook.trained("mine", np.repeat([0.0, 10.0, 20.0, 40.0], [5, 1, 3, 2]), 2)
    assert book.levels == (0.0, 10.0, 20.0, 40.0)
    samples = np.random.default_rng(1).laplace(size=20_000)
    trained, from_numbers = (
        Codebook.trained("laplace", samples, 3),
        Codebook("normal", LLOYD[3]),
    )
    errors = [
        np.square(definition.round_by_list(samples, book) - samples).mean()
        for book in (trained, from_numbers)
    ]
    assert errors[0] < 0.9 * errors[1]
    nearest = definition.round_by_list(samples, trained)
    for level in trained.levels:
        assert samples[nearest == level].mean() == pytest.approx(level, abs=1e-3)
    x = torch.from_numpy(samples[:1024])
    fmt = CodebookFormat("laplace3", trained, size=32)
    q = qgate.Quantizer(fmt)
    assert_same_bits(q(x), definition.quantize(x.numpy(), q), "laplace3", x)


def test_one_bit_has_the_published_error() -> None:
    normal = statistics.NormalDist()
    book = Codebook.trained(
        "one", np.array([normal.inv_cdf((i + 0.5) / 4096) for i in range(4096)]), 1
    )
    assert book.levels[1] == pytest.approx(math.sqrt(2 / math.pi), abs=1e-3)
    fmt = CodebookFormat("one", book, size=128, scaled_by="rms")
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(2))
    error = qgate.stats.errors(qgate.quantize(x, fmt), x).metric("relative_mse")
    assert error == pytest.approx(DISTORTIONS[1], rel=0.02)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Codebook("three", (0.0, 1.0, 2.0)), "a codebook of 3 levels is not allowed"),
        (lambda: Codebook("nan", (0.0, math.nan)), "finite"),
        (lambda: Codebook.trained("none", np.array([]), 2), "0 samples train no codebook"),
        (lambda: Codebook.trained("nan", np.array([math.nan]), 2), "pass finite numbers"),
        (lambda: qgate.Quantizer("nf4", scale=1.0), "nf4 has no option 'scale'"),
        (lambda: qgate.Quantizer("lloyd3", block=(16, 16)), "tiles"),
    ],
)
def test_what_is_not_allowed(make: Any, words: str) -> None:
    with pytest.raises(qgate.QgateError, match=words):
        make()


@pytest.mark.parametrize("name", BOOKS)
def test_stochastic_rounding_takes_both_neighbors_and_is_right_on_average(name: str) -> None:
    book = book_of(name)
    numbers = torch.linspace(*book.bounds(), 41, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    many = numbers.repeat(4000, 1)
    y = book.cast(many, DOUBLE, rounding="stochastic", generator=generator)
    values = torch.from_numpy(book.values())
    gaps = values.diff().max()
    assert ((y - many).abs() <= gaps).all()
    assert (y.mean(0) - numbers).abs().max() < 5 * gaps / 2 / math.sqrt(4000)
