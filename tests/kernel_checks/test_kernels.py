from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

import qgate
from qgate.expected.derived import RELATIONS
from qgate.expected.searched_scales import search_scales
from qgate.kernel_checks.declaring import make_subject
from qgate.kernel_checks.updating import UPDATING
from qgate.testing import CheckFailure, check_kernel, tiles
from tests.kernel_checks.right_kernels import searched
from tests.shares import proof

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(24, 64, generator=GENERATOR)
W = torch.randn(20, 64, generator=GENERATOR) / 8
MX = {0: "mxfp8", 1: "mxfp8"}


def right(x: Tensor, w: Tensor) -> Tensor:
    return linear(qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8"))


def test_a_report_says_what_was_held_and_what_would_have_been_seen() -> None:
    report = check_kernel(right, X, W, like=linear, inputs=MX)
    assert report.conventions == {
        "argument 0": "scale rule floor",
        "argument 1": "scale rule floor",
    }
    for relation in (
        "3 of 24",
        "in another order",
        "strided",
        "times 2^12",
        "zero rows",
        "one NaN",
    ):
        assert any(relation in name for name in report.held), relation
    assert report.error == pytest.approx(report.format_error, rel=1e-3)
    text = str(report)
    assert text.startswith(f"right agrees at {len(report.held)} inputs; float noise is ")
    assert "smallest defect seen, the weakest of 64 terms of a sum" in text


# Power -------------------------------------------------------------------------------------------


@proof
def test_the_smallest_factor_that_is_claimed_is_seen_and_a_quarter_is_not() -> None:
    def kernel(factor: float) -> Any:
        return lambda x, w: (right(x, w).double() * factor).float()

    options: dict[str, Any] = {"like": linear, "inputs": MX, "relations": ["permuted"]}
    size = check_kernel(kernel(1.0), X, W, **options).smallest_defect["a factor on all values"]
    with pytest.raises(CheckFailure):
        check_kernel(kernel(1 + 2 * size), X, W, **options)
    check_kernel(kernel(1 + size / 4), X, W, **options)


def test_the_smallest_share_of_a_term_that_is_claimed_is_seen() -> None:
    def kernel(share: float) -> Any:
        def scaled(x: Tensor, w: Tensor) -> Tensor:
            weakened = qgate.quantize(x, "mxfp8").double()
            weakened[:, weakest] *= 1 - share
            return linear(weakened, qgate.quantize(w, "mxfp8").double()).float()

        return scaled

    options: dict[str, Any] = {"like": linear, "inputs": MX, "relations": ["permuted"]}
    ideal = [qgate.quantize(tensor, "mxfp8") for tensor in (X, W)]
    weakest = int((ideal[0].abs().amax(0) * ideal[1].abs().amax(0)).argmin())
    report = check_kernel(kernel(0.0), X, W, **options)
    share = report.smallest_defect["the weakest of 64 terms of a sum"]
    with pytest.raises(CheckFailure):
        check_kernel(kernel(2 * share), X, W, **options)
    check_kernel(kernel(share / 50), X, W, **options)


# Relations ---------------------------------------------------------------------------------------


def test_each_relation_can_be_asked_for_alone() -> None:
    for relation in RELATIONS.keys() - {"positions"}:  # which take integers
        report = check_kernel(right, X, W, like=linear, inputs=MX, relations=[relation])
        assert len(report.held) > 1, relation
        assert report.held[0] == "the example"


def test_what_is_left_out_is_listed_with_its_reason() -> None:
    def even_rows(x: Tensor, w: Tensor) -> Tensor:
        if len(x) % 2:
            raise ValueError(f"{len(x)} rows are not even")
        return linear(qgate.quantize(x, "int8"), w)

    report = check_kernel(even_rows, X, W, like=linear, inputs={0: "int8"})
    reasons = report.left_out
    assert reasons["one NaN (argument 0)"] == "int8 has no NaN"
    refused = [name for name, reason in reasons.items() if "rows are not even" in reason]
    assert any("3 of 24" in name for name in refused)
    assert "left out: 3 of 24 along dimension 0 of argument 0 (the kernel refused: " in str(report)

    plain = check_kernel(
        lambda x: qgate.quantize(x, "fp8_e4m3"), X, like=lambda x: x, output="fp8_e4m3"
    )
    reason = plain.left_out["values times 2^12 (argument 0)"]
    assert reason == "fp8_e4m3 has no scale made from the values"

    by_eps = check_kernel(
        lambda x: rms_norm(x, (x.shape[-1],)), X, like=lambda x: rms_norm(x, (x.shape[-1],)),
        dtype=torch.float32,
    )  # fmt: skip
    reason = by_eps.left_out["values times 2^-12 (argument 0)"]
    assert "the reference differs between float32 and float64" in reason


@pytest.mark.parametrize(
    "error", [IndexError, ZeroDivisionError, NotImplementedError, struct.error]
)
def test_any_exception_at_a_derived_input_is_a_refusal(error: type[Exception]) -> None:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        if len(x) == 1:
            raise error("tile 1\nof 3")
        return right(x, w)

    report = check_kernel(kernel, X, W, like=linear, inputs=MX, relations=["one", "odd"])
    words = report.left_out["the first of 24 along dimension 0 of argument 0"]
    assert words == f"the kernel refused: {error.__name__}: tile 1"
    assert not report.notes


@proof
def test_other_shapes_can_be_added() -> None:
    report = check_kernel(
        right, X, W, like=linear, inputs=MX, shapes=[((7, 256), (9, 256))], relations=["one"]
    )
    assert "shapes 7x256, 9x256" in report.held

    def wrong_from_256(x: Tensor, w: Tensor) -> Tensor:
        return right(x, w) * (1.5 if x.shape[1] >= 256 else 1)

    with pytest.raises(CheckFailure, match=r"for shapes 7x256, 9x256: the result is 1\.5 times"):
        check_kernel(wrong_from_256, X, W, like=linear, inputs=MX, shapes=[((7, 256), (9, 256))])


@proof
def test_dtype_and_arithmetic_are_what_is_declared() -> None:
    def narrow(x: Tensor, w: Tensor) -> Tensor:
        assert x.dtype == w.dtype == torch.bfloat16
        x_quantized, right = (qgate.quantize(tensor.float(), "mxfp8") for tensor in (x, w))
        total = torch.zeros(len(x), len(w), dtype=torch.float16)
        for term in range(0, x.shape[-1], 4):
            part = slice(term, term + 4)
            total += (x_quantized[:, part] @ right[:, part].T).half()
        return total

    options: dict[str, Any] = {
        "like": linear, "inputs": MX, "dtype": torch.bfloat16, "relations": ["odd", "batch"],
    }  # fmt: skip
    with pytest.raises(CheckFailure, match="sums in float16"):
        check_kernel(narrow, X, W, **options)
    assert len(check_kernel(narrow, X, W, arithmetic="float16", **options).held) > 3


def test_a_kernel_may_write_into_its_arguments() -> None:
    def kernel(x: Tensor, cache: Tensor) -> Tensor:
        cache[: len(x)] = qgate.quantize(x, "mxfp8")
        return cache

    def like(x: Tensor, cache: Tensor) -> Tensor:
        cache = cache.clone()
        cache[: len(x)] = x
        return cache

    cache = torch.zeros(24, 64)
    assert check_kernel(kernel, X, cache, like=like, inputs={0: "mxfp8"}).held
    assert not cache.any()


# Packed arguments --------------------------------------------------------------------------------


def _int8_gemm(codes: Tensor, scales: Tensor, other: Tensor, other_scales: Tensor) -> Tensor:
    sums = codes.int().double() @ other.int().double().T
    return (sums * scales.double() * other_scales.double().T).float()


def _codes_and_scales(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
    assert encoded.scales is not None
    return encoded.codes, encoded.scales.reshape(-1, 1)


def test_int8_codes_and_scales_of_rows() -> None:
    packed = [qgate.encode(tensor, "int8", granularity="channel", axis=0) for tensor in (X, W)]
    pack = {0: _codes_and_scales, 1: _codes_and_scales}
    report = check_kernel(_int8_gemm, *packed, like=linear, pack=pack)
    assert any("3 of 24" in name for name in report.held)

    def swapped(encoded: qgate.Encoded) -> tuple[Tensor, Tensor]:
        codes, scales = _codes_and_scales(encoded)
        return codes, scales.flip(0)

    with pytest.raises(CheckFailure, match="_int8_gemm is wrong: "):
        check_kernel(_int8_gemm, *packed, like=linear, pack={0: swapped, 1: _codes_and_scales})


def _fp8_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to FP8 with one scale per tile of 128x128."""
    rows, columns = (-(-size // 128) for size in x.shape)
    scales = torch.ones(rows, columns)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            part = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            amax = x[part].abs().amax()
            scales[row, column] = torch.where(amax == 0, 1.0, amax / 448)
            codes[part] = (x[part] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def _tile_gemm(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return linear(x, codes.float() * spread[: codes.shape[0], : codes.shape[1]])


def test_fp8_weights_in_tiles_of_128() -> None:
    x = torch.randn(6, 200, generator=GENERATOR)
    w = torch.randn(140, 200, generator=GENERATOR) * torch.linspace(0.1, 3, 140)[:, None]
    inputs = {1: tiles("fp8_e4m3", 128, 128)}
    report = check_kernel(_tile_gemm, x, w, like=linear, inputs=inputs, pack={1: _fp8_tiles})
    assert report.conventions == {"argument 1": "fp8_e4m3 per tile of 128x128"}

    def transposed_scales(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = _fp8_tiles(x)
        return codes, scales.T.contiguous() if scales.shape[0] == scales.shape[1] else scales

    with pytest.raises(CheckFailure, match="_tile_gemm is wrong: "):
        check_kernel(_tile_gemm, x, w, like=linear, inputs=inputs, pack={1: transposed_scales})


def _nibbles(encoded: qgate.Encoded) -> tuple[Tensor, Tensor, float]:
    """Pack two E2M1 codes into a byte, the even one low."""
    codes, scales = encoded.codes.to(torch.uint8), encoded.scales
    assert scales is not None
    assert encoded.tensor_scale is not None
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, float(encoded.tensor_scale)


def _nvfp4_gemm(x: Tensor, packed: Tensor, scales: Tensor, tensor_scale: float) -> Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    by_block = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
    w = table[codes.long()].double() * by_block[:, : codes.shape[1]] * tensor_scale
    return linear(x.double(), w).float()


def test_nvfp4_weights_packed_by_nibbles() -> None:
    packed = qgate.encode(W, "nvfp4")
    report = check_kernel(_nvfp4_gemm, X, packed, like=linear, pack={1: _nibbles})
    assert report.held

    def high_first(encoded: qgate.Encoded) -> tuple[Tensor, Tensor, float]:
        codes, scales, tensor_scale = _nibbles(encoded)
        return codes >> 4 | codes << 4, scales, tensor_scale

    with pytest.raises(CheckFailure, match="argument 1 has neighboring codes swapped"):
        check_kernel(_nvfp4_gemm, X, packed, like=linear, pack={1: high_first})


def test_results_are_unpacked() -> None:
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        encoded = qgate.encode(x, "int8", granularity="channel", axis=0)
        return _codes_and_scales(encoded)

    output = qgate.Quantizer("int8", granularity="channel", axis=0)
    unpack = lambda pair: pair[0] * pair[1]  # noqa: E731
    assert check_kernel(quantize, X, like=lambda x: x, output=output, unpack=unpack).held
    with pytest.raises(ValueError, match="quantize returned tuple; give unpack="):
        check_kernel(quantize, X, like=lambda x: x, output=output)


def test_one_tensor_may_be_two_arguments_in_two_formats() -> None:
    per_tensor = qgate.Quantizer("int8", granularity="tensor")

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return linear(qgate.quantize(x, "mxfp8"), per_tensor(w))

    inputs = {0: "mxfp8", 1: per_tensor}
    assert check_kernel(kernel, X, X, like=linear, inputs=inputs).held
    subject = make_subject(
        kernel, [X, X], like=linear, inputs=inputs, output=None, pack=None, unpack=None,
        arithmetic="float32", convention=None,
    )  # fmt: skip
    first, second = subject.ideal([X, X], {0: 0, 1: 0})
    assert torch.equal(first.float(), qgate.quantize(X, "mxfp8"))
    assert torch.equal(second.float(), per_tensor(X))


# Limits and accepted values ----------------------------------------------------------------------


def test_a_limit_below_the_error_of_the_format_is_refused() -> None:
    words = "limit 0.001 is below what the format itself costs: an ideal kernel has a relative"
    with pytest.raises(ValueError, match=words):
        check_kernel(right, X, W, like=linear, inputs=MX, limit=0.001)
    assert check_kernel(right, X, W, like=linear, inputs=MX, limit=0.01).held
    with pytest.raises(ValueError, match="limit nan is not allowed"):
        check_kernel(right, X, W, like=linear, inputs=MX, limit=float("nan"))


def test_searched_scales_have_a_band_of_errors() -> None:
    fmt = qgate.Quantizer("int4", granularity="channel", axis=0)
    options: dict[str, Any] = {"like": linear, "inputs": {0: fmt}, "convention": "mse"}
    report = check_kernel(lambda x, w: linear(searched(x, "int4"), w), X, W, **options)
    assert "searched scales" in report.conventions["argument 0"]
    for wrong in (lambda x, w: linear(searched(x, "int4") * 1.1, w), linear):
        with pytest.raises(CheckFailure, match="searched scales give"):
            check_kernel(wrong, X, W, **options)


def test_searched_scales_are_held_at_limits_and_accepted_values(tmp_path: Path) -> None:
    fmt = qgate.Quantizer("int4", granularity="channel", axis=0)

    def our_search(x: Tensor, w: Tensor) -> Tensor:
        values = search_scales(x.double().numpy(), fmt)
        return linear(torch.from_numpy(values).float(), w)

    def definition(x: Tensor, w: Tensor) -> Tensor:
        return linear(fmt(x), w)

    options: dict[str, Any] = {"like": linear, "inputs": {0: fmt}, "convention": "mse"}
    accepted = tmp_path / "gemm.json"
    with pytest.raises(CheckFailure, match=r"has no accepted values in .*gemm\.json"):
        check_kernel(our_search, X, W, **options, accept=accepted)
    before = UPDATING.set(True)
    best = check_kernel(our_search, X, W, **options, accept=accepted)
    UPDATING.reset(before)
    assert json.loads(accepted.read_text())["error"] == best.error
    check_kernel(our_search, X, W, **options, accept=accepted, limit=2 * best.format_error)
    limit = 1.001 * best.format_error
    with pytest.raises(CheckFailure, match=f"against unquantized values, limit {limit:g}; an"):
        check_kernel(lambda x, w: definition(x * 1.02, w), X, W, **options, limit=limit)
    with pytest.raises(CheckFailure, match=r"has a relative error of .*, accepted is"):
        check_kernel(lambda x, w: definition(x * 1.01, w), X, W, **options, accept=accepted)
    with pytest.raises(
        CheckFailure, match=r"scales of argument 0 were not searched for \(scale amax/7"
    ):
        check_kernel(definition, X, W, **options)


@proof
def test_accepted_values_are_kept_beside_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        kernel="""
        import torch, qgate
        X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
        W = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
        RULE = "floor"
        def gemm(x, w):
            x, w = (qgate.quantize(t, "mxfp8", scale_rule=RULE) for t in (x, w))
            return torch.nn.functional.linear(x, w)
        """,
        test_gemm="""
        import torch, kernel
        def test_gemm(qgate_check_kernel):
            qgate_check_kernel(kernel.gemm, kernel.X, kernel.W, like=torch.nn.functional.linear,
                               inputs={0: "mxfp8", 1: "mxfp8"}, relations=["one"],
                               accept="gemm")
        def test_cast(qgate_check):
            assert qgate_check(kernel.X.bfloat16(), kernel.X, format="bf16").held
        """,
    )
    accepted_file = pytester.path / "accepted_kernels" / "gemm.json"
    first = pytester.runpytest_inprocess("-q")
    first.stdout.fnmatch_lines(["*gemm has no accepted values in *gemm.json*"])
    first.stdout.fnmatch_lines(["*run pytest with --update-baselines to accept what was measured*"])
    assert not accepted_file.exists()
    assert pytester.runpytest_inprocess("-q", "--update-baselines").ret == 0
    assert json.loads(accepted_file.read_text())["conventions"]["argument 0"] == "scale rule floor"
    assert pytester.runpytest_inprocess("-q").ret == 0

    source = (pytester.path / "kernel.py").read_text()
    (pytester.path / "kernel.py").write_text(source.replace('"floor"', '"ceil"'))
    other = pytester.runpytest_inprocess("-q")
    other.stdout.fnmatch_lines(
        ["*quantizes argument 0 by 'scale rule ceil*accepted is 'scale rule floor'*"]
    )
    (pytester.path / "kernel.py").write_text(source)
    for change, words in (
        ({"held": ["a view"]}, "*no longer holds 1 of 1 accepted inputs, first 'a view'*"),
        ({"error": 1e-9}, "*has a relative error of *, accepted is 1e-09*"),
    ):
        accepted_file.write_text(json.dumps({**json.loads(accepted_file.read_text()), **change}))
        pytester.runpytest_inprocess("-q").stdout.fnmatch_lines([words])
        pytester.runpytest_inprocess("-q", "--update-baselines")
    accepted_file.write_text("[]")
    pytester.runpytest_inprocess("-q").stdout.fnmatch_lines(
        ["*holds no accepted values of a kernel*"]
    )


# What cannot be used -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((X, W), {"like": 5}, "like is 5; give a function"),
        ((X, W), {"dtype": "bfloat16"}, "dtype is 'bfloat16'; give a torch.dtype"),
        ((X, W), {"device": "gpu"}, "device 'gpu' cannot be used: "),
        ((X, W), {"device": "meta"}, "device 'meta' has no values to check"),
        ((X, W), {"budget_s": -1}, "budget_s -1 is not allowed"),
        ((X, W), {"shapes": [(7, 64)]}, "shapes has (7, 64); give for each further input"),
        ((X, W), {"inputs": {2: "mxfp8"}}, "inputs names argument 2; floating-point tensors stand at: 0, 1"),
        ((X, W), {"inputs": {0: "mxfp9"}}, "argument 0: unknown format 'mxfp9'"),
        ((X, W), {"inputs": {0: 8}}, "argument 0 is declared as 8; allowed are"),
        ((X, W), {"output": "int9"}, "output: unknown format 'int9'"),
        ((X, W), {"pack": {0: 3}}, "pack={0: 3} is no function"),
        ((X, W), {"relations": ["ood"]}, "unknown relation 'ood'. Did you mean odd"),
        ((X, W), {"arithmetic": "fp16"}, "unknown arithmetic 'fp16'. Did you mean float16 or bfloat16"),
        ((X, W), {"shapes": [((3, 64),)]}, "give one shape for each of the 2 tensors"),
        ((X, W), {"like": torch.relu}, "cannot be called with the 2 arguments given"),
        ((X, W * 0), {}, "gives 0 everywhere for the example"),
        (([X, W],), {}, "stand at: none. Give arguments one by one, not as a list: check_kernel("),
        (([X, W],), {"inputs": None}, "Give arguments one by one, not as a list: check_kernel("),
        ((X[:0], W), {}, "gives an empty result for the example"),
        ((X * torch.nan, W), {}, "gives NaN or Inf for the example"),
        ((X, W), {"convention": "amax"}, "argument 0 has no convention 'amax'; there are 'scale rule"),
        ((qgate.encode(X, "mxfp8"), W), {}, "argument 0 is encoded as mxfp8_e4m3 already"),
        ((X, W), {"like": lambda x, w: (x, w)}, "the reference function returned a tuple of 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_a_value_error(
    arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_kernel(right, *arguments, **{"like": linear, "inputs": MX, **options})


def test_what_the_kernel_raises_at_the_example_is_its_failure() -> None:
    def kernel(_x: Tensor, _w: Tensor) -> Tensor:
        raise ZeroDivisionError("no tiles")

    words = "kernel raised ZeroDivisionError for the example: no tiles"
    with pytest.raises(CheckFailure, match=f"^{words}$") as failure:
        check_kernel(kernel, X, W, like=linear, inputs=MX)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_test_is_no_refusal(end: type[BaseException]) -> None:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        if len(x) != len(X):
            raise end
        return right(x, w)

    with pytest.raises(end):
        check_kernel(kernel, X, W, like=linear, inputs=MX)


def test_a_kernel_that_refuses_all_but_the_example_is_named_in_the_report() -> None:
    def kernel(x: Tensor) -> Tensor:
        if x.shape != X.shape:
            raise IndexError("another length")
        return qgate.quantize(x, "mxfp8")

    options: dict[str, Any] = {"like": lambda x: x, "output": "mxfp8"}
    report = check_kernel(kernel, X, relations=["odd", "batch"], **options)
    refused = len(report.left_out)
    assert report.notes == [
        f"only the example was checked: kernel refused all {refused} derived inputs"
    ]
    assert report.notes[0] in str(report).splitlines()[1]
    assert not check_kernel(kernel, X, relations=["odd", "transposed"], **options).notes


def test_the_plugin_loads_no_torch_for_these_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_light(): assert 'torch' not in sys.modules")
    assert pytester.runpytest_subprocess("-q").ret == 0


def test_attention_over_a_quantized_cache() -> None:
    fmt = qgate.Quantizer("fp8_e4m3", granularity="tensor")
    q, k, v = (torch.randn(1, 2, 12, 16, generator=GENERATOR) for _ in range(3))
    report = check_kernel(
        lambda q, k, v: scaled_dot_product_attention(q, fmt(k), fmt(v)),
        q, k, v, like=scaled_dot_product_attention, inputs={1: fmt, 2: fmt},
        relations=[relation for relation in RELATIONS if relation != "nan"],
    )  # fmt: skip
    assert any("dimension 2 of argument 1, dimension 2 of argument 2" in n for n in report.held)


# Batch invariance --------------------------------------------------------------------------------


def _by_row(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, None, :] * w).sum(-1)


def test_rows_of_the_same_bits_are_batch_invariant() -> None:
    x, w = torch.randn(12, 64), torch.randn(7, 64)
    report = check_kernel(_by_row, x, w, like=linear, invariant=True)
    assert any("in another order" in name for name in report.held)


def test_invariance_is_not_asked_of_the_other_arguments() -> None:
    def odd_columns(x: Tensor, w: Tensor) -> Tensor:
        rows = _by_row(x, w)
        return rows if len(w) == 7 else rows * (1 + 1e-7)

    x, w = torch.randn(12, 64), torch.randn(7, 64)
    check_kernel(odd_columns, x, w, like=linear, invariant=True)


def test_invariance_is_not_asked_of_channels_that_depend_on_each_other() -> None:
    """A norm of fewer channels has other values, whatever its bits are."""

    def norm(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def rounded_when_alone(x: Tensor) -> Tensor:
        y = norm(x)
        return y * (1 + 2.0**-23) if len(x) == 1 else y

    x = torch.randn(12, 64)
    report = check_kernel(norm, x, like=norm, relations=["one", "prefix"], invariant=True)
    assert any("dimension 1 of argument 0" in name for name in report.held)
    with pytest.raises(CheckFailure, match=r"not batch-invariant.*first of 12 along dimension 0"):
        check_kernel(rounded_when_alone, x, like=norm, relations=["one"], invariant=True)


def test_invariance_without_rows_to_compare_is_refused() -> None:
    x, w = torch.randn(12, 64), torch.randn(7, 64)
    with pytest.raises(ValueError, match="invariant=True has nothing to compare"):
        check_kernel(_by_row, x, w, like=linear, invariant=True, relations=["large"])
    with pytest.raises(ValueError, match="'mse' has none of"):
        check_kernel(
            linear, x, w, like=linear, inputs={1: "int8"}, convention="mse", invariant=True
        )


def test_what_cannot_be_encoded_is_left_out() -> None:
    def pack(x: Tensor) -> Tensor:
        if len(x) % 2:
            raise qgate.errors.QgateError("an even number of rows")
        return x

    report = check_kernel(linear, X, W, like=linear, pack={0: pack}, relations=["odd"])
    reason = report.left_out["3 of 24 along dimension 0 of argument 0"]
    assert reason == "the kernel refused: QgateError: an even number of rows"
