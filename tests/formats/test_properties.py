"""Properties of every format and every tensor, with Hypothesis in search of an exception."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import qgate
from qgate.formats import FORMATS, BlockFormat, IntFormat, definition
from qgate.formats.mx import MxFormat
from tests.shares import share

ALL = FORMATS.names()
ELEMENTS = [f.name for f in FORMATS if f.kind == "element"]
MX = [f.name for f in FORMATS if isinstance(f, MxFormat)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Made anew from the result, the scale may differ: where an E4M3 scale is subnormal, or an E6M2 scale
# was rounded, the largest element need not land where it was, and then the others move too.
RECOMPUTES_ITS_SCALE = {"nvfp4", "hif4"}

floats32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60, allow_subnormal=False)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)


def arrays(elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, shapes, elements=elements)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def plain(name: str, **options: object) -> qgate.Quantizer:
    """The format with scales that do not depend on the tensor, where it has such."""
    if FORMATS.get(name).kind == "element":
        options["scale"] = 1.0
    return qgate.Quantizer(name, **options)


@share(12)
@pytest.mark.parametrize("name", ALL)
@given(x=arrays(floats32), dtype=st.sampled_from(DTYPES))
@settings(max_examples=30)
def test_shape_dtype_argument_and_decode(name: str, x: np.ndarray, dtype: torch.dtype) -> None:
    t = torch.from_numpy(x.copy()).to(dtype)
    before = t.clone()
    y = qgate.quantize(t, name)
    assert y.shape == t.shape
    assert y.dtype == t.dtype
    assert same(t, before)
    fmt = FORMATS.get(name)
    stores_nan = fmt.kind == "block" or fmt.nan_code is not None
    full = t if stores_nan else t.masked_fill(t.isnan(), 0.0)
    assert same(qgate.encode(t, name, nan="zero").decode(), qgate.quantize(full, name))
    assert same(t, before)


@share(6)
@pytest.mark.parametrize("rounding", ["even", "away", "zero"])
@pytest.mark.parametrize("name", ELEMENTS)
@given(x=arrays(finite32))
@settings(max_examples=20)
def test_element_formats_are_idempotent_odd_and_monotone(
    name: str, rounding: str, x: np.ndarray
) -> None:
    q = plain(name, rounding=rounding)
    t = torch.from_numpy(x.copy())
    y = q(t)
    assert torch.equal(q(y), y)
    if q.format.element.signed:
        assert torch.equal(q(-t), -y)
    order = t.flatten().argsort()
    assert (y.flatten()[order].diff() >= 0).all()


@share(6)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("name", MX)
@given(x=arrays(moderate), shift=st.integers(-40, 40))
@settings(max_examples=15)
def test_mx_formats_are_idempotent_and_equivariant_under_powers_of_two(
    name: str, rule: str, x: np.ndarray, shift: int
) -> None:
    t = torch.from_numpy(x.copy()).double()
    t = t.where(t.abs() > 2.0**-40, 0.0)
    q = qgate.Quantizer(name, scale_rule=rule)
    y = q(t)
    assert torch.equal(q(y), y)
    assert torch.equal(q(t * 2.0**shift), y * 2.0**shift)


@share(6)
@pytest.mark.parametrize("name", [n for n in ALL if n not in MX])
@given(x=arrays(moderate))
@settings(max_examples=20)
def test_idempotent_at_fixed_scales(name: str, x: np.ndarray) -> None:
    """Quantizing the result with the scales of the first time changes nothing."""
    t = torch.from_numpy(x.copy()).double()
    fmt = FORMATS.get(name)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    encoded = qgate.encode(t, name)
    y = encoded.decode(torch.float64)
    if isinstance(fmt, BlockFormat):
        codes = element.code_values()[encoded.codes.numpy()]
        requantized = qgate.quantize(torch.from_numpy(np.asarray(codes)), element)
        assert torch.equal(requantized, torch.from_numpy(np.asarray(codes)))
    elif encoded.scales is not None:
        fixed_scales = {"scale": encoded.scales.reshape(())}
        if encoded.zero_points is not None:
            fixed_scales["zero_point"] = encoded.zero_points.reshape(())
        requantized = qgate.quantize(y, name, **fixed_scales)
        assert torch.equal(requantized, y)
    else:
        assert torch.equal(qgate.quantize(y, name), y)


@pytest.mark.parametrize("name", sorted(RECOMPUTES_ITS_SCALE))
def test_the_exceptions_to_idempotence_are_real(name: str) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    x[::2] *= 2.0**-16
    y = qgate.quantize(x, name)
    assert not torch.equal(qgate.quantize(y, name), y)


@share(4)
@pytest.mark.parametrize("name", ALL)
@given(x=hnp.arrays(np.float32, (6, 10), elements=moderate))
@settings(max_examples=10)
def test_strides_do_not_matter(name: str, x: np.ndarray) -> None:
    t = torch.from_numpy(x.copy())
    expected = qgate.quantize(t, name)
    assert torch.equal(qgate.quantize(t.t().contiguous().t(), name), expected)
    wide = torch.zeros(6, 20)
    wide[:, ::2] = t
    assert torch.equal(qgate.quantize(wide[:, ::2], name), expected)
    assert torch.equal(qgate.quantize(t[None].expand(3, 6, 10)[1], name), expected)


@share(12)
@pytest.mark.parametrize("name", ALL)
def test_number_of_threads_does_not_matter(name: str) -> None:
    x = torch.randn(700, 1003, generator=torch.Generator().manual_seed(2)) * 3
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            generator = torch.Generator().manual_seed(3)
            random = qgate.quantize(x, name, rounding="stochastic", generator=generator)
            results.append((qgate.quantize(x, name), qgate.quantize(x.bfloat16(), name), random))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "hif8"])
def test_granularity_is_each_group_on_its_own(name: str, granularity: str, axis: int) -> None:
    x = torch.randn(3, 10, 7, generator=torch.Generator().manual_seed(4)) * 5
    options: dict[str, object] = {"granularity": granularity}
    if granularity != "tensor":
        options["axis"] = axis
    if granularity == "block":
        options["block"] = 4
    y = qgate.quantize(x, name, **options)
    fmt = FORMATS.get(name)
    moved = x.movedim(axis, 0) if granularity != "tensor" else x[None]
    if granularity == "block":
        groups = [
            part[:, i : i + 4]
            for part in x.movedim(axis, -1).reshape(-1, 1, x.shape[axis])
            for i in range(0, x.shape[axis], 4)
        ]
        results = [_alone(group, fmt) for group in groups]
        joined = torch.cat([r.flatten() for r in results])
        assert torch.equal(y.movedim(axis, -1).flatten(), joined)
    else:
        expected = torch.stack([_alone(part, fmt) for part in moved])
        actual = y.movedim(axis, 0) if granularity != "tensor" else y[None]
        assert torch.equal(actual, expected)
    encoded = qgate.encode(x, name, **options)
    assert torch.equal(encoded.decode(), y)
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // 4)
    scale_shape = {"tensor": [], "channel": [x.shape[axis]], "block": shape}[granularity]
    assert list(encoded.scales.shape) == scale_shape
    del options["granularity"]
    given_again = qgate.quantize(x, name, scale=encoded.scales, granularity=granularity, **options)
    assert torch.equal(given_again, y)


def _alone(x: torch.Tensor, fmt: object) -> torch.Tensor:
    """Numpy's words for it: scale = amax / max in float32, the quotient rounded, times the scale;
    HiF8 stays unscaled where that has no larger error."""
    values = x.double().numpy()
    scale = np.float64(np.float32(np.abs(values).max() / fmt.max))
    if isinstance(fmt, IntFormat):
        return torch.from_numpy(np.rint(values / scale) * scale).float()
    listed = np.concatenate([-fmt.magnitudes()[:0:-1], fmt.magnitudes()])

    def at(scale: float) -> np.ndarray:
        return listed[np.abs(values[..., None] / scale - listed).argmin(-1)] * scale

    quantized = at(scale)
    if fmt.name == "hif8" and ((at(1.0) - values) ** 2).sum() <= ((quantized - values) ** 2).sum():
        quantized = at(1.0)
    return torch.from_numpy(quantized).float()


@pytest.mark.parametrize("shape", [(), (3, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_the_definition_takes_one_number_and_none(name: str, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 3.0)
    options: list[dict[str, object]] = [{}]
    if name in ELEMENTS:
        options = [{"granularity": granularity, "axis": -1} for granularity in ("channel", "block")]
    for chosen in options:
        q = qgate.Quantizer(name, **chosen)
        expected = definition.quantize(x.double().numpy(), q)
        assert expected.shape == shape
        assert same(q(x), torch.from_numpy(expected).float())
