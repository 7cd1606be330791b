"""Records of sweeps for the tests of text and pictures, made in a few lines of numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

EMAX, MAX, MIN_NORMAL, STEP_BITS = 8, 448.0, 2.0**-6, 3
BEST_HIGH = ("sqnr_db", "cosine", "psnr_db")
Record = dict[str, Any]


# Records: a sweep of e4m3 in a few lines of numpy, so that the figures belong together -----------


def round_e4m3(x: np.ndarray) -> np.ndarray:
    magnitude = np.maximum(np.abs(x), 2.0**-60)
    step = 2.0 ** (np.maximum(np.floor(np.log2(magnitude)), -6) - STEP_BITS)
    return np.clip(np.round(x / step) * step, -MAX, MAX)


def decibels(over: float, under: float) -> float:
    return math.inf if under == 0 else 10 * math.log10(over / under) if over else -math.inf


def metrics(q: np.ndarray, x: np.ndarray) -> dict[str, float]:
    error = q - x
    energy, lost = float(np.sum(x * x)), float(np.sum(error * error))
    mse, mae, mean = lost / x.size, float(np.mean(np.abs(error))), float(np.mean(np.abs(x)))
    norm = math.sqrt(energy * float(np.sum(q * q)))
    cosine = float(np.sum(q * x)) / norm if norm else float(lost == 0)
    return {
        "sqnr_db": decibels(energy, lost),
        "mse": mse,
        "rmse": math.sqrt(mse),
        "mae": mae,
        "max_abs": float(np.max(np.abs(error))),
        "mean_error": float(np.mean(error)),
        "relative_mse": lost / energy if energy else 0.0,
        "relative_mae": mae / mean if mean else 0.0,
        "relative_error": 100 * mae / mean if mean else 0.0,
        "cosine": 1.0 if lost == 0 else cosine,
        "correlation": math.nan if np.ptp(x) == 0 else cosine,
        "psnr_db": decibels(float(np.max(np.abs(x))) ** 2, mse),
    }


def severity(share: float) -> str:
    return "high" if share > 0.01 else "moderate" if share >= 0.001 else "none"


def level_of(x: np.ndarray, q: np.ndarray, scaled: np.ndarray, exponent: float) -> Record:
    energy = max(float(np.sum(x * x)), 1e-300)
    over = np.abs(scaled) > MAX
    under = (x != 0) & (np.abs(scaled) < MIN_NORMAL)
    flush = (x != 0) & (q == 0)
    shares = {
        "overflow": float(over.mean()),
        "underflow": float(under.mean()),
        "flush": float(flush.mean()),
    }
    integer = float(exponent).is_integer()
    return {
        "exponent": exponent,
        "integer": integer,
        "factor": 2.0**exponent,
        "e8m0": integer,
        "marks": [],
        "metrics": metrics(q, x),
        **{
            name: int(mask.sum())
            for name, mask in (("overflow", over), ("underflow", under), ("flush", flush))
        },
        **{f"{name}_share": share for name, share in shares.items()},
        "overflow_energy": float(np.sum((x - q)[over] ** 2)) / energy,
        "flush_energy": float(np.sum(x[flush] ** 2)) / energy,
        "severity": {name: severity(share) for name, share in shares.items()},
        "significant": max(shares["overflow"], shares["underflow"]) > 0.001,
        "scaled_min": float(scaled.min()),
        "scaled_max": float(scaled.max()),
        "score": None,
    }


def spread(levels: list[Record], name: str) -> Record:
    values = [level["metrics"][name] for level in levels]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(values), max(values)
    found: Record = {"min": low, "max": high, "std": float(np.std(finite)) if finite else 0.0}
    if name == "mse":
        return found | {"stable": high == low or (low > 0 and (high - low) / low < 0.1)}
    if name == "cosine":
        return found | {"stable": high - low < 0.01}
    span = 0.0 if high == low else high - low
    return found | {"range": "large" if span > 20 else "moderate" if span > 10 else "small"}


def advice_of(levels: list[Record], reasons: list[str], about: str) -> Record:
    """Advice as the sweep gives it, but for the composite, for which SQNR stands here."""

    def best(name: str, among: list[int]) -> int:
        sign = -1 if name in BEST_HIGH else 1
        return min(among, key=lambda i: (sign * levels[i]["metrics"][name], levels[i]["overflow"]))

    everything = list(range(len(levels)))
    fine = [i for i in everything if levels[i]["severity"]["overflow"] != "high"]
    candidates = fine or everything
    chosen = best("sqnr_db", [i for i in candidates if levels[i]["e8m0"]] or candidates)
    for index in candidates:
        levels[index]["score"] = 0.9 if index != chosen else 0.9876
    clean = [i for i in everything if not levels[i]["significant"]]
    production = [level for level in levels if "production" in level["marks"]]
    finest = best("mse", everything)
    least, cost = levels[finest]["metrics"]["mse"], 0.0
    if levels[chosen]["metrics"]["mse"] > least:
        cost = decibels(levels[chosen]["metrics"]["mse"], least)
    gap = math.nan
    if production:
        here, there = (each["metrics"]["sqnr_db"] for each in (levels[chosen], production[0]))
        gap = 0.0 if here == there else here - there
    marks = levels[chosen]["marks"]
    return {
        "best": {
            name: best(name, everything)
            for name in ("sqnr_db", "mse", "cosine", "psnr_db", "mae", "relative_error")
        },
        "recommended": chosen,
        "position": next((mark for mark in ("maximum", "minimum") if mark in marks), "between"),
        "candidates": "without high overflow" if fine else "all levels overflow: least problematic",
        "reasons": reasons,
        "stability": {n: spread(levels, n) for n in ("sqnr_db", "mse", "cosine", "psnr_db")},
        **{
            kind: {
                **{
                    grade: [i for i in everything if levels[i]["severity"][kind] == grade]
                    for grade in ("high", "moderate")
                },
                **{
                    which: pick(everything, key=lambda i, k=kind: levels[i][f"{k}_share"])
                    if any(level[kind] for level in levels)
                    else None
                    for which, pick in (("worst", max), ("best", min))
                },
            }
            for kind in ("overflow", "underflow")
        },
        "clean_range": [clean[0], clean[-1]] if clean else None,
        "least_problematic": min(
            everything,
            key=lambda i: max(levels[i]["overflow_share"], levels[i]["underflow_share"]),
        ),
        "usual_gap_db": gap,
        "best_mse": finest,
        "mse_cost_db": cost,
        "speaks_about": about,
    }


def tensor_part(x: np.ndarray, name: str) -> Record:
    nonzero = np.abs(x[x != 0])
    return {
        "name": name,
        "path": f"dumps/step 100/{name}.pt",
        "shape": list(x.shape),
        "dtype": "bfloat16",
        "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "elements": x.size,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "zeros": int((x == 0).sum()),
        "min": float(x.min()),
        "max": float(x.max()),
        "amax": float(np.abs(x).max()),
        "amin": float(nonzero.min()) if nonzero.size else math.nan,
        "mean": float(x.mean()),
        "std": float(x.std()),
        "rounded_to": None,
    }


def as_json(record: Record) -> Record:
    """What a reader of the file sees: no number that JSON lacks."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.loads(json.dumps(plain(record), allow_nan=False))


def whole(kind: str, x: np.ndarray, name: str, parameters: Record, levels: list[Record]) -> Record:
    block = kind == "block"
    return as_json(
        {
            "kind": kind,
            "format": {
                "name": "fp8_e4m3",
                "layout": "1-4-3",
                "bits": 8,
                "max": MAX,
                "min_normal": MIN_NORMAL,
                "min_subnormal": 2.0**-9,
                "max_exponent": EMAX,
                "rounding": "even",
            },
            "tensor": tensor_part(x, name),
            "parameters": {
                "levels": len(levels),
                "max_exp": levels[0]["exponent"],
                "min_exp": levels[-1]["exponent"],
                "alignment": "exact",
                "scale_bits": 8,
                "usual": {"kind": "production", "exponent": float(parameters.get("production", 0))},
                "production": 0,
                "block": None,
                "axis": None,
                "scale_rule": None,
                **parameters,
            },
            "levels": levels,
            "advice": advice_of(
                levels,
                [
                    "the largest values stay inside the range of fp8_e4m3, so that no energy is "
                    "lost by saturation, and what is flushed to zero carries next to none",
                    "one step further down the largest values saturate",
                ],
                "an offset to every block's own exponent"
                if block
                else "one scale for the whole tensor",
            ),
            "failed": None,
            "versions": {
                "qgate": "0.1.0",
                "torch": "2.13.0",
                "numpy": "2.4.6",
                "python": "3.11.7",
            },
        }
    )


def tensor_record(
    x: np.ndarray, name: str = "act", *, levels: int = 21, ends: tuple[float, float] | None = None
) -> Record:
    nonzero = np.abs(x[x != 0])
    production = math.floor(math.log2(nonzero.max())) - EMAX
    high, low = ends or (
        float(math.ceil(math.log2(nonzero.max() / MAX))),
        float(math.floor(math.log2(nonzero.min() / MIN_NORMAL))),
    )
    evenly = np.linspace(high, low, levels).round(4)
    integers = np.arange(math.ceil(low), math.floor(high) + 1)
    exponents = sorted({float(e) for e in (*evenly, *integers)}, reverse=True)
    found = []
    for exponent in exponents:
        scaled = x / 2.0**exponent
        level = level_of(x, round_e4m3(scaled) * 2.0**exponent, scaled, exponent)
        marks = (("maximum", high), ("minimum", low), ("production", production))
        level["marks"] = [mark for mark, where in marks if where == exponent]
        found.append(level)
    given = {"levels": levels, "production": production, "alignment": "given" if ends else "exact"}
    return whole("tensor", x, name, given, found)


def block_record(x: np.ndarray, name: str = "act", offsets: tuple[int, int] = (4, -4)) -> Record:
    blocks = x.reshape(-1, 32)
    largest = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), 2.0**-100)
    shared = np.floor(np.log2(largest)) - EMAX
    found = []
    for offset in range(offsets[0], offsets[1] - 1, -1):
        scale = 2.0 ** (shared + offset)
        scaled = blocks / scale
        level = level_of(blocks, round_e4m3(scaled) * scale, scaled, float(offset))
        level["marks"] = ["production"] if offset == 0 else []
        found.append(level)
    given = {"block": 32, "axis": -1, "scale_rule": "floor", "alignment": "given"}
    return whole("block", x, name, given, found)


def activation(outlier: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(0)
    x = random.standard_normal((256, 64)) * np.exp(random.standard_normal(64))
    x = np.where(np.abs(x) < 1e-5, 0.0, x)
    if outlier:
        x[3, 5] = outlier
    return x


def failing() -> Record:
    record = tensor_record(activation())
    record["failed"] = "3 NaN and 1 Inf in the tensor"
    record["tensor"] |= {"nan": 3, "posinf": 1}
    return record


def undefined() -> Record:
    record = tensor_record(activation())
    for level in record["levels"]:
        level["metrics"] |= dict.fromkeys(("cosine", "psnr_db", "relative_error"), "nan")
    record["levels"][2]["metrics"] |= {"mse": "inf", "sqnr_db": "-inf"}
    return record


def zeros() -> Record:
    x = np.zeros((8, 32))
    level = level_of(x, x, x, 0.0)
    level["marks"] = ["maximum", "minimum", "production"]
    return whole("tensor", x, "zeros", {}, [level])


TENSORS: dict[str, Callable[[], Record]] = {
    "ordinary": lambda: tensor_record(activation()),
    "outlier": lambda: tensor_record(activation(30000.0), "outlier1"),
    "constant": lambda: tensor_record(np.full((64, 32), 0.3), ends=(2.0, -9.0)),
    "power of two": lambda: tensor_record(np.full((64, 32), 0.5), ends=(4.0, -12.0)),
    "single level": lambda: tensor_record(activation(), levels=1, ends=(0.0, 0.0)),
    "single exact level": lambda: tensor_record(np.full((4, 32), 2.0), levels=1, ends=(0.0, 0.0)),
    "single fractional level": lambda: tensor_record(activation(), levels=1, ends=(0.5, 0.5)),
    "61 levels": lambda: tensor_record(activation(), levels=61),
    "everything overflows": lambda: tensor_record(activation() + 100, ends=(-4.0, -12.0)),
    "tiny": lambda: tensor_record(activation() * 2.0**-120, "tiny"),
    "huge": lambda: tensor_record(activation() * 2.0**100, "huge"),
    "zeros": zeros,
    "failed": failing,
    "undefined": undefined,
    "odd name": lambda: tensor_record(activation(), "$x_1$ 张量 \x1b[31m\n" + "layer." * 30),
}
BLOCKS: dict[str, Callable[[], Record]] = {
    "ordinary": lambda: block_record(activation()),
    "outlier": lambda: block_record(activation(30000.0)),
    "constant": lambda: block_record(np.full((64, 32), 0.5)),
    "one offset": lambda: block_record(activation(), offsets=(0, 0)),
    "only positive": lambda: block_record(activation(), offsets=(8, 1)),
    "zeros": lambda: block_record(np.zeros((8, 32))),
}


def realistic() -> list[Record]:
    """A tensor with outlier channels, by one scale and by blocks, at as many levels as usual."""
    x = np.random.default_rng(1).standard_normal((512, 64))
    x[:, ::16] *= 30
    name = "model.layers.11.mlp.down_proj:input"
    return [tensor_record(x, name), block_record(x, name, (8, -8))]
