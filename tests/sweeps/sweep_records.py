"""Records of sweeps for the tests of text and pictures: of tensors in float64, and their extremes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import qgate

Record = dict[str, Any]


def swept(x: np.ndarray, name: str, fmt: str = "mxfp8_e4m3", **options: Any) -> Record:
    """Return the record of a sweep as a reader of its file sees it."""
    record: Record = json.loads(_swept(x.tobytes(), x.shape, name, fmt, **options))
    return record


@functools.cache
def _swept(data: bytes, shape: tuple[int, ...], name: str, fmt: str, **options: Any) -> str:
    x = torch.frombuffer(bytearray(data), dtype=torch.float64).reshape(shape)
    record = qgate.sweep(x, fmt, name=name, **options).to_dict()
    file = {"path": f"dumps/step 100/{name}.pt", "sha256": "9f86d081884c7d65" * 4}
    record["tensor"] |= {**file, "dtype": "bfloat16"}
    return json.dumps(record, allow_nan=False)


def tensor_record(
    x: np.ndarray, name: str = "act", *, levels: int = 21, ends: tuple[float, float] | None = None
) -> Record:
    high, low = ends or (None, None)
    return swept(x, name, granularity="tensor", levels=levels, max_exp=high, min_exp=low)


def block_record(x: np.ndarray, name: str = "act", offsets: tuple[int, int] = (4, -4)) -> Record:
    return swept(x, name, granularity="block", max_exp=offsets[0], min_exp=offsets[1])


def activation(outlier: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(0)
    x = random.standard_normal((256, 64)) * np.exp(random.standard_normal(64))
    x = np.where(np.abs(x) < 1e-5, 0.0, x)
    if outlier:
        x[3, 5] = outlier
    return x


def failing() -> Record:
    x = activation()
    x[0, :4] = np.nan, np.nan, np.nan, np.inf
    return tensor_record(x)


def undefined() -> Record:
    record = tensor_record(activation())
    for level in record["levels"]:
        level["metrics"] |= dict.fromkeys(("cosine", "psnr_db", "relative_error"), "nan")
    record["levels"][2]["metrics"] |= {"mse": "inf", "sqnr_db": "-inf"}
    record["advice"]["stability"]["sqnr_db"]["max"] = "inf"
    record["tensor"]["min"] = "-inf"
    record["advice"]["usual_gap_db"] = 0.0
    return record


def without_production() -> Record:
    """Return what no sweep writes today: a record without the usual level."""
    record = block_record(activation(), offsets=(0, -4))
    record["levels"][0] |= {"marks": [], "sqnr_db_without_massive": None}
    record["parameters"]["usual"]["exponent"] = 9.0
    record["advice"] |= {"massive": None, "usual_gap_db": None}
    return record


TENSORS: dict[str, Callable[[], Record]] = {
    "ordinary": lambda: tensor_record(activation()),
    "outlier": lambda: tensor_record(activation(30000.0), "outlier1"),
    "constant": lambda: tensor_record(np.full((64, 32), 0.3), ends=(2.0, -9.0)),
    "power of two": lambda: tensor_record(np.full((64, 32), 0.5), ends=(10.0, -12.0)),
    "single level": lambda: tensor_record(activation(), levels=1, ends=(0.0, 0.0)),
    "single exact level": lambda: tensor_record(np.full((4, 32), 2.0), levels=1, ends=(0.0, 0.0)),
    "single fractional level": lambda: tensor_record(activation(), levels=1, ends=(0.5, 0.5)),
    "61 levels": lambda: tensor_record(activation(), levels=61),
    "everything overflows": lambda: swept(
        activation() * 2.0**30, "huge", "hif8", max_exp=8, min_exp=-4
    ),
    "tiny": lambda: tensor_record(activation() * 2.0**-120, "tiny"),
    "huge": lambda: tensor_record(activation() * 2.0**100, "huge"),
    "failed": failing,
    "undefined": undefined,
    "odd name": lambda: tensor_record(activation(), "$x_1$ 张量 \x1b[31m\n" + "layer." * 30),
}
BLOCKS: dict[str, Callable[[], Record]] = {
    "ordinary": lambda: block_record(activation()),
    "outlier": lambda: block_record(activation(30000.0)),
    "constant": lambda: block_record(np.full((64, 32), 0.5)),
    "one offset": lambda: block_record(activation(), offsets=(0, 0)),
    "without production": without_production,
}


def realistic() -> list[Record]:
    """A tensor with outlier channels, by one scale and by blocks, at as many levels as usual."""
    x = np.random.default_rng(1).standard_normal((512, 64))
    x[:, ::16] *= 30
    name = "model.layers.11.mlp.down_proj:input"
    return [tensor_record(x, name), block_record(x, name, (8, -8))]
