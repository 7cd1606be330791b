"""Chains of a tensor core against their definition in exact fractions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qgate.arithmetics import tensor_core
from qgate.arithmetics.hopper_16bit import BY_EIGHT, CORE
from qgate.arithmetics.hopper_fp8 import CORE as FP8
from qgate.arithmetics.hopper_tf32 import CORE as TF32
from qgate.arithmetics.tensor_core import LEAST_EXPONENTS, TensorCore, chain
from tests.arithmetics import definition
from tests.arithmetics.recordings import calls_of, share_of_equal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CORES = {
    "fp8": (FP8, E4M3, E4M3), "e5m2": (FP8, E5M2, E4M3), "e5m2 both": (FP8, E5M2, E5M2),
    "bf16": (CORE, torch.bfloat16, torch.bfloat16), "fp16": (CORE, torch.float16, torch.float16),
    "by eight": (BY_EIGHT, torch.bfloat16, torch.bfloat16),
    "tf32": (TF32, torch.float32, torch.float32),
    "another": (TensorCore(4, 5, 3), E4M3, E4M3),
}  # fmt: skip
KINDS = ("gauss", "every exponent", "subnormal", "sparse", "positive", "canceling", "zero")


def numbers(kind: str, dtype: torch.dtype, rows: int, depth: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=draw, dtype=torch.float64)
    smallest = 2.0 ** LEAST_EXPONENTS[dtype]
    if kind == "every exponent":
        # Products of the smallest of float32 are out of what this test can compare.
        low = max(LEAST_EXPONENTS[dtype] - 3, -50)
        x *= 2.0 ** torch.randint(low, 7, x.shape, generator=draw)
    elif kind == "subnormal" and smallest > 1e-30:
        x *= smallest / 4
    elif kind == "sparse":
        x *= torch.rand(x.shape, generator=draw) < 0.1
    elif kind == "positive":
        x = x.abs()
    elif kind == "canceling":
        x[:, 1::2] = x[:, : 2 * (depth // 2) : 2] * (1 - 2 * (seed % 2))
    elif kind == "zero":
        x = torch.zeros_like(x)
    return x.clamp(-400, 400).to(dtype)


def defined(
    core: TensorCore, a: Tensor, b: Tensor, start: Tensor | None, **options: object
) -> Tensor:
    least = (LEAST_EXPONENTS[a.dtype], LEAST_EXPONENTS[b.dtype])
    sums = [
        [
            float(
                definition.chained(
                    x, y, core.group, core.aligned, core.fraction, least,
                    0.0 if start is None else float(start[m, n]), **options,  # type: ignore[arg-type]
                )
            )
            for n, y in enumerate(b.double().tolist())
        ]
        for m, x in enumerate(a.double().tolist())
    ]  # fmt: skip
    return torch.tensor(sums, dtype=torch.float64).float() + 0.0


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_the_definition(name: str, kind: str) -> None:
    core, of_a, of_b = CORES[name]
    a, b = numbers(kind, of_a, 4, 83, 1), numbers(kind, of_b, 3, 83, 2)
    assert share_of_equal(chain(core, a, b, (of_a, of_b)), defined(core, a, b, None)) == 1
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)) * (kind != "zero")
    assert share_of_equal(chain(core, a, b, (of_a, of_b), start), defined(core, a, b, start)) == 1


@pytest.mark.parametrize("rounding", [definition.to_nearest, definition.downward])
def test_the_device_cuts_toward_zero(rounding: definition.Rounding) -> None:
    call = calls_of("fp8")["scaled_mm_unit/K64/gauss/fast"]
    a, b, y = call["a"][:8], call["b"][:8], call["y"][:8, :8]
    assert share_of_equal(defined(FP8, a, b, None), y) == 1
    assert share_of_equal(defined(FP8, a, b, None, rounding=rounding), y) < 0.9


def test_subnormal_codes_have_the_least_exponent() -> None:
    """2**-9 times 2**-6 is aligned to 2**-12, not to its own 2**-15."""
    a = torch.full((1, 2), 2.0**-9).to(E4M3)
    b = torch.tensor([[2.0**-6, 2.0**-9]]).to(E4M3)
    core = TensorCore(32, 5, 3)
    assert chain(core, a, b, (E4M3, E4M3)).item() == 2.0**-15
    wider = (torch.float32, torch.float32)
    assert chain(core, a.float(), b.float(), wider).item() == 2.0**-15 + 2.0**-18


def test_parts_in_memory_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    a = numbers("gauss", E4M3, 3 * 5, 70, 1).view(3, 5, 70)
    b = numbers("gauss", E4M3, 7, 70, 2)
    whole = chain(FP8, a, b, (E4M3, E4M3))
    assert whole.shape == (3, 5, 7)
    for at_once in (1, 32 * 7 * 2, 32 * 7 * 5 * 2):
        monkeypatch.setattr(tensor_core, "_AT_ONCE", at_once)
        assert share_of_equal(chain(FP8, a, b, (E4M3, E4M3)), whole) == 1
    one = torch.stack([chain(FP8, x, b, (E4M3, E4M3)) for x in a])
    assert share_of_equal(one, whole) == 1


def test_factors_that_are_not_finite_give_what_ieee_gives() -> None:
    a = torch.ones(5, 40)
    a[1, 3], a[2, 39], a[3, 3], a[3, 4] = torch.inf, torch.nan, torch.inf, -torch.inf
    b = torch.ones(3, 40)
    b[1, 3], b[2] = 0.0, -1.0
    sums = chain(CORE, a.half(), b.half(), (torch.float16, torch.float16))
    plain = a @ b.mT
    plain[0, 2] = plain[4, 2] = -40.0
    assert torch.equal(sums.nan_to_num(7, 8, 9), plain.nan_to_num(7, 8, 9))
    begun = chain(CORE, b.half(), b.half(), (torch.float16,) * 2, torch.full((3, 3), torch.inf))
    assert begun.isposinf().all()


def test_no_product_is_the_start() -> None:
    none = torch.zeros(2, 0).half()
    assert torch.equal(chain(CORE, none, none, (torch.float16,) * 2), torch.zeros(2, 2))
