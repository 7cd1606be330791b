"""Scales read in another format and blocks on the wrong grid are named; right choices are green."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate.causes.choices import choice_faults, scale_type_faults
from qgate.causes.faults import WrongCast
from qgate.expected.conventions import NUDGE, choosing
from qgate.testing import CheckFailure, check, check_kernel
from tests.shares import share

FAULTS = {
    "nvfp4_ue5m3": (
        "block scales stored as UE5M3 and read as E4M3",
        "read as E4M3 without their highest bit",
    ),
    "nvfp4": ("block scales stored as E4M3 and read as UE5M3",),
    "if4": (
        "all blocks on E2M1: none chooses", "all blocks on INT4: none chooses",
        "on the grid with the larger error", "the sign bit of scales is not read",
        "the bit that chooses is taken as a sign", "without the factor 0.8571",
    ),
    "mixfp4": (
        "all blocks on E2M1: none chooses", "all blocks on E1M2: none chooses",
        "on the grid with the larger error", "the sign bit of scales is not read",
        "the bit that chooses is taken as a sign",
    ),
    "nvfp4_4over6": (
        "E4M3 and read as UE5M3", "with their largest at 6: none chooses",
        "with their largest at 4: none chooses", "on the grid with the larger error",
    ),
}  # fmt: skip


def arguments(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-5, 2, (48, 8), generator=draw)).repeat_interleave(16, 1)
    x, w = torch.randn(32, 128, generator=draw), torch.randn(48, 128, generator=draw)
    return x, w * sizes


def faults(name: str) -> list[WrongCast]:
    q = qgate.Quantizer(name)
    return [*scale_type_faults(q), *choice_faults(q)]


@share(6, by=["name"])
@pytest.mark.parametrize(
    ("name", "words"), [(n, w) for n, listed in FAULTS.items() for w in listed]
)
def test_each_fault_is_named(name: str, words: str) -> None:
    (fault,) = (fault for fault in faults(name) if fault.words.endswith(words))
    x, w = arguments()
    wrong = torch.from_numpy(fault.change(w.double().numpy())).float()
    with pytest.raises(CheckFailure) as failure:
        check_kernel(
            lambda x, _: linear(x, wrong), x, w, like=linear, inputs={1: name}, relations=[]
        )
    assert str(failure.value).splitlines()[0].endswith(words)


@pytest.mark.parametrize("name", FAULTS)
def test_there_is_no_fault_without_a_test(name: str) -> None:
    assert len(faults(name)) == len(FAULTS[name])


@pytest.mark.parametrize("name", FAULTS)
def test_right_kernels_are_green(name: str) -> None:
    for seed in range(4):
        x, w = arguments(seed)
        check_kernel(
            lambda x, w: linear(x, qgate.quantize(w, name)), x, w, like=linear, inputs={1: name},
            relations=[],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("declared", "other"),
    [("nvfp4_4over6", "nvfp4_4over6_mse"), ("nvfp4_4over6_mse", "nvfp4_4over6_256")],
)
def test_other_choices_are_conventions(declared: str, other: str) -> None:
    _, w = arguments()
    report = check(qgate.quantize(w, other), w, format=declared)
    words = "absolute" if "mse" not in other else "squared"
    assert f"blocks chosen by sums of {words} errors" in str(report)
    with pytest.raises(CheckFailure):
        check(qgate.quantize(w, "nvfp4"), w, format=declared)


def test_sums_in_another_order_are_float_noise() -> None:
    """Where two errors nearly agree a right kernel may take the other grid."""
    draw = np.random.default_rng(0)
    values = draw.choice([0.1, 0.3, 0.55, 0.7, 0.9, 1.3, 1.7, 2.3, 3.1, 4.3], (64, 512))
    values[:, ::16] = draw.choice([4.5, 5.0, 6.0, 8.0], (64, 32))
    x = torch.from_numpy(values).float()
    q = qgate.Quantizer("nvfp4_4over6")
    right = choosing(q, q.format)(x.double().numpy(), 1.0)  # type: ignore[arg-type]
    beside = [choosing(q, q.format)(x.double().numpy(), 1 + side * NUDGE) for side in (-1, 1)]  # type: ignore[arg-type]
    assert any((right != y).any() for y in beside), "some errors have to agree nearly"
    for y in beside:
        check(torch.from_numpy(y).float(), x, format="nvfp4_4over6")
