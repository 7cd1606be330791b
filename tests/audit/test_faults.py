"""Every wrong alternative: accepted where it really passes, and refused where it fails."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.audits.advice import MARGIN, advice_for
from qgate.audits.compute import judge_closeness, judge_similarity
from qgate.audits.criteria import Closeness, Similarity
from qgate.audits.faults import FAULTS, coarser_format, significant_bits
from qgate.audits.pairs import pair_of
from qgate.audits.reading import LeftOut
from qgate.audits.record import add_judgment, new_place
from qgate.audits.texts import NAMES
from tests.tables import each_of

ROWS, COLUMNS = 24, 64


def expected(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def actual(noise: float = 1e-6) -> Tensor:
    x = expected()
    return x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))


def faulty(x: Tensor, name: str) -> Tensor:
    """What a test would get if its kernel had the fault: built without the audit's own code."""
    y = x.double().clone()
    flat = y.view(-1)
    part = pair_of(x, expected()).part(FAULTS[name].part)
    match name:
        case "zeros":
            y.zero_()
        case "constant":
            y.fill_(y.mean())
        case "shuffle":
            flat.copy_(flat[torch.from_numpy(np.random.default_rng(0).permutation(flat.numel()))])
        case "larger":
            y *= 1.1
        case "noise":
            signs = np.random.default_rng(0).choice((-1.0, 1.0), 1 << 16)[: flat.numel()]
            flat *= 1 + 0.05 * torch.from_numpy(signs)
        case "coarser":
            y = x.bfloat16().double()
        case "row":
            assert part is not None
            row = part.indices[0] // COLUMNS
            y[row] = 0
        case "scale":
            assert part is not None
            flat[part.indices[0] : part.indices[0] + 32] *= 2
        case "element":
            assert part is not None
            flat[torch.from_numpy(part.indices)] *= -1
    return y


@pytest.mark.parametrize("name", FAULTS)
@each_of("rtol", [0.0, 1e-3, 0.02, 0.04, 0.08, 0.2, 1.5])
@each_of("atol", [0.0, 1e-3, 0.02, 0.3, 1.0, 3.0, 8.0])
def test_a_fault_is_accepted_as_the_comparison_itself_would(
    name: str, rtol: float, atol: float
) -> None:
    x, y = actual(), expected()
    if rtol == atol == 0:
        y = x.clone()
    judgment = judge_closeness(x, y, Closeness(rtol, atol), [name])
    in_actual = torch.allclose(faulty(x, name), y.double(), rtol, atol)
    in_expected = torch.allclose(x.double(), faulty(y, name), rtol, atol)
    assert (name in judgment.accepted) is (in_actual and in_expected)
    assert (name in judgment.refused) is not (name in judgment.accepted)


def cosine(x: Tensor, y: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x.double().view(-1), y.double().view(-1), 0))


def calc_diff(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def sqnr(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return float(20 * torch.log10(x.norm() / (x - y).norm()))


SIMILARITIES = {
    "cosine": (cosine, operator.gt, [0.0, 0.5, 0.9, 0.97, 0.99, 0.999, 0.9999, 0.99999]),
    "calc_diff": (calc_diff, operator.lt, [1.1, 0.5, 0.1, 0.02, 5e-3, 1e-3, 1e-4, 1e-5]),
    "sqnr": (sqnr, operator.gt, [-10, 10, 18, 25, 30, 45, 60]),
}


@pytest.mark.parametrize("similarity", SIMILARITIES)
@each_of("name", FAULTS)
def test_a_fault_is_accepted_as_the_test_of_a_similarity_would(similarity: str, name: str) -> None:
    measured, holds, limits = SIMILARITIES[similarity]
    x, y = actual(), expected()
    if similarity == "sqnr":  # whose second is the reference
        x, y = y, x
    for limit in limits:
        criterion = Similarity(similarity, lambda value, limit=limit: holds(value, limit))
        judgment = judge_similarity(x, y, measured(x, y), criterion, [name])
        passes = all(
            holds(measured(*pair), limit) for pair in ((faulty(x, name), y), (x, faulty(y, name)))
        )
        assert (name in judgment.accepted) is passes, limit


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(("reduce", "differences"), [("mean", False), ("min", True)])
def test_cosines_of_rows_see_a_dropped_row_in_their_minimum(
    axis: int, reduce: str, differences: bool
) -> None:
    x, y = actual(), expected()
    rows = torch.nn.functional.cosine_similarity(x, y, dim=axis).numpy()
    criterion = Similarity(
        "cosine", lambda value: getattr(value, reduce)() > 0.9, axis, np.shape(rows)
    )
    judgment = judge_similarity(x, y, rows, criterion, ["row", "larger"])
    assert ("row" in judgment.refused) is differences
    assert "larger" in judgment.accepted


def test_a_fault_of_a_large_tensor_passes_in_all_of_it_or_not_at_all() -> None:
    x = expected(4096, 320)
    x[4000, 7] = 100.0
    y = x.clone()
    x[0, 0] += 1e-3
    judgment = judge_closeness(x, y, Closeness(0.0, 2.0), ["larger", "noise"])
    assert judgment.refused == ["larger", "noise"], "the one large element was not looked at"
    assert judge_closeness(x, y, Closeness(0.0, 12.0), ["larger", "noise"]).refused == []
    assert judge_closeness(x, y, Closeness(0.0, 2.0), ["larger"], thorough=False).refused == []


def test_of_sums_over_a_large_tensor_a_row_counts_as_one_of_all() -> None:
    x = expected(4096, 512)
    y = x + 1e-4
    for limit, accepted in ((1 - 0.2 / 4096, False), (1 - 2 / 4096, True)):
        criterion = Similarity("cosine", lambda value, limit=limit: value > limit)
        judgment = judge_similarity(x, y, cosine(x, y), criterion, ["row"])
        assert ("row" in judgment.accepted) is accepted, limit


@pytest.mark.parametrize(
    ("values", "bits", "coarser"),
    [
        (expected().double().numpy() / 3, 53, "float32"),
        (expected().numpy(), 24, "bfloat16"),
        (expected().half().numpy(), 11, "bfloat16"),
        (expected().bfloat16().float().numpy(), 8, "fp8_e4m3"),
        (expected().to(torch.float8_e4m3fn).float().numpy(), 4, "mxfp4"),
        (np.array([0.5, 1.5, -6.0]), 2, ""),
        (np.array([1.0, -4.0, 0.0]), 1, ""),
    ],
    ids=["float64", "float32", "float16", "bfloat16", "e4m3", "e2m1", "powers of two"],
)
def test_the_next_coarser_format_follows_from_the_bits_of_the_values(
    values: np.ndarray, bits: int, coarser: str
) -> None:
    flat = values.reshape(-1).astype(np.float64)
    assert significant_bits(flat) == bits
    assert coarser_format(flat) == coarser


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (torch.arange(8), torch.arange(8), "integers"),
        (np.arange(8), np.arange(8.0), "integers"),
        (torch.tensor([True, False]), torch.tensor([True, False]), "integers"),
        (torch.ones(8) * 1j, torch.ones(8) * 1j, "integers"),
        (torch.empty(0, 4), torch.empty(0, 4), "empty"),
        (torch.ones(8), torch.rand(8), "constant"),
        (torch.rand(8), torch.zeros(8), "constant"),
        (torch.tensor([1.5]), torch.tensor([1.5]), "constant"),
        (torch.tensor(1.5), torch.tensor(1.5), "constant"),
        (torch.ones(9000), torch.ones(9000), "constant"),
        (torch.full((8,), torch.nan), torch.rand(8), "constant"),
        (torch.rand(4, 4), torch.rand(4), "shapes"),
        (torch.rand(8).to_sparse(), torch.rand(8), "sparse"),
        (torch.rand(8, device="meta"), torch.rand(8), "sparse"),
        (1.5, torch.rand(8), "numbers"),
        (["a"], ["b"], "integers"),
    ],
)
def test_what_cannot_be_accused_is_left_out(first: object, second: object, reason: str) -> None:
    with pytest.raises(LeftOut, match=reason):
        judge_closeness(first, second, Closeness(1.0, 1.0), FAULTS)


def test_a_tensor_with_itself_is_left_out() -> None:
    x = torch.rand(8, 4)
    for first, second in ((x, x), (x, x.detach()), (x.numpy(), x.numpy()), (x, x.view(8, 4))):
        with pytest.raises(LeftOut, match="itself"):
            judge_closeness(first, second, Closeness(1.0, 1.0), FAULTS)
    assert judge_closeness(x, x.clone(), Closeness(9.0, 9.0), ["zeros"]).accepted


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn],
    ids=str,
)
def test_every_floating_dtype_is_read(dtype: torch.dtype) -> None:
    x = expected().to(dtype)
    judgment = judge_closeness(x, x.clone(), Closeness(0.0, 100.0), FAULTS)
    assert {*judgment.accepted} == {*FAULTS}
    assert judge_closeness(x, x.clone(), Closeness(0.0, 0.0), FAULTS).refused == [*FAULTS]


def test_views_and_gradients_are_read_and_left_as_they_are() -> None:
    x = expected().t().requires_grad_()
    y = expected().t()[:, ::2].contiguous()
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    assert judge_closeness(x[:, ::2], y, Closeness(0.0, 9.0), ["zeros"]).accepted
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002


def test_values_that_are_not_finite_take_no_part() -> None:
    x = expected()
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    y = x.clone()
    assert "larger" in judge_closeness(x, y, Closeness(0.2, 0.0), FAULTS).accepted
    assert "larger" in judge_closeness(x, y, Closeness(0.05, 0.0), FAULTS).refused


def test_nearly_constant_tensors_and_coarse_grids_are_not_shuffled() -> None:
    x = 1 + 0.005 * expected()
    judgment = judge_closeness(x, x.clone(), Closeness(0.0, 0.5), FAULTS)
    assert not {"shuffle", "constant"} & {*judgment.accepted, *judgment.refused}
    ones_and_twos = torch.tensor([1.0, 2.0]).repeat(32)
    judgment = judge_closeness(ones_and_twos, ones_and_twos.clone(), Closeness(0.0, 9.0), FAULTS)
    assert "coarser" not in {*judgment.accepted, *judgment.refused}


def test_parts_that_are_near_zero_are_not_changed() -> None:
    noise = 1e-15 * expected(ROWS, COLUMNS)
    y = torch.zeros(ROWS, COLUMNS)
    y[::8, ::32] = 1.0  # as of a product that gives unit vectors
    for first, second in ((y + noise, y), (y, y + noise)):
        judgment = judge_closeness(first, second, Closeness(1e-7, 1e-9), FAULTS)
        assert not judgment.accepted
        assert {"zeros", "larger", "shuffle"} <= {*judgment.refused}
    parts = {"row", "scale", "element"}
    judgment = judge_closeness(noise, noise.clone(), Closeness(0.0, 1.0), FAULTS)
    assert parts <= {*judgment.accepted}, "small numbers among their equals are not near zero"


def test_another_formula_than_the_name_says_is_left_out() -> None:
    criterion = Similarity("calc_diff", lambda value: value < 9)
    with pytest.raises(LeftOut, match="another formula"):
        judge_similarity(actual(), expected(), 0.5, criterion, FAULTS)


# Advice ------------------------------------------------------------------------------------------


def advised(rtol: float, atol: float, noise: float) -> dict[str, object]:
    entry = new_place("test_it.py", 1, "", "assert_close", "test")
    x, y = actual(noise), expected()
    judgment = judge_closeness(x, y, Closeness(rtol, atol), FAULTS)
    add_judgment(
        entry, judgment.accepted, judgment.refused, judgment.differences, [judgment.coarser]
    )
    advice = advice_for(entry)
    return {"accepts": entry["accepts"], **advice}


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2])
def test_an_advised_limit_accepts_what_was_compared_and_refuses_what_it_says(noise: float) -> None:
    advice = advised(0.0, 20.0, noise)
    x, y = actual(noise), expected()
    atol = float(str(advice["text"]).rpartition("=")[2])
    assert (x - y).abs().max() * MARGIN <= atol
    refused = advice["refuses"]
    assert isinstance(refused, list)
    assert {"zeros", "larger", "row", "scale", "element"} <= {*refused}
    for name in refused:
        assert not torch.allclose(faulty(x, name), y.double(), 0.0, atol), name
        assert not torch.allclose(x.double(), faulty(y, name), 0.0, atol), name
    assert ("coarser" in refused) is (noise < 1e-3)


def test_where_the_difference_is_as_large_as_the_fault_there_is_no_limit() -> None:
    assert advised(0.0, 20.0, 1.0)["text"] == ""


def test_alternatives_and_their_words_are_the_same() -> None:
    assert [*NAMES] == [*FAULTS]
