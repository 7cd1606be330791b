"""Conformance vectors beside ml_dtypes, gfloat, en_dtypes and torch, and casts that they refute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import en_dtypes
import gfloat
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gfloat import formats as gfloat_formats

from qgate.cli import main
from qgate.formats import FORMATS, get
from qgate.formats.vectors import conformance_vectors
from tests.shares import share

Values = npt.NDArray[Any]
OTHERS: dict[str, Any] = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp8_e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "hif8": en_dtypes.hifloat8,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
GFLOAT = {
    "fp8_e4m3": gfloat_formats.format_info_ocp_e4m3,
    "fp8_e5m2": gfloat_formats.format_info_ocp_e5m2,
    "fp6_e3m2": gfloat_formats.format_info_ocp_e3m2,
    "fp6_e2m3": gfloat_formats.format_info_ocp_e2m3,
    "fp4_e2m1": gfloat_formats.format_info_ocp_e2m1,
}
MX = {
    "mxfp8_e4m3": (ml_dtypes.float8_e4m3fn, 8),
    "mxfp8_e5m2": (ml_dtypes.float8_e5m2, 15),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 4),
    "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 2),
    "mxfp4_e2m1": (ml_dtypes.float4_e2m1fn, 2),
}


def vectors(name: str) -> dict[str, Values]:
    return dict(conformance_vectors(get(name)))


def assert_same(left: Values, right: Values) -> None:
    """The same numbers, NaN for NaN, and zeros of one sign."""
    np.testing.assert_array_equal(left, right)
    zeros = (left == 0) & ~np.isnan(left)
    np.testing.assert_array_equal(np.signbit(left)[zeros], np.signbit(right)[zeros])


def cast(values: Values, dtype: Any) -> Values:
    with np.errstate(all="ignore"):
        return np.asarray(values.astype(dtype).astype(np.float64))


@pytest.mark.parametrize("name", [name for name in OTHERS if get(name).bits <= 8])
def test_every_code_has_the_value_that_another_library_gives_it(name: str) -> None:
    arrays = vectors(name)
    codes = arrays["codes"]
    assert codes.tolist() == list(range(2 ** get(name).bits))
    assert_same(arrays["values"], codes.view(OTHERS[name]).astype(np.float64))


@pytest.mark.parametrize("name", [*OTHERS])
def test_casts_are_those_of_another_library(name: str) -> None:
    arrays = vectors(name)
    x = arrays["cast_input"]
    convention = "overflowing" if "overflowing_codes" in arrays else "saturating"
    values = arrays[f"{convention}_values"]
    right = cast(x, OTHERS[name])
    if convention == "saturating":  # ml_dtypes has no Inf there, either
        assert np.isfinite(right).all()
    assert_same(values, right)
    if "codes" in arrays:
        assert_same(arrays["values"][arrays[f"{convention}_codes"]], values)


@pytest.mark.parametrize("name", GFLOAT)
def test_saturating_casts_are_those_of_gfloat(name: str) -> None:
    arrays, info = vectors(name), GFLOAT[name]
    some = slice(None, None, 7)
    for x, value, code in zip(
        *(arrays[key][some] for key in ("cast_input", "saturating_values", "saturating_codes")),
        strict=True,
    ):
        right = gfloat.round_float(info, float(x), gfloat.RoundMode.TiesToEven, sat=True)
        assert_same(np.array(value), np.array(right))
        assert np.isnan(value) or gfloat.encode_float(info, right) == code


def test_saturating_casts_in_range_are_those_of_torch() -> None:
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        arrays = vectors(name)
        inside = np.abs(arrays["cast_input"]) <= get(name).max
        codes = torch.from_numpy(arrays["cast_input"][inside]).to(dtype).view(torch.uint8).numpy()
        np.testing.assert_array_equal(codes, arrays["saturating_codes"][inside])


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "uint8", "uint4", "uint2"])
def test_integers_round_to_even_and_saturate(name: str) -> None:
    arrays, bits = vectors(name), get(name).bits
    low, high = (0, 2**bits - 1) if name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    lowest = {"saturating": low, "narrow": low + 1} if low else {"saturating": low}
    assert {key for key in arrays if key.endswith("_values")} == {f"{key}_values" for key in lowest}
    for convention, least in lowest.items():
        right = np.clip(np.rint(arrays["cast_input"].astype(np.float64)), least, high)
        np.testing.assert_array_equal(arrays[f"{convention}_values"], right)
        np.testing.assert_array_equal(
            arrays[f"{convention}_codes"], right.astype(np.int64) & 2**bits - 1
        )


def slow_floor(block: Values, dtype: Any, top: int) -> tuple[int, Values]:
    """MX by its definition: a power of two from the exponent of the largest magnitude."""
    largest = np.abs(block.astype(np.float64)).max()
    exponent = -127 if largest == 0 else int(np.clip(np.frexp(largest)[1] - 1 - top, -127, 127))
    most = float(ml_dtypes.finfo(dtype).max)
    scaled = np.clip(block.astype(np.float64) / 2.0**exponent, -most, most)
    return exponent + 127, cast(scaled, dtype) * 2.0**exponent


@pytest.mark.parametrize("name", MX)
def test_blocks_are_cast_by_the_definition(name: str) -> None:
    arrays = vectors(name)
    compared = 0
    for block, scale, values in zip(
        *(arrays[key] for key in ("cast_input", "floor_scales", "floor_values")), strict=True
    ):
        if not np.isfinite(block).all():
            assert (int(scale[0]), bool(np.isnan(values).all())) == (255, True)
            continue
        code, right = slow_floor(block, *MX[name])
        assert_same(values, right)
        assert int(scale[0]) == code
        compared += 1
    assert compared >= 20
    exponents = np.arange(255) - 127.0
    assert_same(arrays["scale_values"][:255], np.ldexp(1.0, exponents.astype(int)))
    assert np.isnan(arrays["scale_values"][255])


@share(3)
@pytest.mark.parametrize(
    "name", [fmt.name for fmt in FORMATS if fmt.kind == "block" and fmt.name != "hif4"]
)
def test_codes_and_scales_alone_give_the_values(name: str) -> None:
    """What a reader without qgate computes from the tables."""
    arrays = vectors(name)
    conventions = [
        key.removesuffix("_scales")
        for key in arrays
        if key.endswith("_scales") and "tensor" not in key
    ]
    assert conventions
    for convention in conventions:
        scales = arrays[f"{convention}_scales"]
        scales = scales if scales.dtype == np.float32 else arrays["scale_values"][scales]
        if f"{convention}_tensor_scales" in arrays:
            scales = scales * arrays[f"{convention}_tensor_scales"].reshape(-1, 1).astype(
                np.float64
            )
        codes = arrays[f"{convention}_codes"]
        values = arrays["values"][codes]
        if "second_values" in arrays:
            second = arrays[f"{convention}_scales"].reshape(len(codes), -1) >= 128
            assert second.any()
            values = np.where(second, arrays["second_values"][codes], values)
        values = values * scales
        stored = arrays[f"{convention}_values"]
        finite = np.isfinite(stored)
        np.testing.assert_allclose(values[finite], stored[finite], rtol=2**-22)
        assert finite.mean() > 0.8


@share(4)
@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS])
def test_a_file_is_read_without_pickles_and_is_the_same_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", "vectors", name]) == 0
    assert main(["show", "vectors", name, "--output", "again.npz"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {name}.npz: ")
    assert Path(f"{name}.npz").read_bytes() == Path("again.npz").read_bytes()
    with np.load(f"{name}.npz", allow_pickle=False) as arrays:
        meta = json.loads(arrays["meta"].tobytes().decode())
        assert meta["kind"] == "qgate vectors 1"
        assert meta["format"]["name"] == name
        for key, (dtype, shape) in meta["arrays"].items():
            assert (str(arrays[key].dtype), list(arrays[key].shape)) == (dtype, shape)
        assert set(arrays) == {*meta["arrays"], "meta"}
        for convention in meta["conventions"]:
            assert arrays[f"{convention}_codes"].shape == arrays["cast_input"].shape


def test_hard_values_are_among_the_casts() -> None:
    x = vectors("fp8_e4m3")["cast_input"]
    values = get("fp8_e4m3").values()
    values = values[np.isfinite(values)]
    ties = (values[1:] + values[:-1]) / 2
    assert set(ties) | set(values) <= set(x.astype(np.float64))
    for special in (464.0, 480.0, 2**-10, 2**-11, np.inf, -np.inf):
        assert special in x
    assert np.isnan(x).any()
    assert np.signbit(x[x == 0]).any()
    blocks = vectors("mxfp4")["cast_input"]
    assert (blocks == 0).all(1).any()
    assert 0 < np.abs(blocks[np.isfinite(blocks) & (blocks != 0)]).min() < 2**-126
    assert np.abs(blocks[np.isfinite(blocks)]).max() > 2.9e38


E4M3 = ml_dtypes.float8_e4m3fn
FAULTS: dict[str, Callable[[Values], Values]] = {
    "truncates": lambda x: cast(np.sign(x) * np.abs(x) * (1 - 2.0**-5), E4M3),
    "rounds ties away": lambda x: cast(np.nextafter(x, np.sign(x) * np.float32(1e9)), E4M3),
    "flushes subnormals": lambda x: np.where(np.abs(cast(x, E4M3)) < 2**-6, 0.0, cast(x, E4M3)),
    "saturates at 240": lambda x: np.clip(cast(x, E4M3), -240, 240),
    "makes NaN of what saturates": lambda x: cast(x, E4M3),
    "saturates NaN": lambda x: np.nan_to_num(cast(np.clip(x, -448, 448), E4M3), nan=448.0),
    "loses the sign of zero": lambda x: cast(np.clip(x, -448, 448), E4M3) + 0.0,
    "is another format": lambda x: cast(np.clip(x, -448, 448), ml_dtypes.float8_e5m2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_cast_differs_from_the_vectors(name: str) -> None:
    arrays = vectors("fp8_e4m3")
    x, values = arrays["cast_input"], arrays["saturating_values"]
    with pytest.raises(AssertionError):
        assert_same(FAULTS[name](x), values)
    assert_same(cast(np.clip(x, -448, 448), E4M3), values)


def test_an_unknown_format_and_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", "vectors", "mxfp9"]) == 2
    assert "unknown format 'mxfp9'. Did you mean mxfp8" in capsys.readouterr().err
    assert main(["show", "vectors", "int8", "-o", "missing/v.npz"]) == 2
    assert "missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
