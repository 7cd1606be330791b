"""Check that qgate quantizes on this machine, bit for bit, as the formats are defined.

The fast code depends on the machine and on torch's kernels; the readable definition in numpy does
not. Before anybody trusts the error of a quantized model, the two have to agree on this machine:
for every format, dtype, layout and option on small tensors, and on tensors so large that tables
and chunks come into use.
"""

import functools
import math

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import definition
from qgate.kernel_checks.torch_casts import torch_casts

pytestmark = pytest.mark.qgate_used_formats
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY_DTYPE = [*DTYPES, torch.float64]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SCALINGS = [
    {},
    {"scale": 0.3183},
    {"scale": 2.0**-130},
    {"granularity": "tensor"},
    {"granularity": "channel", "axis": -1},
    {"granularity": "block", "axis": -1, "block": 32},
    {"granularity": "block", "block": (4, 32)},
    {"scale": 0.3183, "zero_point": 1},
]
OPTIONS = [
    {},
    *({"rounding": rounding} for rounding in ("even", "away", "zero")),
    *({"scale_rule": rule} for rule in ("ceil", "even", "rceil")),
    {"scale_bits": 5},
    {"block": 24},
    {"saturate": False},
    {"saturate": False, "rounding": "zero"},
    {"inf": "saturate"},
    {"narrow": False},
    {"zero_point": "minmax"},
    *({"dtype": dtype} for dtype in EVERY_DTYPE),
]
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
ROUGH = {"inf", "saturate", "scale_bits"}
"""Options that change nothing of numbers of one magnitude."""


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


def every_number(dtype):
    """Every number of a 16-bit dtype, NaN and infinities too."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@functools.cache
def shuffled_numbers(dtype):
    """Every number of a 16-bit dtype between 2^-20 and 4, in any order."""
    size = every_number(dtype).abs()
    numbers = every_number(dtype)[(size >= 2.0**-20) & (size < 4)]
    return np.random.default_rng(3).permutation(numbers.double().numpy())


@functools.cache
def one_magnitude(dtype, rows, columns):
    """A row of zeros, and numbers between 2^-20 and 4: all of a 16-bit dtype, so every tie."""
    numbers = shuffled_numbers(dtype if dtype.itemsize == 2 else torch.float16)
    x, rng = np.resize(numbers, (rows, columns)), np.random.default_rng(3)
    if dtype == torch.float32:
        x[::2] *= 1 + rng.integers(-3, 4, x[::2].shape) * 2.0**-23
    elif dtype == torch.float64:
        x *= 1 + rng.standard_normal(x.shape) * 2.0**-30
    x[1] = 0
    return torch.from_numpy(x).to(dtype)


def differences(actual, expected):
    """A line when bits differ, signs of zero included; one NaN is as good as another."""
    bits = INTEGERS[actual.dtype.itemsize]
    if torch.equal(actual.view(bits), expected.view(bits)):
        return ""
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
    is_double = x.dtype == torch.float64
    exact = definition.quantize(x.to(torch.float64).numpy(), quantizer, double=is_double)
    dtype = quantizer.dtype or x.dtype
    if dtype.itemsize == 2:
        name = "fp16" if dtype == torch.float16 else "bf16"
        exact = definition.round_by_list(exact, qgate.formats.get(name), saturate=False)
        return torch.from_numpy(exact).to(torch.float32).to(dtype)
    return torch.from_numpy(exact).to(dtype)


@pytest.fixture(params=[ordinary, wide, special], ids=lambda make: make.__name__, scope="module")
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


def test_rotated_format_means_what_its_definition_says(fmt, dtype, device):
    quantizer = qgate.Quantizer(fmt, rotation=SIGNS)
    x = one_magnitude(dtype, 15, 64)
    assert differences(quantizer(x.to(device)).cpu(), expected_of(x, quantizer)) == ""
    assert differences(quantizer.encode(x).decode(), quantizer(x)) == ""


def layouts(x):
    """The same numbers in other shapes, and the axis that scales are made along or across."""
    return {
        "last axis": (x.view(3, 5, 70), -1),
        "every third column": (x.view(5, 210)[:, 1::3], 1),
        "one row many times": (x[:70].expand(3, 70), -1),
        "rows of 35": (x.view(30, 35), 1),
        "first axis": (x.view(70, 3, 5), 0),
        "middle axis": (x.view(3, 70, 5), 1),
        "transposed": (x.view(15, 70).T, 0),
        "one dimension": (x[:70], 0),
        "one number": (x[3], -1),
        "no number": (x[:0].view(3, 0), 1),
    }


FLAT = ("one dimension", "one number")


def rough(x):
    """Numbers with rows that leave the fast ways: large, zero, not finite."""
    x = x.clone()
    x[1] *= 2.0**14
    x[2] = 0
    x[6] *= 2.0**-135
    x[3, 5], x[4, 40], x[4, 41], x[5, 69] = math.nan, math.inf, 4, -math.inf
    return x


def accepted(fmt, options):
    """Options that the format takes, one with another."""
    quantizers = []
    for each in options:
        try:
            quantizers.append(qgate.Quantizer(fmt, **each))
        except qgate.QgateError:
            continue
    return quantizers


def cases_of(fmt):
    """Every scaling along an axis in every layout, the others in some; options take turns.

    Tiles need two dimensions.
    """
    names = list(layouts(torch.zeros(1050)))
    turn = 0
    while turn < 28:
        for scaling in accepted(fmt, SCALINGS):
            options = [{**scaling.options, **option} for option in OPTIONS]
            quantizers = accepted(fmt, options)
            # The definition cuts float64 numbers exactly where their scales are powers of two.
            exact = [quantizer for quantizer in quantizers if quantizer.rounding != "zero"]
            for _ in range(10 if scaling.granularity in ("channel", "block") else 4):
                dtype = EVERY_DTYPE[(turn + turn // 10) % 4]
                listed = exact if dtype == torch.float64 else quantizers
                quantizer = listed[(turn + turn // 4) % len(listed)]
                if quantizer.tile is None or names[turn % 10] not in FLAT:
                    yield names[turn % 10], dtype, quantizer
                turn += 1


def test_layouts_and_options_mean_what_the_definition_says(fmt, device):
    numbers = {}
    for dtype in EVERY_DTYPE:
        x = one_magnitude(dtype, 15, 70)
        numbers[dtype] = [layouts(x.view(-1)), layouts(rough(x).view(-1))]
    wrong = []
    for count, (name, dtype, quantizer) in enumerate(cases_of(fmt)):
        is_rough = count % 3 == 2 or not ROUGH.isdisjoint(quantizer.options)
        x, axis = numbers[dtype][is_rough][name]
        if quantizer.granularity in ("channel", "block") and quantizer.tile is None:
            quantizer = qgate.Quantizer(fmt, **{**quantizer.options, "axis": axis})
        differentiable = x.to(device).detach().requires_grad_(count % 12 == 0)
        line = differences(quantizer(differentiable).detach().cpu(), expected_of(x, quantizer))
        wrong += [f"{quantizer}, {name} of {dtype}: {line}"] if line else []
    assert wrong == []


@pytest.mark.qgate_formats("fp8_e4m3", "hif8", "int8", "mxfp8_e4m3", "nvfp4")
def test_large_tensors_mean_what_the_definition_says(fmt, dtype, device):
    """Tables and chunks: the rows or columns of a small tensor again and again."""
    for size, x, options in large_cases(fmt, dtype):
        quantizer = qgate.Quantizer(fmt, **options)
        expected = expected_of(x, quantizer)
        tiles = [1, 1]
        tiles[quantizer.axis == 0] = -(-size // x.numel())
        actual = quantizer(x.to(device).repeat(tiles)).cpu()
        assert differences(actual, expected.repeat(tiles)) == "", str(quantizer)


def large_cases(name, dtype):
    """Sizes from which a format has a table, or more than one chunk."""
    fmt, is_single = qgate.formats.get(name), dtype == torch.float32
    x, whole = one_magnitude(dtype, 38, 1030), one_magnitude(dtype, 38, 1024)
    if fmt.kind == "block":
        yield 2**20, x, {"axis": 0 if is_single else -1}
        yield 2**20, whole, {}
        return
    every = x if is_single else every_number(dtype).view(64, 1024)
    if not (is_single or fmt.always_scaled):
        yield 2**14, every, {}
    every = every.where(every.abs() < 4, 1.5)
    yield 2**18 if is_single else 2**19, every, {"granularity": "tensor"}
    groups = {
        torch.float32: {"granularity": "channel", "axis": 0},
        torch.bfloat16: {"granularity": "channel", "axis": 1},
        torch.float16: {"granularity": "block", "axis": 0},
    }
    if not fmt.tapered:
        yield 2**17, x, groups[dtype]


def test_torch_casts_by_a_named_convention(request, device, record_property, capsys):
    """Tell what torch's own casts to 8 bits do here: versions and devices differ beyond 448.

    JUnit's properties have it, and the terminal with -v.
    """
    sources, problems = {}, []
    for cast in torch_casts(device):
        source, target = (str(dtype).removeprefix("torch.") for dtype in (cast.source, cast.target))
        sources.setdefault((target, cast.convention), []).append(source)
        problems += [f"{source} to {target}: {cast.problem}"] if not cast.convention else []
    assert problems == []
    lines = []
    for (target, convention), names in sources.items():
        which = "" if len(names) == 3 else f" from {', '.join(names)}"
        record_property(f"torch {torch.__version__}: {target}{which} on {device}", convention)
        lines.append(f"torch's cast to {target}{which} on {device}: {convention}")
    if request.config.get_verbosity() > 0:
        with capsys.disabled():
            print("", *lines, sep="\n")
