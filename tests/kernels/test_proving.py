"""A kernel is used after its proof, and a failed proof is told of once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import qgate
from qgate.formats import quantizer
from qgate.formats.engine import on_device
from qgate.formats.engine.job import Job
from qgate.kernels import proving
from qgate.kernels.casts import MxCast
from qgate.kernels.proving import KernelWarning
from qgate.kernels.shapes import MemoryLayout

CPU = torch.device("cpu")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As if the CPU had kernels; the list counts their runs."""
    runs: list[int] = []
    monkeypatch.setattr(proving, "_verdicts", {})
    monkeypatch.setattr(proving, "DEVICES", {"cpu"})
    monkeypatch.setattr(proving, "serves", lambda device: device == CPU)
    monkeypatch.setattr(on_device, "SMALL", 0)
    return runs


def kernel(runs: list[int], spoil: Any = None) -> Any:
    """An MX kernel that asks the definition, and changes what it says."""

    def prepare(cast: MxCast, memory: MemoryLayout, dtype: torch.dtype, out: torch.dtype) -> Any:
        del cast, dtype, out

        def run(x: Tensor, out: Tensor, scales: Tensor | None) -> None:
            assert scales is None
            runs.append(x.numel())
            shaped = x.view(memory.outer, memory.length, memory.inner)
            job = Job(shaped, qgate.Quantizer("mxfp8_e4m3", axis=1, block=memory.block))
            out.copy_(quantizer.by_definition(job).view(out.shape))
            if spoil is not None:
                spoil(out)

        return run

    return prepare


def x() -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_a_kernel_that_is_right_is_used(here: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MxCast, "prepare", kernel(here))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = qgate.quantize(x(), "mxfp8")
        proof = len(here)
        second = qgate.quantize(x(), "mxfp8")
    assert proof > 2, "nothing was proved before the first use"
    assert here[-2:] == [512, 512]
    assert len(here) == proof + 1, "what was proved is not proved again"
    assert torch.equal(first, second)
    qgate.quantize(x(), "mxfp8", block=16)
    assert len(here) > proof + 2, "another block length is another proof"


def last_bit(out: Tensor) -> None:
    flat = out.view(-1).view(torch.int16)
    flat[-1] ^= 1


def minus_zero(out: Tensor) -> None:
    out[out == 0] = 0.0


def kinder_nan(out: Tensor) -> None:
    out[out.isnan()] = 0.0


@pytest.mark.parametrize("spoil", [last_bit, minus_zero, kinder_nan], ids=lambda f: f.__name__)
def test_a_kernel_that_is_wrong_is_told_of_once_and_not_used(
    here: list[int], monkeypatch: pytest.MonkeyPatch, spoil: Any
) -> None:
    monkeypatch.setattr(MxCast, "prepare", kernel(here, spoil))
    with pytest.warns(KernelWarning, match="values? differ, the first is") as caught:
        y = qgate.quantize(x(), "mxfp8")
    assert len(caught) == 1
    assert "mxfp8_e4m3 of bfloat16 tensors on cpu with torch alone" in str(caught[0].message)
    tried = len(here)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second_y = qgate.quantize(x(), "mxfp8")
    assert len(here) == tried
    by_definition = quantizer.by_definition(Job(x(), qgate.Quantizer("mxfp8")))
    assert torch.equal(y, by_definition)
    assert torch.equal(second_y, by_definition)


@pytest.mark.usefixtures("here")
def test_a_kernel_that_does_not_compile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: object) -> None:
        raise RuntimeError("ptxas fatal: no such target\nand much more")

    monkeypatch.setattr(MxCast, "prepare", prepare)
    with pytest.warns(KernelWarning, match=r"\(RuntimeError: ptxas fatal: no such target\)"):
        y = qgate.quantize(x(), "mxfp8")
    assert torch.equal(y, quantizer.by_definition(Job(x(), qgate.Quantizer("mxfp8"))))


@pytest.mark.usefixtures("here")
def test_options_without_a_kernel_go_to_torch() -> None:
    for options in ({"rounding": "stochastic"}, {"dtype": torch.float64}):
        y = qgate.quantize(x(), "mxfp8", **options)
        assert y.shape == (8, 64)
    assert qgate.quantize(x().double(), "mxfp8").dtype == torch.float64


def test_without_cuda_there_are_none() -> None:
    assert not proving.serves(CPU)
    assert not proving.serves(torch.device("meta"))
