"""Options, bad input, gradients, counts, codes: what a user touches beside the values."""

from __future__ import annotations

import copy
import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import qgate
from qgate import formats
from qgate.formats import FORMATS, definition
from tests.shares import proof
from tests.warm import run_python

ALL = FORMATS.names()
X = torch.tensor([[0.1, -0.6, 3.0, 100.0], [1.0, -2.0, 0.0, -0.0]])


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (qgate.QgateError, {"fmt": "mxfp9"}, ["'mxfp9'", "mxfp8", "nvfp4"]),
        (qgate.QgateError, {"fmt": "mxfp4", "scale_rule": "flor"}, ["'flor'", "floor", "rceil"]),
        (qgate.QgateError, {"fmt": "int8", "granularity": "chanel"}, ["'chanel'", "channel"]),
        (qgate.QgateError, {"fmt": "int8", "rounding": "nearest"}, ["'nearest'", "even", "away"]),
        (qgate.QgateError, {"fmt": "mxfp4", "inf": "keep"}, ["'keep'", "saturate"]),
        (qgate.QgateError, {"fmt": "mxfp4", "axis": 2}, ["axis 2", "2 dimensions"]),
        (qgate.QgateError, {"fmt": "mxfp4", "axis": -3}, ["axis -3", "2 dimensions"]),
        (qgate.QgateError, {"fmt": "mxfp4", "block": 0}, ["block 0", "at least 1"]),
        (qgate.QgateError, {"fmt": "mxfp4", "block": -4}, ["block -4", "at least 1"]),
        (TypeError, {"fmt": "mxfp4", "block": 2.5}, ["block", "2.5"]),
        (TypeError, {"fmt": "mxfp4", "block": True}, ["block", "True"]),
        (qgate.QgateError, {"fmt": "mxfp4", "scale_bits": 9}, ["scale_bits 9", "from 2 to 8"]),
        (qgate.QgateError, {"fmt": "mxfp4", "scale_bits": -5}, ["scale_bits -5", "from 2 to 8"]),
        (qgate.QgateError, {"fmt": "int8", "scale": 0.0}, ["0.0", "above zero"]),
        (qgate.QgateError, {"fmt": "int8", "scale": -1.0}, ["-1.0", "above zero"]),
        (qgate.QgateError, {"fmt": "int8", "scale": math.inf}, ["inf", "finite"]),
        (qgate.QgateError, {"fmt": "int8", "scale": math.nan}, ["nan", "finite"]),
        (TypeError, {"fmt": "int8", "scale": "1"}, ["scale", "'1'"]),
        (qgate.QgateError, {"fmt": "int8", "scale": torch.tensor([1.0, 0.0]), "granularity": "channel", "axis": 0}, ["0.0"]),
        (qgate.QgateError, {"fmt": "int8", "scale": torch.ones(3), "granularity": "channel", "axis": 0}, ["(3,)", "(2,)"]),
        (qgate.QgateError, {"fmt": "int8", "scale": torch.ones(2)}, ["(2,)", "granularity 'tensor'"]),
        (TypeError, {"fmt": "int8", "scale": torch.tensor(1)}, ["torch.int64"]),
        (qgate.QgateError, {"fmt": "int8", "granularity": "channel"}, ["axis"]),
        (qgate.QgateError, {"fmt": "fp8_e4m3", "axis": 0}, ["axis=0", "granularity"]),
        (qgate.QgateError, {"fmt": "fp8_e4m3", "block": 16}, ["block=16", "granularity"]),
        (qgate.QgateError, {"fmt": "fp8_e4m3", "inf": "saturate"}, ["inf='saturate'"]),
        (qgate.QgateError, {"fmt": "mxfp4", "scale": 1.0}, ["mxfp4_e2m1", "'scale'", "scale_rule"]),
        (qgate.QgateError, {"fmt": "hif4", "block": 32}, ["hif4", "'block'"]),
        (qgate.QgateError, {"fmt": "nvfp4", "scale_rule": "floor"}, ["nvfp4", "'scale_rule'"]),
        (qgate.QgateError, {"fmt": "mxfp8", "saturate": False}, ["mxfp8_e4m3", "'saturate'"]),
        (qgate.QgateError, {"fmt": "fp4_e2m1", "saturate": False}, ["fp4_e2m1", "always saturates"]),
        (qgate.QgateError, {"fmt": "hif8", "narrow": False}, ["hif8", "'narrow'"]),
        (qgate.QgateError, {"fmt": "uint4", "narrow": False}, ["uint4", "narrow=False", "Leave"]),
        (TypeError, {"fmt": "hif8", "saturate": 1}, ["saturate", "1"]),
        (qgate.QgateError, {"fmt": "int8", "generator": torch.Generator()}, ["generator", "'even'"]),
        (TypeError, {"fmt": "int8", "dtype": torch.int8}, ["torch.int8", "float32"]),
        (TypeError, {"fmt": 8}, ["8"]),
    ],
)  # fmt: skip
def test_bad_options_get_one_line(
    error: type[Exception], options: dict[str, object], words: list[str]
) -> None:
    fmt = options.pop("fmt")
    before = X.clone()
    for use in (qgate.quantize, qgate.encode, qgate.formats.report):
        with pytest.raises(error) as caught:
            use(X, fmt, **options)
        text = str(caught.value)
        assert "\n" not in text
        for word in words:
            assert word in text
    assert torch.equal(X, before)


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([1, 2]),
        torch.tensor([True]),
        torch.tensor([1j]),
        torch.zeros(2).to(torch.float8_e4m3fn),
        torch.zeros(2, 2).to_sparse(),
        np.zeros(3),
        [1.0, 2.0],
        None,
    ],
    ids=lambda x: str(getattr(x, "dtype", type(x).__name__)),
)
@pytest.mark.parametrize("name", ["mxfp8", "int8", "hif8"])
def test_what_is_not_a_float_tensor_is_refused(name: str, x: object) -> None:
    for use in (qgate.quantize, qgate.encode, qgate.formats.report):
        with pytest.raises(TypeError, match=r"^(cannot quantize|qgate quantizes)[^\n]*$"):
            use(x, name)


def test_a_settled_quantizer_takes_no_more_options() -> None:
    q = qgate.Quantizer("mxfp4", block=16)
    assert repr(q) == "Quantizer(mxfp4_e2m1, block=16)"
    with pytest.raises(qgate.QgateError, match="has its options already"):
        qgate.quantize(X, q, axis=0)


def test_a_generator_of_another_device_is_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(qgate.QgateError, match="generator is on cpu and x on meta"):
        qgate.quantize(
            torch.empty(3, device="meta"), "int8", rounding="stochastic", generator=generator
        )


def test_names_are_found_in_any_case_and_by_alias() -> None:
    for alias, name in {
        "mxfp8": "mxfp8_e4m3",
        "MXFP4": "mxfp4_e2m1",
        "hifp8": "hif8",
        "HiFloat8": "hif8",
        "e4m3": "fp8_e4m3",
        "E5M2": "fp8_e5m2",
        "MXFP6-E3M2": "mxfp6_e3m2",
    }.items():
        assert qgate.formats.get(alias).name == name


# --- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "int4"])
def test_encode_asks_what_to_do_with_nan_where_there_is_none(name: str) -> None:
    x = torch.tensor([1.0, math.nan, -2.0])
    with pytest.raises(qgate.QgateError, match=f"{name} has no NaN and x has 1"):
        qgate.encode(x, name)
    plain = qgate.encode(x, name, nan="zero").decode()
    assert plain[1] == 0
    largest = qgate.encode(x, name, nan="max")
    assert torch.equal(largest.decode()[[0, 2]], plain[[0, 2]])
    assert largest.decode()[1] == largest.decode().max() > 0
    with pytest.raises(qgate.QgateError, match="'drop'"):
        qgate.encode(x, name, nan="drop")


@pytest.mark.parametrize("name", ALL)
def test_codes_have_the_promised_dtypes(name: str) -> None:
    encoded = qgate.encode(X, name)
    code_dtypes = dict.fromkeys(("int8", "int4", "int2", "mxint8"), torch.int8)
    code_dtypes |= {"fp16": torch.uint16, "bf16": torch.uint16}
    assert encoded.codes.dtype == code_dtypes.get(name, torch.uint8)
    assert encoded.codes.shape == X.shape
    fmt = qgate.formats.get(name)
    if fmt.kind == "block":
        assert encoded.scales.dtype == getattr(torch, fmt.stored_dtype)
        assert encoded.scales.shape == (2, 1)
    assert name in repr(encoded)


def test_decode_to_another_dtype_rounds_once() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    encoded = qgate.encode(x, "int8", granularity="channel", axis=0)
    exact = encoded.decode(torch.float64)
    bf16 = qgate.formats.get("bf16")
    rounded = definition.round_by_list(exact.numpy(), bf16, saturate=False)
    assert torch.equal(encoded.decode().double(), torch.from_numpy(rounded))
    assert torch.equal(encoded.decode(torch.float32), exact.float())


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_passes_straight_through(name: str) -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).requires_grad_()
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    y = qgate.quantize(x, name)
    assert torch.equal(y, qgate.quantize(x.detach(), name))
    (grad,) = torch.autograd.grad((y * weight).sum(), x)
    saturated = qgate.formats.report(x, name).saturated
    assert int((grad != weight).sum()) == saturated
    (grad,) = torch.autograd.grad(
        (qgate.quantize(x, name, saturated_grad="pass") * weight).sum(), x
    )
    assert torch.equal(grad, weight)


def test_the_gradient_is_zero_exactly_where_x_saturated() -> None:
    x = torch.tensor(
        [447.0, 448.0, 464.0, 464.1, -1e9, math.inf, math.nan, 1.0], requires_grad=True
    )
    qgate.quantize(x, "e4m3").backward(torch.ones(8))
    assert x.grad.tolist() == [1, 1, 1, 0, 0, 0, 1, 1]
    x = torch.tensor([-128.0, -127.0, 127.5], requires_grad=True)
    qgate.quantize(x, "int8", scale=1.0).backward(torch.ones(3))
    assert x.grad.tolist() == [0, 1, 0]


def test_the_gradient_has_the_dtype_of_x() -> None:
    x = torch.randn(4, 32).bfloat16().requires_grad_()
    qgate.quantize(x, "mxfp4", dtype=torch.float32).sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_parameters_in_no_grad_and_modules_work() -> None:
    layer = torch.nn.Linear(32, 4)
    with torch.no_grad():
        assert not qgate.quantize(layer.weight, "mxfp4").requires_grad
    out = torch.nn.functional.linear(torch.ones(1, 32), qgate.quantize(layer.weight, "mxfp8"))
    out.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


# --- counts --------------------------------------------------------------------------------------


def test_report_counts_what_happens_per_tensor_and_per_block() -> None:
    x = torch.zeros(2, 64)
    x[0, :4] = torch.tensor([7.9, 1.0, 0.3, 0.01])  # shared exponent 0: max 6, subnormal 0.5
    x[0, 32:35] = torch.tensor([4.0, 0.26, -0.2])
    x[1, 0] = math.nan
    x[1, 1] = 1.0
    x[1, 33] = math.inf
    effects = qgate.formats.report(x, "mxfp4")
    counts = effects.to_dict()
    assert counts.pop("saturated_error_share") == pytest.approx(
        1.9**2 / (1.9**2 + 0.2**2 + 0.01**2 + 0.24**2 + 0.2**2)
    )
    assert counts == {
        "format": "mxfp4_e2m1",
        "elements": 128,
        "finite": 126,
        "zeros": 118,
        "nonzero": 8,
        "saturated": 1,
        "upper": 1,
        "lower": 0,
        "underflow": 4,
        "flushed": 2,
        "subnormal": 2,
        "nan": 1,
        "inf": 1,
        "posinf": 1,
        "neginf": 0,
        "poisoned": 62,
        "beyond_range": None,
    }
    assert effects.blocks["saturated"].tolist() == [[1, 0], [0, 0]]
    assert effects.blocks["flushed"].tolist() == [[1, 1], [0, 0]]
    assert effects.blocks["subnormal"].tolist() == [[1, 1], [0, 0]]
    assert effects.blocks["poisoned"].tolist() == [[0, 0], [31, 31]]
    assert effects.share("flushed") == 2 / 126
    assert "flushed" in str(effects)


@pytest.mark.parametrize("name", ALL)
def test_report_agrees_with_what_quantize_does(name: str) -> None:
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(4))
    x *= torch.exp(3 * torch.randn(40, 70, generator=torch.Generator().manual_seed(5)))
    effects = qgate.formats.report(x, name)
    y = qgate.quantize(x, name, dtype=torch.float64)
    assert effects.flushed == int(((y == 0) & (x != 0)).sum())
    assert effects.elements == x.numel()
    for kind, rows in effects.blocks.items():
        assert int(rows.sum()) == getattr(effects, kind)


def test_report_of_a_plain_cast_at_scale_one() -> None:
    effects = qgate.formats.report(torch.tensor([1e6, 2.0**-10, 2.0**-9, 2.0**-7, 0.0]), "e4m3")
    assert (effects.saturated, effects.flushed, effects.subnormal) == (1, 1, 2)
    assert effects.blocks["saturated"].shape == ()


# --- machines that flush subnormal numbers -------------------------------------------------------

_FLUSH = """
import sys
from pathlib import Path
from types import FrameType
import numpy as np
import torch
import qgate

def inputs():
    bits = torch.arange(2**16, dtype=torch.int32)
    half = bits.to(torch.int16)
    rng = np.random.default_rng(0)
    rows = rng.integers(-2**31, 2**31, (512, 64), dtype=np.int64).astype(np.int32)
    rows[::4] &= np.int32(-2139095041)  # subnormal rows
    rows[1::4] = (rows[1::4] & np.int32(-2122317825)) | (1 << 23)
    single = torch.from_numpy(rows).view(torch.float32)
    finite = single.masked_fill(~single.isfinite(), 1.0)
    return [half.view(torch.bfloat16), half.view(torch.float16), single, finite, finite[::4],
            half.view(torch.bfloat16).repeat(20)]

def results():
    out = []
    for x in inputs():
        for name in qgate.formats.names():
            q = qgate.Quantizer(name)
            found = [q(x)]
            if x.numel() <= 2**16:
                encoded = q.encode(x.masked_fill(x.isnan(), 0.0))
                found += [encoded.decode(), encoded.codes]
            for y in found:
                out.append(y.contiguous().view(torch.uint8).clone())
                if y.is_floating_point():
                    bits = y.view({2: torch.int16, 4: torch.int32}[y.dtype.itemsize]).clone()
                    infinity = {torch.float32: 0x7F800000, torch.float16: 0x7C00,
                                torch.bfloat16: 0x7F80}[y.dtype]
                    magnitude = bits & torch.iinfo(bits.dtype).max
                    out[-1] = bits.masked_fill(magnitude > infinity, 1)
    return out

plain = results()
if not torch.set_flush_denormal(True):
    sys.exit(3)
tiny = torch.tensor(1e-40)
assert (tiny * 1).item() == 0, "not flushing"
flushed = results()
assert sum(not torch.equal(a, b) for a, b in zip(plain, flushed)) == 0
print(len(plain))
"""


@proof
def test_flushing_subnormal_numbers_changes_no_bit() -> None:
    """In a process of its own: the setting belongs to the thread and would leak."""
    run = run_python("-c", _FLUSH, cwd=Path.cwd(), environment=os.environ)
    assert run.returncode in (0, 3), run.stderr
    if run.returncode == 0:
        assert int(run.stdout) == (5 * 3 + 1) * len(ALL)
    else:
        assert not torch.set_flush_denormal(True)  # this processor cannot flush


# --- calls without options -----------------------------------------------------------------------


def test_a_name_that_is_registered_anew_means_the_new_format() -> None:
    FORMATS.add(formats.IntFormat("mine", 8), "ours")
    try:
        eight = qgate.quantize(X, "ours")
        FORMATS.remove("mine")
        FORMATS.add(formats.IntFormat("mine", 4), "ours")
        assert torch.equal(qgate.quantize(X, "ours"), qgate.quantize(X, "int4"))
        assert torch.equal(eight, qgate.quantize(X, "int8"))
    finally:
        FORMATS.remove("mine")


@pytest.mark.parametrize("shape", [(16, 64), (1024, 1024)])
def test_quantizing_crosses_few_files(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    root, crossed = Path(qgate.__file__).parent, set()
    qgate.quantize(x, "mxfp8")

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root):
            crossed.add(path.relative_to(root))

    sys.setprofile(note)
    try:
        qgate.quantize(x, "mxfp8")
    finally:
        sys.setprofile(None)
    assert 0 < len(crossed) <= 6, sorted(crossed)


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
@pytest.mark.parametrize("name", [*qgate.formats.names(), "binary8p3se"])
def test_codes_travel_between_processes(name: str, copied: Callable[[Any], Any]) -> None:
    encoded = qgate.encode(torch.linspace(-3, 4, 64).reshape(2, 32), name)
    received = copied(encoded)
    assert (received.codes.dtype, received.dtype) == (encoded.codes.dtype, encoded.dtype)
    assert torch.equal(received.decode(), encoded.decode())
