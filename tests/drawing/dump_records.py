"""Records of dumps as an analysis writes them, made in numpy so that their figures belong together.

Easy ones look like a small transformer in training; the others are what breaks drawing: a single
tensor, statistics alone, thousands of tensors, constants, nothing finite, hostile names.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import fields
from statistics import NormalDist
from typing import Any, cast

import numpy as np

from qgate import dumps
from qgate.summaries.record import ANALYSIS, DumpAnalysis

Record = dict[str, Any]
# name: largest, smallest normal, smallest subnormal, bits after the point, block
FORMATS: dict[str, tuple[float, float, float, int, int]] = {
    "fp8_e4m3": (448.0, 2.0**-6, 2.0**-9, 3, 0),
    "fp8_e5m2": (57344.0, 2.0**-14, 2.0**-16, 2, 0),
    "hif8": (32768.0, 2.0**-15, 2.0**-22, 2, 0),
    "mxfp8_e4m3": (448.0, 2.0**-6, 2.0**-9, 3, 32),
    "mxfp4_e2m1": (6.0, 1.0, 0.5, 1, 32),
    "nvfp4": (6.0, 1.0, 0.5, 1, 16),
    "fp16": (65504.0, 2.0**-14, 2.0**-24, 10, 0),
    "bf16": (3.3895313892515355e38, 2.0**-126, 2.0**-133, 7, 0),
}
PROBABILITIES = (0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1)


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    most, normal, _, bits, _ = FORMATS[name]
    size = np.maximum(np.abs(x), 2.0**-300)
    step = 2.0 ** (np.maximum(np.floor(np.log2(size)), math.log2(normal)) - bits)
    return np.clip(np.round(x / step) * step, -most, most)


def outcome(x: np.ndarray, name: str) -> Record:
    most, normal, _, _, block = FORMATS[name]
    shares: Record = {"of": int(x.size)}
    if block:
        x = x[: x.size // block * block].reshape(-1, block)
        amax = np.abs(x).max(1, keepdims=True)
        top = np.floor(np.log2(np.where(amax > 0, amax, 1)))
        scale = 2.0 ** (top - math.floor(math.log2(most)))
        scaled = x / scale
        q = rounded(scaled, name) * scale
        under = (x != 0) & (np.abs(scaled) < normal)
        over = np.abs(scaled) > most
    else:
        q, over, under = rounded(x, name), np.abs(x) > most, (x != 0) & (np.abs(x) < normal)
        amax = max(float(np.abs(x).max()), 1e-200)
        power = 2.0 ** max(math.ceil(math.log2(amax) - math.log2(most)), -900)
        fitted = rounded(x / power, name) * power
        shares |= {
            "fitted_signal": float((x * x).sum()),
            "fitted_noise": float(((fitted - x) ** 2).sum()),
        }
    return shares | {
        "upper": float((over & (x > 0)).mean()),
        "lower": float((over & (x < 0)).mean()),
        "underflow": float(under.mean()),
        "flushed": float(((x != 0) & (q == 0)).mean()),
        "signal": float((x * x).sum()),
        "noise": float(((q - x) ** 2).sum()),
        "saturated_error_share": float(((q - x)[over] ** 2).sum() / (((q - x) ** 2).sum() or 1)),
    }


def binades(x: np.ndarray) -> Record:
    exponents = np.floor(np.log2(np.abs(x[x != 0]))).astype(int)
    if not exponents.size:
        return {}
    first = int(exponents.min())
    return {"binades": {"first": first, "counts": np.bincount(exponents - first).tolist()}}


def summary(x: np.ndarray, formats: tuple[str, ...] = tuple(FORMATS)) -> Record:
    """Everything one can say of values; `x` is a matrix."""
    bad = {"nan": np.isnan(x), "posinf": x == np.inf, "neginf": x == -np.inf}
    finite = x[np.isfinite(x)]
    figures: Record = {
        "tensors": 1, "elements": int(x.size), "counted": int(x.size),
        "source": "values", "counted_as": "bf16",
        **{name: int(mask.sum()) for name, mask in bad.items()},
    }  # fmt: skip
    if not finite.size:
        return figures
    std, mean = float(finite.std()) if np.ptp(finite) else 0.0, float(finite.mean())
    z = (finite - mean) / std if std else np.zeros_like(finite)
    figures |= {
        "zeros": int((finite == 0).sum()),
        "min": float(finite.min()),
        "max": float(finite.max()),
        "amax": float(np.abs(finite).max()),
        "mean": mean,
        "std": std,
        "rms": float(np.sqrt((finite.astype(np.float64) ** 2).mean())),
        "quantiles": {f"{p:g}": float(np.quantile(finite, p)) for p in PROBABILITIES},
        "formats": {name: outcome(finite, name) for name in formats},
        **binades(finite),
    }
    if (finite != 0).any():
        figures["amin"] = float(np.abs(finite[finite != 0]).min())
    if std:
        figures |= {"skew": float((z**3).mean()), "kurtosis": float((z**4).mean()) - 3}
    bits = finite.astype(np.float32).view(np.uint32) >> 16
    used, counts = np.unique((bits >> 7) & 255, return_counts=True)
    part = counts / counts.sum()
    figures["usage"] = {
        "exponents": len(used),
        "patterns": len(np.unique(bits)),
        "exponent_bits": float(-(part * np.log2(part)).sum()) + 0.0,
    }
    if x.ndim > 1:
        size = np.abs(np.where(np.isfinite(x), x, 0)).max(0)
        order = np.argsort(-size)
        places = np.linspace(0, len(size) - 1, min(65, len(size))).round().astype(int)
        figures["channels"] = {
            "count": len(size),
            "median": float(np.median(size)),
            "largest": [[int(i), float(size[i])] for i in order[:8]],
            "curve": size[order][places].tolist(),
        }
    return figures


def fitted(x: np.ndarray) -> Record:
    mean, std = float(x.mean()), float(x.std()) or 1e-6
    middle = float(np.median(x))
    spread = float(np.abs(x - middle).mean()) or 1e-6
    scale, freedom = 0.6 * std, 4.0
    student = (
        math.lgamma((freedom + 1) / 2)
        - math.lgamma(freedom / 2)
        - 0.5 * math.log(freedom * math.pi)
        - math.log(scale)
        - (freedom + 1) / 2 * np.log1p(((x - middle) / scale) ** 2 / freedom)
    )
    fits = {
        "normal": (mean, std, -math.log(std * math.sqrt(2 * math.pi)) - 0.5),
        "laplace": (middle, spread, -math.log(2 * spread) - 1),
        "student_t": (middle, scale, float(student.mean())),
    }
    named = {
        name: {"location": a, "scale": b, "log_likelihood": c} for name, (a, b, c) in fits.items()
    }
    named["student_t"]["freedom"] = freedom
    best = max(named, key=lambda name: named[name]["log_likelihood"])
    return {"fits": named, "best": best}


def histogram(x: np.ndarray, bins: int) -> Record:
    counts, edges = np.histogram(x, bins)
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}


def group(x: np.ndarray, key: tuple[str, str, str, str], tensors: int) -> Record:
    finite = x[np.isfinite(x)]
    grouped = summary(finite) | {"tensors": tensors}
    names = ("layer_type", "operation", "name", "quant_type")
    grouped |= dict(zip(names, key, strict=True)) | {"dtype": "bf16", "elements": int(x.size)}
    grouped |= {
        name: int(v) for name, v in (("nan", np.isnan(x).sum()), ("posinf", np.isposinf(x).sum()))
    }
    if finite.size and np.ptp(finite):
        p = (np.arange(64) + 0.5) / 64
        p = np.concatenate([[1e-4, 1e-3, 5e-3], p, [1 - 5e-3, 1 - 1e-3, 1 - 1e-4]])
        core = finite[np.abs(finite - np.median(finite)) <= np.quantile(np.abs(finite), 0.999)]
        grouped |= fitted(finite) | {
            "histogram": histogram(finite, 128),
            "core": histogram(core, 64),
            "qq": {
                "p": p.tolist(),
                "values": np.quantile(finite, p).tolist(),
                "normal": [NormalDist().inv_cdf(float(q)) for q in p],
            },
        }
    return grouped


def identity(kind: tuple[str, str, str], layer: int | None, rank: int, order: int) -> Record:
    layer_type, operation, name = kind
    where = "" if layer is None else f"L{layer} "
    return {
        "title": f"{where}{layer_type} {operation} {name}, rank {rank}, iteration 0",
        "order": order,
        "module": f"model.layers.{layer}.{'self_attn' if layer_type == 'attention' else 'mlp.fc1'}",
        "layer_type": layer_type, "layer": layer, "operation": operation,
        "phase": "post" if name in ("output", "context", "grad_input") else "pre",
        "component": "FA" if layer_type == "attention" else "linear",
        "name": name, "quant_type": "", "rank": rank, "iteration": 0, "sample": 0,
        "micro_batch": None, "call": 0, "dtype": "bfloat16",
    }  # fmt: skip


def titled(told: Record) -> str:
    """As a dump titles the tensor."""
    names = {field.name for field in fields(dumps.Record)} & told.keys()
    record_fields: dict[str, Any] = {name: told[name] for name in names}
    return dumps.Record(**record_fields).title


KINDS = (
    ("attention", "forward", "query", 1.5),
    ("attention", "forward", "key", 2.0),
    ("attention", "forward", "value", 0.6),
    ("attention", "forward", "context", 0.3),
    ("linear", "forward", "input", 1.0),
    ("linear", "forward", "weight", 0.02),
    ("linear", "forward", "output", 4.0),
    ("linear", "backward", "grad_output", 2e-5),
    ("linear", "backward", "grad_input", 1e-5),
    ("linear", "backward", "grad_weight", 4e-4),
)


def about(tensors: list[Record]) -> Record:
    return {
        "folder": "runs/dump", "qgate": "0.1", "created": "2026-01-01T00:00:00Z",
        "world_size": 1 + max((t["rank"] for t in tensors), default=0),
        "records": len(tensors),
        "bytes": sum(2 * t["elements"] for t in tensors),
        "with_nonfinite": sum(bool(t["nan"] + t["posinf"] + t["neginf"]) for t in tensors),
        "states": {"0": "complete"}, "by": {}, "notes": [],
    }  # fmt: skip


def analysis_of(tensors: list[Record], groups: list[Record], **more: Any) -> DumpAnalysis:
    edges = {
        name: {"max": a, "min_normal": b, "min_subnormal": c, "scaled": bool(block)}
        for name, (a, b, c, _, block) in FORMATS.items()
    }
    analysis: Record = {
        "kind": ANALYSIS, "dump": about(tensors),
        "settings": {"formats": list(FORMATS), "seed": 0}, "formats": edges, "notes": [],
        "tensors": tensors, "groups": groups,
        "comparison": None, "loss_scales": [], "ranks": None, "maps": [],
    }  # fmt: skip
    return cast(DumpAnalysis, analysis | more)


def tensor_map(title: str, kind: str, cells: np.ndarray, order: int) -> Record:
    rows, columns = cells.shape
    return {
        "title": title, "kind": kind, "rows": rows, "columns": columns, "cells": cells.tolist(),
        "order": order, "rank": 0,
    }  # fmt: skip


def pair(told: Record, correlation: float, relative_mse: float, elements: int) -> Record:
    names = ("title", "layer", "layer_type", "operation", "name", "rank")
    figures = {"correlation": correlation, "relative_mse": relative_mse, "elements": elements}
    return {name: told[name] for name in names} | figures


def attention_map(title: str, order: int, seed: int) -> Record:
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 2, (48, 48)) - 0.15 * np.abs(np.subtract.outer(range(48), range(48)))
    scores[:, 0] += 3 + seed % 3
    scores[np.triu_indices(48, 1)] = -np.inf
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    entropy = -np.sum(p * np.log2(np.maximum(p, 1e-30)), 1).mean()
    figures = {"entropy_bits": float(entropy), "first_key": float(p[:, 0].mean())}
    return tensor_map(title, "attention", p, order) | figures


def normal_record(layers: int = 4, ranks: int = 3, width: int = 64, seed: int = 5) -> DumpAnalysis:
    """Two quant types, attention and linear, forward and backward; rank 2 stands out, channel 17 is
    an outlier, one tensor holds NaN."""
    rng = np.random.default_rng(seed)
    tensors: list[Record] = []
    pooled: dict[tuple[str, str, str, str], list[np.ndarray]] = {}
    pairs: list[Record] = []
    maps: list[Record] = []
    cells = np.zeros((32, 32))
    order = 0
    for layer in range(layers):
        for layer_type, operation, name, size in KINDS:
            kind = (layer_type, operation, name)
            for rank in range(ranks):
                batch = 1 if rank == 0 else 2
                base = rng.standard_t(4 if operation == "backward" else 12, (32 * batch, width))
                x = base * size * (1 + 0.4 * layer)
                if name in ("input", "output"):
                    x[:, 17] *= 30 + 20 * layer
                if rank == 2:
                    x *= 3 if operation == "backward" else 1.3
                if name == "output" and layer == 3:
                    x *= 12
                values = {"hifp8": x, "mxfp8": x * (1 + rng.normal(0, 0.02, x.shape))}
                for quant_type, y in values.items():
                    y = y.astype(np.float32)
                    if (layer, name, rank, quant_type) == (2, "grad_output", 1, "hifp8"):
                        y[3, :12], y[4, 0], y[5, :2] = np.nan, np.inf, -np.inf
                    order += 1
                    tensor_entry = identity(kind, layer, rank, order) | {
                        "quant_type": quant_type,
                        "sample": rank % 2,
                        "shape": [batch, 32, width],
                    }
                    tensor_entry["title"] = titled(tensor_entry)
                    tensors.append(tensor_entry | summary(y))
                    pooled.setdefault((*kind, quant_type), []).append(y)
                if name == "input" and rank == 0:
                    maps.append(tensor_map(tensors[-1]["title"], "tokens", np.abs(x), order))
                if name == "query" and rank == 0:
                    maps.append(attention_map(tensors[-1]["title"], order, layer))
                a, b = values["mxfp8"], values["hifp8"]
                correlation = float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
                relative_mse = float(((a - b) ** 2).sum() / (b**2).sum())
                pairs.append(pair(tensors[-1], correlation, relative_mse, int(a.size)))
                if name == "value":
                    cells += np.histogram2d(b.ravel(), a.ravel(), 32, [[-4, 4], [-4, 4]])[0]
    groups = [
        group(np.concatenate(arrays), key, len(arrays)) for key, arrays in sorted(pooled.items())
    ]
    return analysis_of(
        tensors,
        groups,
        notes=["12 tensors are wider than 16 bits: their shares are of values rounded to bf16"],
        comparison={
            "kind": "quant_types", "first": "hifp8", "second": "mxfp8", "pairs": pairs,
            "unpaired": 2,
            "scatter": {"low": -4.0, "high": 4.0, "counts": cells.astype(int).tolist(), "outside": 0},
        },
        loss_scales=[
            scale("fp8_e4m3", 10, 16, 13, 0.83, 0.0004),
            scale("fp8_e5m2", 4, 22, 13, 0.31, 0.0),
            scale("hif8", 9, 8, 8, 0.22, 0.002),
            scale("fp16", -6, 25, 9, 0.001, 0.0),
        ],
        ranks=rank_rows(tensors, ranks),
        maps=maps,
    )  # fmt: skip


def scale(name: str, least: int, largest: int, best: int, flush: float, then: float) -> Record:
    return {
        "format": name, "least": least, "largest": largest, "advised": best, "flush": flush,
        "at_best": then,
    }  # fmt: skip


def rank_rows(tensors: list[Record], ranks: int) -> Record:
    """Only as exact as pictures need."""
    tensors_by_title: dict[str, dict[int, Record]] = {}
    for tensor in tensors:
        if "rms" in tensor:
            key = tensor["title"].replace(f", rank {tensor['rank']}", "")
            tensors_by_title.setdefault(key, {})[tensor["rank"]] = tensor
    entries = []
    for title, by_rank in tensors_by_title.items():
        middle = float(np.median([t["rms"] for t in by_rank.values()])) or 1.0
        factors = {
            rank: max(t["rms"] / middle, middle / max(t["rms"], 1e-30))
            for rank, t in by_rank.items()
        }
        far = max(factors, key=lambda rank: factors[rank])
        sizes = {
            name: {str(rank): t[name] for rank, t in by_rank.items()} for name in ("rms", "amax")
        }
        far_rank = {"title": title, "factor": factors[far], "farthest": far, "equal": False}
        entries.append(sizes | far_rank)
    rows = []
    for rank in range(ranks):
        mine = [t for t in tensors if t["rank"] == rank]
        rows.append(
            {
                "rank": rank,
                "tensors": len(mine),
                "nonfinite": sum(bool(t["nan"]) for t in mine),
                "amax": max((t.get("amax", 0.0) for t in mine), default=0.0),
                "rms": float(np.mean([t.get("rms", 0.0) for t in mine] or [0])),
                "distance": 1.4 if rank == ranks - 1 else 0.05 + 0.01 * rank,
                "score": 9.5 if rank == ranks - 1 else 0.7,
            }
        )
    return {
        "rows": rows,
        "tensors": sorted(entries, key=lambda t: -t["factor"]),
        "stands_out": ranks - 1,
        "equal_weights": 3,
        "unequal_weights": ["L1 linear forward weight"],
    }


# The extremes -----------------------------------------------------------------------------------------


def one_tensor() -> DumpAnalysis:
    x = np.random.default_rng(0).normal(0, 1, (32, 64))
    tensor_entry = identity(("linear", "forward", "input"), None, 0, 0) | {"shape": [32, 64]}
    key = ("linear", "forward", "input", "")
    return analysis_of([tensor_entry | summary(x)], [group(x, key, 1)])


def no_tensor() -> DumpAnalysis:
    return analysis_of([], [], formats={}, dump={})


def statistics_only() -> DumpAnalysis:
    full = normal_record(layers=2, ranks=1)
    field_names = (
        "min",
        "max",
        "amax",
        "mean",
        "std",
        "tensors",
        "elements",
        "counted",
        "counted_as",
    )
    field_names += ("nan", "posinf", "neginf", "shape", *identity(("", "", ""), 0, 0, 0))
    tensors = [
        {k: v for k, v in t.items() if k in field_names} | {"source": "statistics"}
        for t in full["tensors"]
    ]
    groups = [
        {k: g[k] for k in (*field_names, "quant_type") if k in g} | {"source": "statistics"}  # type: ignore[literal-required]
        for g in full["groups"]
    ]
    return analysis_of(tensors, groups)


def many_tensors(layers: int = 100, ranks: int = 2) -> DumpAnalysis:
    """2,000 tensors from the summaries of a few."""
    rng = np.random.default_rng(1)
    shapes = {
        name: summary(rng.standard_t(6, (16, 32)) * size, ("fp8_e4m3", "mxfp4_e2m1"))
        for _, _, name, size in KINDS
    }
    tensors = []
    for layer in range(layers):
        for kind_index, (layer_type, operation, name, _) in enumerate(KINDS):
            for rank in range(ranks):
                tensor_entry = identity(
                    (layer_type, operation, name), layer, rank, 10 * layer + kind_index
                )
                factor = float(np.exp(rng.normal(0, 0.3)))
                figures = dict(shapes[name])
                figures |= {k: figures[k] * factor for k in ("amax", "rms", "std", "mean")}
                tensors.append(
                    tensor_entry | figures | {"shape": [16, 32], "quant_type": f"q{layer % 3}"}
                )
    groups = [
        group(rng.standard_t(6, (64, 32)) * size, (layer_type, operation, name, "q0"), len(tensors))
        for layer_type, operation, name, size in KINDS
    ]
    return analysis_of(tensors, groups, ranks=rank_rows(tensors, ranks))


HOSTILE = (
    "<script>alert(1)</script>",
    "$x_{1}$ costs $5 and 100%",
    "=cmd()|'!A1",
    "a\nb\tc\x07\r",
    "_hidden",
    "名前-テンソル-é",
    "x" * 300,
    "\\frac{1}{0} $\\alpha",
    "@sum & \"quoted\" 'too'",
)


def hostile_names() -> DumpAnalysis:
    """Everything that a file can call something, in every field of text."""
    rng = np.random.default_rng(2)
    tensors, groups, pairs, maps = [], [], [], []
    for index, bad in enumerate(HOSTILE):
        x = rng.standard_t(5, (32, 32)) * 10.0 ** (index % 4)
        operation = ("forward", "backward")[index % 2]
        identified = identity((bad, operation, bad), index, index % 2, index) | {"title": bad}
        identified |= {"module": bad, "quant_type": bad, "shape": [32, 32], "dtype": bad}
        tensors.append(identified | summary(x))
        groups.append(group(x, (bad, operation, bad, bad), 1))
        pairs.append(pair(identified | {"rank": 0}, 0.9, 0.01, 10))
        maps.append(attention_map(bad, index, index))
        maps.append(maps[-1] | {"kind": "tokens"})
    bad_format = {**tensors[0]["formats"], HOSTILE[1]: outcome(rng.normal(0, 1, 64), "fp8_e4m3")}
    tensors[0]["formats"] = bad_format
    first, second, *_ = HOSTILE
    comparison = {"kind": "quant_types", "first": first, "second": second, "unpaired": 0}
    return analysis_of(
        tensors, groups, maps=maps, notes=list(HOSTILE), comparison=comparison | {"pairs": pairs},
        loss_scales=[scale(first, 0, 0, 0, 0.5, 0.5)],
        ranks=rank_rows(tensors, 2) | {"unequal_weights": list(HOSTILE)},
    )  # fmt: skip


def constants() -> DumpAnalysis:
    """Tensors of one value, of zeros, of the largest and least numbers there are."""
    tensors, groups = [], []
    for index, value in enumerate((0.0, 1.0, -3e38, 1e-40, 65504.0)):
        x = np.full((16, 32), value)
        identified = identity(
            ("linear", ("forward", "backward")[index % 2], "input"), index, 0, index
        )
        tensors.append(identified | summary(x) | {"shape": [16, 32]})
        groups.append(group(x, ("linear", identified["operation"], f"input{index}", ""), 1))
    return analysis_of(tensors, groups)


def nothing_finite() -> DumpAnalysis:
    tensors = []
    for order, value in enumerate((np.nan, np.inf, -np.inf)):
        identified = identity(("linear", "forward", "output"), order, 0, order)
        tensors.append(identified | summary(np.full((4, 4), value)) | {"shape": [4, 4]})
    return analysis_of(tensors, [])


def two_formats() -> DumpAnalysis:
    """The comparison of two formats on one set of tensors."""
    record = normal_record(layers=2, ranks=1)
    tensors = [t for t in record["tensors"] if t["quant_type"] == "hifp8"]
    comparison: Any = record["comparison"]
    record["comparison"] = comparison | {"kind": "formats", "first": "hif8", "second": "mxfp8_e4m3"}
    record["tensors"] = tensors
    record["groups"] = [g for g in record["groups"] if g["quant_type"] == "hifp8"]
    return record


def quiet(make: Callable[[], DumpAnalysis]) -> DumpAnalysis:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


EXTREMES: dict[str, Callable[[], DumpAnalysis]] = {
    "no tensor": no_tensor,
    "one tensor": one_tensor,
    "statistics only": statistics_only,
    "many tensors": lambda: many_tensors(layers=30),
    "hostile names": hostile_names,
    "constants": constants,
    "nothing finite": nothing_finite,
    "two formats": two_formats,
}
