"""Arguments that a check cannot read, and settings of torch around it, are one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qgate
from qgate.models.loading import load
from qgate.stats import block_counts, counts, errors
from qgate.tensor_inputs import flushes_denormals
from qgate.testing import check, check_kernel

X, W = torch.linspace(-2, 3, 256).reshape(8, 32), torch.linspace(-1, 2, 128).reshape(4, 32)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


UNREADABLE = {
    "meta": (lambda x: x.to("meta"), "a tensor of device meta, which has no values"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:1]]), "a nested tensor; give its parts"),
    "sparse": (lambda x: x.to_sparse(), r"layout torch.sparse_coo; call .to_dense\(\) first"),
    "csr": (lambda x: x.to_sparse_csr(), r"layout torch.sparse_csr; call .to_dense\(\) first"),
    "mkldnn": (lambda x: x.to_mkldnn(), r"layout torch._mkldnn; call .to_dense\(\) first"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_tensor_without_plain_values_is_refused(name: str) -> None:
    make, sentence = UNREADABLE[name]
    with pytest.raises(TypeError, match=f"argument 0: cannot check a kernel with .*{sentence}"):
        check_kernel(product, make(X), W, like=product)
    with pytest.raises(ValueError, match=f"the kernel returned .*{sentence}"):
        check_kernel(lambda x, w: make(product(x, w)), X, W, like=product)
    with pytest.raises(ValueError, match=f"the reference function returned .*{sentence}"):
        check_kernel(product, X, W, like=lambda x, w: make(product(x, w)))


def test_a_check_inside_of_autocast_is_refused() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"torch.autocast is on.*call check_kernel outside of it"),
    ):
        check_kernel(product, X, W, like=product)


def test_a_check_that_would_flush_is_refused() -> None:
    with flushing(), pytest.raises(ValueError, match=r"set_flush_denormal\(True\) is set.*False"):
        check_kernel(product, X, W, like=product)
    assert not flushes_denormals()


FIGURES: dict[str, Callable[[Tensor], object]] = {
    "counts": lambda x: [part.tolist() for part in counts(x).weighted()],
    "blocks": lambda x: [part.tolist() for part in block_counts(x, via="bf16").total().weighted()],
    "errors": lambda x: str(errors(x, SMALL[0])),
    "sweep": lambda x: qgate.sweep(x, "fp8_e4m3", 5).record,
    "sweep of blocks": lambda x: qgate.sweep(x, "mxfp8", granularity="block").record,
    "check": lambda x: check(qgate.quantize(x, "fp8_e4m3"), x, format="fp8_e4m3").held,
}
SMALL = (X * 1e-38, X * 1.01e-38)
WIDE = torch.cat([X.flatten(), torch.tensor([3e38, 1e-42, 1e-45])])


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_the_same_in_a_program_that_flushes_or_raises(name: str) -> None:
    tensors = (SMALL[1], WIDE.expand(32, -1).contiguous()) if name != "errors" else SMALL[1:]
    usual = [FIGURES[name](x) for x in tensors]
    with flushing(), np.errstate(all="raise"):
        beside = [FIGURES[name](x) for x in tensors]
        assert flushes_denormals()
        assert np.geterr()["under"] == "raise"
    assert str(beside) == str(usual)


def test_a_model_is_measured_without_flushing() -> None:
    def build() -> qgate.Model:
        torch.set_flush_denormal(True)
        return qgate.Model(torch.nn.Sequential(torch.nn.Linear(4, 4)), [torch.ones(1, 4)], "mine")

    with flushing():
        load("mine", build=build)
        assert not flushes_denormals()


@pytest.mark.parametrize("arguments", [(X[0],), (X[0].to(torch.float8_e4m3fn),)])
def test_rows_and_eight_bits_are_arguments(arguments: tuple[Any, ...]) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x.float() * 3

    assert check_kernel(scaled, *arguments, like=lambda x: x * 3).held
