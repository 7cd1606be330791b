"""Seeds of derived inputs, and results that are not the kernel's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from qgate.testing import CheckFailure, check_kernel

X, W = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (24, 16))
LAST: list[Tensor] = []


def kept(x: Tensor, w: Tensor) -> Tensor:
    LAST[:] = [linear(x, w)]
    return LAST[0]


def wrong(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w) * 1.1


def orders(seed: int | None) -> list[Tensor]:
    """What a kernel gets with its rows in another order."""
    inputs: list[Tensor] = []

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        inputs.append(x.clone())
        return linear(x, w)

    report = check_kernel(kernel, X, W, like=linear, relations=["permuted"], seed=seed)
    assert f"; seed {report.seed}" in str(report)
    return inputs


def test_the_environment_gives_the_seed_where_none_is_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QGATE_SEED", raising=False)
    usual, typed = orders(None), orders(7)
    assert all(torch.equal(*pair) for pair in zip(usual, orders(0), strict=True))
    assert not all(torch.equal(*pair) for pair in zip(usual, typed, strict=True))
    monkeypatch.setenv("QGATE_SEED", "7")
    assert all(torch.equal(*pair) for pair in zip(typed, orders(None), strict=True))
    assert all(torch.equal(*pair) for pair in zip(usual, orders(0), strict=True))


def test_a_failure_under_another_seed_names_it(
    monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    monkeypatch.setenv("QGATE_SEED", "9")
    pytester.makepyfile(
        "import torch\nfrom qgate.testing import check_kernel\nfrom torch.nn.functional import linear\n"
        "def test_it():\n"
        "    x, w = torch.ones(4, 8).cumsum(1), torch.eye(8)\n"
        "    check_kernel(lambda x, w: linear(x, w) * 2, x, w, like=linear)\n"
    )
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["E*the kernel is wrong: *", "E*inputs of seed 9: QGATE_SEED=9"])
    monkeypatch.delenv("QGATE_SEED")
    with pytest.raises(CheckFailure) as caught:
        check_kernel(wrong, X, W, like=linear)
    assert getattr(caught.value, "__notes__", []) == []


@pytest.mark.parametrize("text", ["-1", "seven", "1.5", "1e3"])
def test_a_bad_seed_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QGATE_SEED", text)
    with pytest.raises(ValueError, match=f"QGATE_SEED '{text}' is no seed; give a whole number"):
        check_kernel(linear, X, W, like=linear)


def test_a_result_of_the_reference_is_not_the_kernels() -> None:
    with pytest.raises(CheckFailure, match="borrowing returns a result of the reference for the"):
        check_kernel(borrowing, X, W, like=kept)
    # Memory of an argument that the reference returns as it is may be returned by the kernel, too.
    assert check_kernel(same, X.double(), like=same).held


def borrowing(x: Tensor, w: Tensor) -> Tensor:
    return LAST[0] if LAST else linear(x, w)


def same(x: Tensor) -> Tensor:
    return x


def test_operators_of_a_subclass_do_not_judge() -> None:
    class Equal(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in (Tensor.__eq__, Tensor.__le__, Tensor.__ge__, Tensor.double, Tensor.clone):
                return torch.ones(args[0].shape, dtype=torch.bool)
            return super().__torch_function__(func, types, args, kwargs or {})

    def zeros(x: Tensor, w: Tensor) -> Tensor:
        return torch.zeros(len(x), len(w)).as_subclass(Equal)

    def right(x: Tensor, w: Tensor) -> Tensor:
        return linear(x, w).as_subclass(Equal)

    with pytest.raises(CheckFailure, match="zeros is wrong: the result is all zeros"):
        check_kernel(zeros, X, W, like=linear)
    assert check_kernel(right, X, W, like=linear).held
