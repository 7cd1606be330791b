"""Every recorded call of a device is reproduced bit for bit, and by no other parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.arithmetics.attention import BackwardRounding
from qgate.arithmetics.hopper_16bit import BY_EIGHT
from qgate.arithmetics.known import ATTENTIONS, PRODUCTS
from qgate.arithmetics.products import KnownProduct, TensorCoreProduct
from tests.arithmetics.recordings import Calls, calls_of, scaled, share_of_equal
from tests.shares import share

PRODUCT_CALLS: Calls = {
    name: call for file in ("fp8", "16bit", "float32", "int8") for name, call in calls_of(file).items()
}  # fmt: skip
RECORDED = load_file(Path(__file__).parents[1] / "devices" / "recorded_attention.safetensors")
FP16 = torch.float16
CAUSAL = torch.ones(96, 96, dtype=torch.bool).tril()
# The share of equal bits that is reached: in fp16 a probability next to a tie may be rounded to
# the other side, since the fast exponential of the device is not emulated. It changes one row.
LEAST = {torch.bfloat16: 1.0, torch.float16: 0.999}
KERNELS = {
    "flash_attention": ("hopper-flash", 128),
    "cudnn_attention": ("hopper-cudnn", 128),
    "efficient_attention": ("hopper-efficient", 64),
}


def product_of(name: str) -> KnownProduct:
    kind, dtype = name.split("/")[:2]
    if kind.startswith("scaled_mm"):
        return PRODUCTS["hopper-fp8-fast" if "fast" in name else "hopper-fp8-slow"]
    names = {
        "fp32": "fma-chain",
        "tf32": "hopper-tf32",
        "bf16": "hopper-16bit",
        "fp16": "hopper-16bit",
    }
    return PRODUCTS["int-exact" if kind == "int_mm" else names[dtype]]


def replayed(product: KnownProduct, call: dict[str, Tensor], splits: int) -> Tensor:
    dtypes = (call["a"].dtype, call["b"].dtype)
    sums = product.sums(call["a"], call["b"], dtypes, splits)
    if product.name == "int-exact":
        return sums
    scale_b = call.get("scale_b", torch.ones(()))
    return scaled(
        sums, call.get("scale_a", torch.ones(())), scale_b.mT if scale_b.dim() else scale_b,
        call["y"].dtype,
    )  # fmt: skip


def test_all_recorded_products_are_there() -> None:
    kinds = [name.split("/")[0] for name in PRODUCT_CALLS]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "scaled_mm": 40, "scaled_mm_unit": 36, "scaled_mm_bits": 12, "scaled_mm_rowwise": 4,
        "scaled_mm_e5m2": 2, "mm": 12, "mm_full": 6, "int_mm": 1,
    }  # fmt: skip


@share(4)
@pytest.mark.parametrize("name", PRODUCT_CALLS)
def test_a_product_has_the_bits_of_the_device(name: str) -> None:
    product, call = product_of(name), PRODUCT_CALLS[name]
    likeliest = product.splits(call["a"].shape[-1])[0]
    assert share_of_equal(replayed(product, call, likeliest), call["y"]) == 1


@pytest.mark.parametrize(
    ("name", "splits"),
    [("scaled_mm/K8192/fast/f32", 3), ("mm/fp16/K4096", 3), ("mm/tf32/K512", 16)],
)
def test_how_k_is_cut_is_seen_in_the_bits(name: str, splits: int) -> None:
    product, call = product_of(name), PRODUCT_CALLS[name]
    alike = {
        number: share_of_equal(replayed(product, call, number), call["y"])
        for number in product.splits(call["a"].shape[-1])
    }
    assert [number for number, share in alike.items() if share == 1] == [splits]


def alike(product: KnownProduct, names: list[str]) -> float:
    """Return the share of equal bits over several calls."""
    shares = [
        share_of_equal(
            replayed(
                product, PRODUCT_CALLS[name], product.splits(PRODUCT_CALLS[name]["a"].shape[-1])[0]
            ),
            PRODUCT_CALLS[name]["y"],
        )
        for name in names
    ]
    return sum(shares) / len(shares)


FP8 = [
    f"scaled_mm{kind}/{way}{end}"
    for kind, end in (("/K256", "/f32"), ("/K512", "/f32"), ("_unit/K256/one_large", ""))
    for way in ("fast", "slow")
]
OTHER_PARAMETERS = {
    f"{field} {value}": {field: value}
    for field, values in {"group": (16, 64), "aligned": (12, 14), "fraction": (12, 14, 23)}.items()
    for value in values
}


@pytest.mark.parametrize("other", OTHER_PARAMETERS)
def test_other_parameters_of_fp8_are_refuted(other: str) -> None:
    for way in ("slow", "fast"):
        product = PRODUCTS[f"hopper-fp8-{way}"]
        assert isinstance(product, TensorCoreProduct)
        names = [name for name in FP8 if way in name]
        assert alike(product, names) == 1
        core = replace(product.core, **OTHER_PARAMETERS[other])
        assert alike(replace(product, core=core), names) < 0.99


@pytest.mark.parametrize("tile", [64, 256])
def test_another_promotion_of_fp8_is_refuted(tile: int) -> None:
    product = PRODUCTS["hopper-fp8-slow"]
    assert alike(replace(product, tile=tile), ["scaled_mm/K1024/slow/f32"]) < 0.95
    assert alike(PRODUCTS["hopper-fp8-fast"], ["scaled_mm/K1024/slow/f32"]) < 0.8


@pytest.mark.parametrize(
    "core", [{"group": 4}, {"group": 16}, {"aligned": 24}, {"fraction": 22}], ids=str
)
def test_other_parameters_of_tf32_are_refuted(core: dict[str, int]) -> None:
    product = PRODUCTS["hopper-tf32"]
    assert isinstance(product, TensorCoreProduct)
    names = ["mm/tf32/K64", "mm/tf32/K512"]
    assert alike(replace(product, core=replace(product.core, **core)), names) < 0.95


def attended(name: str, call: dict[str, Tensor], known: str, tile: int) -> float:
    dtype = call["q"].dtype
    mask = CAUSAL if "causal" in name else None
    result = ATTENTIONS[known].values(call["q"], call["k"], call["v"], 0.125, mask, dtype, tile)
    return share_of_equal(result.to(dtype), call["y"])


@pytest.mark.parametrize(
    "name", [name for name in calls_of("attention") if name.rpartition("/")[2] in KERNELS]
)
def test_attention_has_the_bits_of_the_device(name: str) -> None:
    call = calls_of("attention")[name]
    kernel, tile = KERNELS[name.rpartition("/")[2]]
    assert attended(name, call, kernel, tile) >= LEAST[call["q"].dtype]
    assert attended(name, call, kernel, 32) < 0.95


def test_the_tensor_core_of_attention_is_seen_in_fp16() -> None:
    call = calls_of("attention")["sdpa/fp16/full/flash_attention"]
    flash = ATTENTIONS["hopper-flash"]
    sides = [call[name] for name in "qkv"]
    right, other = (
        replace(flash, core=core).values(*sides, 0.125, None, torch.float16).half()
        for core in (flash.core, BY_EIGHT)
    )
    assert share_of_equal(right, call["y"]) > share_of_equal(other, call["y"]) + 0.003


def test_attention_of_exact_sums_is_the_math_backend() -> None:
    """Nothing is rounded between the products: the definition in float64, rounded once."""
    for name in ("sdpa/bf16/full/math", "sdpa/bf16/causal/math"):
        call = calls_of("attention")[name]
        q, k, v = (call[side].double() for side in "qkv")
        mask = CAUSAL if "causal" in name else CAUSAL | True
        p = (q @ k.mT * 0.125).masked_fill(~mask, -torch.inf).softmax(-1)
        assert share_of_equal((p @ v).float().bfloat16(), call["y"]) > 0.999


GRADIENTS = {
    "sdpa_backward/bf16/flash": calls_of("attention")["sdpa_backward/bf16/flash"],
    **{
        group: {
            name: RECORDED[f"{prefix}/{name}"]
            for prefix, names in ((group[:4], ("q", "k", "v", "go")), (group, ("dq", "dk", "dv")))
            for name in names
        }
        for group in ("fp16/flash", "fp16/cudnn", "fp16/efficient", "bf16/flash", "bf16/cudnn")
    },
}


@pytest.mark.parametrize("group", GRADIENTS)
def test_gradients_have_the_bits_of_the_device(group: str) -> None:
    call = GRADIENTS[group]
    dtype, backend = call["q"].dtype, group.rpartition("/")[2]
    kernel, tile = KERNELS[f"{backend}_attention"]
    attention, sides = ATTENTIONS[kernel], [call[side] for side in ("q", "k", "v", "go")]

    def alike(rounding: BackwardRounding) -> list[float]:
        gradients = replace(attention, backward=rounding).gradients(
            *sides, sides[0].shape[-1] ** -0.5, None, dtype, tile
        )
        pairs = zip(gradients, ("dq", "dk", "dv"), strict=True)
        return [share_of_equal(x.to(dtype), call[name]) for x, name in pairs]

    shares = alike(attention.backward)
    # In bf16 one probability next to a tie is in a row of dv.
    assert shares[:2] == [1, 1]
    assert shares[2] >= (1 if dtype is torch.float16 else 0.995)
    if dtype is torch.float16:
        rounding = attention.backward
        other = replace(rounding, after_scale=not rounding.after_scale)
        assert max(alike(other)[:2]) < 0.6
        other = replace(rounding, of_p=not rounding.of_p)
        assert max(alike(other)[:2]) < 0.99


@share(4)
@pytest.mark.parametrize("name", calls_of("cpu_attention"))
def test_attention_of_a_cpu_has_its_bits(name: str) -> None:
    call, attention = calls_of("cpu_attention")[name], ATTENTIONS["cpu-flash"]
    dtype, mask = call["q"].dtype, CAUSAL if "causal" in name else None
    sides = [call[side] for side in "qkv"]
    assert (
        share_of_equal(attention.values(*sides, 0.125, mask, dtype, 512).to(dtype), call["y"]) == 1
    )
    exact = replace(attention, exponential=None).values(*sides, 0.125, mask, dtype, 512)
    assert share_of_equal(exact.to(dtype), call["y"]) < 0.95
    gradients = attention.gradients(*sides, call["go"], 0.125, mask, dtype, 512)
    # A few sums that cancel, such as those of a query with one key.
    for x, key in zip(gradients, ("dq", "dk", "dv"), strict=True):
        assert share_of_equal(x.to(dtype), call[key]) > 0.985
    at_once = super(type(attention), attention).gradients(
        *sides, call["go"], 0.125, mask, dtype, 512
    )
    assert share_of_equal(at_once[2].to(dtype), call["dv"]) < 0.9


@pytest.mark.parametrize("name", calls_of("cpu_float16_attention"))
def test_attention_with_float16_sums_has_the_bits_of_the_interpreter(name: str) -> None:
    call = calls_of("cpu_float16_attention")[name]
    q, k, v = (call[side] for side in "qkv")
    if is_paged := name.startswith("conch"):
        q, k, v = q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)
    kernel, other = "float16-products", "float16-running"
    if is_paged:
        kernel, other = other, kernel
    tile = 16 if is_paged else 64

    def alike(name: str, tile: int) -> float:
        values = ATTENTIONS[name].values(q, k, v, q.shape[-1] ** -0.5, None, FP16, tile)
        return share_of_equal(values.to(FP16).reshape(call["y"].shape), call["y"])

    assert alike(kernel, tile) > 0.998
    assert alike(other, tile) < 0.9
    assert alike("float32-flash", tile) < 0.9
    if tile < k.shape[-2]:
        assert alike(kernel, k.shape[-2]) < 0.9


@pytest.mark.parametrize("name", calls_of("cpu_float32"))
def test_float32_of_a_cpu_has_its_bits(name: str) -> None:
    call = calls_of("cpu_float32")[name]
    assert share_of_equal(replayed(PRODUCTS["cpu-mkl-float32"], call, 1), call["y"]) == 1
    if not name.endswith("K64"):
        chain = PRODUCTS["fma-chain"]
        assert share_of_equal(replayed(chain, call, 1), call["y"]) < 0.5
