"""Records of activations as an analysis writes them, made in numpy so that figures belong together.

`usual` looks like a small transformer with one massive channel and a token that stands out; `large`
has 80 blocks with long names; `single` one layer; `hostile` names that want to be markup.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np

from qgate.activation_stats.record import ACTIVATIONS, ActivationsRecord
from tests.drawing.dump_records import FORMATS, PROBABILITIES, outcome

Record = dict[str, Any]
OUTLIER = " niz"
POSITION = 37
LOUD = 5
_FORMATS = ("fp8_e4m3", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4")


def vector(values: np.ndarray) -> Record:
    ordered = np.sort(values)
    return {
        "top": ordered[::-1][:3].tolist(),
        "median": float(ordered[(len(ordered) - 1) // 2]),
        "low": ordered[:3].tolist(),
        "most": float(ordered[-1]),
    }


def summary(x: np.ndarray, nan: int = 0) -> Record:
    flat = x.reshape(-1)
    rms = float(np.sqrt((flat**2).mean()))
    std = float(flat.std())
    sizes = np.abs(x).max(0)
    order = np.argsort(-sizes)
    return {
        "tensors": 4, "elements": int(flat.size), "counted": int(flat.size), "source": "values",
        "counted_as": "bfloat16", "nan": nan, "posinf": 0, "neginf": 0, "zeros": 0,
        "min": float(flat.min()), "max": float(flat.max()), "amax": float(np.abs(flat).max()),
        "amin": float(np.abs(flat).min()), "mean": float(flat.mean()), "std": std, "rms": rms,
        "skew": 0.0, "kurtosis": float(((flat - flat.mean()) ** 4).mean() / std**4 - 3),
        "quantiles": {f"{p:g}": float(np.quantile(flat, p)) for p in PROBABILITIES},
        "channels": {
            "count": len(sizes), "median": float(np.median(sizes)),
            "largest": [(int(c), float(sizes[c])) for c in order[:5]],
            "curve": np.sort(sizes)[::-1].tolist(),
        },
        "formats": {name: outcome(x, name) for name in _FORMATS if name in FORMATS},
    }  # fmt: skip


def outliers(x: np.ndarray, threshold: float, *, hit: bool, loud: bool) -> Record:
    sizes = np.abs(x).max(1)
    channels = np.abs(x).max(0)
    token = {"sample": 0, "position": POSITION, "value": float(sizes[POSITION]), "channel": LOUD,
             "ratio": float(sizes[POSITION] / np.median(sizes)), "text": OUTLIER}  # fmt: skip
    outliers: Record = {
        "threshold": threshold, "counts": [1, 1, 0, 1] if hit else [0] * 4,
        "mean_count": 0.75 if hit else 0.0, "undefined": 0,
        "positions": {str(POSITION): 2, "0": 1} if hit else {}, "tokens": [token] if hit else [],
        "texts": {OUTLIER: 2, "\n": 1} if hit else {},
        "max_over_rms": float(sizes.max() / np.sqrt((x**2).mean())),
        "channel_ratio": float(channels.max() / np.median(channels)),
        "token_ratio": float(sizes.max() / np.median(sizes)), "channels": [],
        "massive": [token] if hit else [],
    }  # fmt: skip
    if loud:
        outliers["channels"] = [
            {"channel": LOUD, "amax": float(channels[LOUD]), "ratio": outliers["channel_ratio"],
             "tokens": 0.9, "samples": 1.0, "systematic": True},
            {"channel": 1, "amax": float(channels[1]), "ratio": 11.0, "tokens": 0.01,
             "samples": 0.25, "systematic": False},
        ]  # fmt: skip
    return outliers


def layer(module: str, role: str, number: int | None, **more: Any) -> Record:
    """One module in one role, with 64 tokens of random values."""
    return {"module": module, "role": role, "layer": number, **json.loads(_values(role, **more))}


@functools.cache
def _values(
    role: str,
    *,
    seed: int = 0,
    width: int = 48,
    kind: str = "linear",
    hit: bool = False,
    loud: bool = False,
    full: bool = True,
    scale: float = 1.0,
) -> str:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((64, width)) * scale
    if loud:
        x[:, LOUD] *= 40
    if hit:
        x[POSITION, LOUD] = 900.0 * scale
    values: Record = {
        "kind": kind, "width": width,
        "samples": 4, "calls": 4, "tokens": 256, "coverage": 1.0, "portrait": summary(x),
        "magnitude": {
            "token": vector(np.abs(x).max(1)), "channel": vector(np.abs(x).max(0)),
            "all": vector(np.abs(x).reshape(-1)),
        },
    }  # fmt: skip
    if role != "weight":
        values["outliers"] = outliers(x, 64.0, hit=hit, loud=loud)
    if role == "input" and full:
        counts, edges = np.histogram(x, 50)
        values["histogram"] = {
            "low": float(edges[0]),
            "high": float(edges[-1]),
            "counts": counts.tolist(),
        }
        percentiles = (0, 0.01, 1, 25, 50, 75, 99, 99.99, 100)
        values["ranges"] = {
            "percentiles": {f"{p:g}": np.percentile(x, p, axis=0).tolist() for p in percentiles},
            "error": 0.035,
        }
        values["smoothing"] = [
            smoothed(name, seed) for name in ("int8", "mxfp8_e4m3", "mxfp4_e2m1")
        ]
    if role == "output" and full:
        sizes = np.abs(x)
        values["heat_map"] = {
            "sample": 0, "tokens": 64, "channels": width, "cells": sizes.tolist(),
            "stats": {"mean": float(sizes.mean()), "std": float(sizes.std()),
                      "min": float(sizes.min()), "max": float(sizes.max()),
                      "p99": float(np.quantile(sizes, 0.99)),
                      "max_over_p99": float(sizes.max() / np.quantile(sizes, 0.99))},
        }  # fmt: skip
    return json.dumps(values)


def smoothed(name: str, seed: int) -> Record:
    start = {"int8": 22.0, "mxfp8_e4m3": 30.0}.get(name, 16.0) + seed % 5
    curve = {f"{a:g}": start + 8 * math.sin(math.pi * a) for a in (0, 0.25, 0.5, 0.75, 1)}
    return {"format": name, "alpha": 0.5, "before_db": start - 1, "after_db": max(curve.values()),
            "hadamard_db": start + 5, "curve": curve}  # fmt: skip


def record(layers: list[Record], panels: Record, **more: Any) -> ActivationsRecord:
    fields: Record = {
        "kind": ACTIVATIONS, "model": "hf:models/small", "architecture": "LlamaForCausalLM",
        "device": "cpu", "versions": {"qgate": "0.1.0", "torch": "2.13", "python": "3.11"},
        "settings": {}, "data": {"source": "built-in", "samples": 4, "tokens": 256, "seed": 0},
        "notes": ["samples are windows from inside a text, without any BOS."],
        "seconds": {"forward": 1.0, "statistics": 0.5}, "layers": layers, "panels": panels,
        "sensitivity": [], "proposals": [],
    }  # fmt: skip
    return fields | more  # type: ignore[return-value]


def blocks(count: int, names: tuple[str, ...], **more: Any) -> ActivationsRecord:
    """So many blocks; one of them has a token that stands out, two a channel."""
    layers, at = [], 0
    for name in names:
        for number in range(count):
            module = f"{more.get('start', 'model.layers')}.{number}.{name}"
            for role in ("input", "output", "weight"):
                at += 1
                full = count <= 8 or (role == "output" and number < 2)
                full = full or (role == "input" and number in (0, 26, 53, 79))
                entry = layer(module, role, number, seed=at if count < 9 else at % 7, full=full,
                             loud=name.endswith("down_proj") and role == "input" and number in (1, 2),
                             scale=1.0 + (number if count < 9 else number % 4) / 8)  # fmt: skip
                layers.append(entry)
    for number in range(count):
        at += 1
        module = f"{more.get('start', 'model.layers')}.{number}"
        layers.append(
            layer(module, "output", number, seed=at % 7, kind="block", hit=number == 1, full=False)
        )
    patterns = {name.replace(".", r"\."): name for name in names}

    def panel(only: tuple[int, ...] | None = None) -> Record:
        return {
            pattern: [
                f"{more.get('start', 'model.layers')}.{n}.{name}"
                for n in range(count)
                if only is None or n in only
            ]
            for pattern, name in patterns.items()
        }

    drawn_blocks = (0, 26, 53, 79) if count > 8 else (0, 1, 2, 3)
    panels = {
        "magnitude_input": panel(), "magnitude_output": panel(), "magnitude_weight": panel(),
        "outliers": {"blocks": [f"{more.get('start', 'model.layers')}.{n}" for n in range(count)]},
        "distribution": panel(), "percentile_range": panel(drawn_blocks),
        "heat_map": dict([next(iter(panel((0, 1)).items()))]),
    }  # fmt: skip
    modules = [entry["module"] for entry in layers if entry["role"] == "input"]
    sensitivity = [
        {"module": name, "format": "mxfp4_e2m1", "sqnr_db": 12.0 + 0.9 * (k % 41),
         "local_sqnr_db": 10.0 + k % 11, "loss_change": 0.05 / (k + 1)}
        for k, name in enumerate(modules)
    ]  # fmt: skip
    sensitivity.sort(key=lambda entry: (entry["sqnr_db"], entry["module"]))
    keep = [entry["module"] for entry in sensitivity[:3]]
    proposal = {"format": "mxfp4_e2m1", "target": "SQNR of the output ≥ 20 dB", "reached": True,
                "keep": keep, "value": 20.4, "all_quantized": 9.1,
                "curve": [(0, 9.1), (2, 18.0), (3, 20.4), (6, 23.0)]}  # fmt: skip
    return record(layers, panels, sensitivity=sensitivity, proposals=[proposal])


def usual() -> ActivationsRecord:
    return blocks(5, ("self_attn.q_proj", "mlp.down_proj"))


def large() -> ActivationsRecord:
    """As large as it gets: 80 blocks of long names."""
    start = "model.language_model.transformer_decoder_stack.layers"
    names = tuple(f"self_attn.{n}_proj" for n in "qkvo") + tuple(
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    )
    return blocks(80, names, start=start)


def single() -> ActivationsRecord:
    """One layer without a number, all switched on."""
    layers = [
        layer("head", role, None, seed=k) for k, role in enumerate(("input", "output", "weight"))
    ]
    panel = {"head": ["head"]}
    names = ("magnitude_input", "magnitude_output", "magnitude_weight", "outliers", "distribution",
             "percentile_range", "heat_map")  # fmt: skip
    one = {"module": "head", "format": "int8", "sqnr_db": 40.0, "local_sqnr_db": 40.0}
    return record(layers, dict.fromkeys(names, panel), sensitivity=[one])


def little(model: str = "hf:models/small") -> ActivationsRecord:
    """One layer in one role, with four pictures, two of which have nothing to show."""
    record = single()
    record["model"] = model
    record["panels"] = {"magnitude_input": {"head": ["head"]}}
    record["layers"], record["sensitivity"] = record["layers"][:1], []
    del record["layers"][0]["smoothing"], record["layers"][0]["outliers"]
    return record


def hostile() -> ActivationsRecord:
    """Names that want to be markup, formulas or parts of other folders."""
    bad = "<script>alert(1)</script>$x^2$"
    record: Record = dict(usual())
    record["model"] = f"hf:../../{bad}"
    text = str(record["layers"][0]["module"])
    for entry in record["layers"]:
        entry["module"] = entry["module"].replace(text, f"=cmd|{bad}")
        if "outliers" in entry and entry["outliers"]["tokens"]:
            entry["outliers"]["tokens"][0]["text"] = bad
            entry["outliers"]["texts"] = {bad: 3, "‮$\\frac": 1}
    for kind, panel in record["panels"].items():
        record["panels"][kind] = {
            f"{bad}{pattern}": [name.replace(text, f"=cmd|{bad}") for name in names]
            for pattern, names in panel.items()
        }
    record["notes"] = [f"note {bad}"]
    record["proposals"][0]["keep"] = [f"=cmd|{bad}"]
    return record  # type: ignore[return-value]


def broken() -> ActivationsRecord:
    """Values that are not finite, and a layer of which nothing was seen."""
    record: Record = dict(usual())
    record["layers"][0]["portrait"]["nan"] = 3
    empty = layer("model.layers.9.mlp.down_proj", "input", 9, full=False)
    empty |= {"samples": 0, "calls": 0, "tokens": 0, "coverage": 0.0, "width": 0, "magnitude": {}}
    empty["portrait"] = {"tensors": 0, "elements": 0, "counted": 0, "source": "values",
                         "counted_as": "", "nan": 0, "posinf": 0, "neginf": 0}  # fmt: skip
    del empty["outliers"]
    record["layers"].append(empty)
    record["panels"]["magnitude_input"][r"mlp\.down_proj"].append(empty["module"])
    return record  # type: ignore[return-value]


RECORDS = {"usual": usual, "large": large, "single": single, "hostile": hostile, "broken": broken}
