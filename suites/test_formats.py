"""Conformance: what qgate computes here is, bit for bit, what the formats mean.

The fast code depends on the machine and on torch's kernels; the readable definition in numpy does
not. Before anybody trusts the error of a quantized model, the two have to agree on this machine.
"""

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import definition

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def ordinary(rng):
    """Activations: normal, a few channels much larger, rows that end in the middle of a block."""
    x = rng.standard_normal((64, 104))
    x[:, ::40] *= 60
    return x


def wide(rng):
    """Every magnitude there is, zeros, powers of two and their lower neighbors."""
    x = rng.standard_normal((64, 104)) * np.exp2(rng.integers(-140, 120, (64, 1)))
    x *= np.exp2(rng.integers(-12, 1, x.shape))
    x[1::7] = np.sign(x[1::7]) * np.exp2(np.rint(np.log2(np.abs(x[1::7]))))
    x[2::7] = np.nextafter(x[1::7][: len(x[2::7])].astype(np.float32), np.float32(0))
    x[3::7, 40:80] = 0.0
    return np.clip(x, -3e38, 3e38)


def special(rng):
    """NaN and both infinities among ordinary numbers."""
    x = ordinary(rng)
    x[4, 5], x[5, 60], x[6, 70] = np.nan, np.inf, -np.inf
    return x


def differences(actual, expected):
    """A line when bits differ, signs of zero included; one NaN is as good as another."""
    bits = {2: torch.int16, 4: torch.int32}[actual.dtype.itemsize]
    differ = (actual.view(bits) != expected.view(bits)) & ~(actual.isnan() & expected.isnan())
    if not differ.any():
        return ""
    where = tuple(differ.nonzero()[0].tolist())
    return (
        f"{int(differ.sum())} of {differ.numel()} differ, "
        f"first at {where}: {actual[where].item()!r} instead of {expected[where].item()!r}"
    )


def expected_of(x, quantizer):
    """The definition's values, cast once: through float32 only where that is exact."""
    exact = definition.quantize(x.to(torch.float64).numpy(), quantizer)
    if x.dtype == torch.float32:
        return torch.from_numpy(exact).to(torch.float32)
    name = "fp16" if x.dtype == torch.float16 else "bf16"
    narrow = definition.round_by_list(exact, qgate.formats.get(name), saturate=False)
    return torch.from_numpy(narrow).to(torch.float32).to(x.dtype)


@pytest.fixture(params=[ordinary, wide, special], ids=lambda make: make.__name__)
def numbers(request):
    return torch.from_numpy(request.param(np.random.default_rng(0)))


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def test_format_means_what_its_definition_says(fmt, numbers, dtype, device):
    quantizer = qgate.Quantizer(fmt)
    x = numbers.to(dtype)
    assert differences(quantizer(x.to(device)).cpu(), expected_of(x, quantizer)) == ""


def test_encoded_tensor_decodes_to_the_quantized_one(fmt, numbers, dtype, device):
    quantizer = qgate.Quantizer(fmt)
    x = numbers.to(device, dtype)
    if quantizer.format.kind == "element" and quantizer.format.nan_code is None:
        x = x.masked_fill(x.isnan(), 0.0)
    assert differences(quantizer.encode(x).decode(), quantizer(x)) == ""


def test_canary_a_quantizer_that_truncates_is_rejected(fmt):
    x = torch.from_numpy(ordinary(np.random.default_rng(2))).float()
    broken = qgate.Quantizer(fmt, rounding="zero")
    assert differences(broken(x), expected_of(x, qgate.Quantizer(fmt))) != ""
