"""Made-up runs for pages and texts: gates over modes and layers, failures of every kind, pictures.

They have what a real run leaves (`qgate.results.schema`), at any size and without a model.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qgate.gate.checks import Check
from qgate.gate.texts import finding
from qgate.page.runs import Run, run_of_records
from qgate.results.files import line, new_header
from qgate.results.pictures import Picture
from qgate.results.schema import Record

KINDS = ("budget", "regression", "absolute", "nonfinite", "missing", "absent")
MODES = ("2-1", "2-2", "2-4", "fp8_e4m3", "mxfp8_e4m3", "int8", "hif8", "nvfp4")
HOSTILE = (
    "<script>alert(1)</script>",
    "\"quoted\" 'twice' & more",
    "control\x00\x1b[31m\x07characters",
    "right\u202eto\u2066left",
    "javascript:alert(1)",
    "long_" + 60 * "very_" + "name",
    "=HYPERLINK(0)",
    "</style></td></table>",
)


def made_header(models: Sequence[str] = ("tiny-mamba",), **more: Any) -> Record:
    return new_header(
        torch="2.13.0+cpu",
        device="cpu",
        seed=0,
        commit="37826b17608fcbb8a6301df3da3dff979dc0e336",
        command=["suites", "--mode", "2-*", "-q"],
        modes=list(MODES),
        plans={},
        metrics=[{"name": "relative_mse", "direction": "lower"}],
        limits=[],
        models={name: {"weights": 64 * "8", "inputs": 64 * "b"} for name in models},
        **{"reference": "fp32", "complete": True, **more},
    )


def made_check(kind: str, site: str, layer: str, error: float, rank: float) -> Record:
    """One check; a failing one of the kind, or with `rank` below 1 a regression that holds."""
    check: Record = {
        "site": site, "layer": layer, "scope": "carried", "order": 0, "metric": "relative_mse",
        "kind": kind, "passed": False, "value": error, "side": "<=", "bound": error / rank,
        "against": error / rank / 1.02, "times": rank, "improved": False, "quantizer": "",
        "allowed": 0.02, "source": "default", "reason": "",
    }  # fmt: skip
    if kind == "passed":
        check |= {"kind": "regression", "passed": True, "improved": rank < 0.2}
    elif kind == "budget":
        check |= {"quantizer": "mxfp8_e4m3 per 32", "allowed": 0.5}
    elif kind == "absolute":
        check |= {"against": None, "allowed": None, "reason": "the next layer overflows"}
    elif kind == "nonfinite":
        check |= {"metric": "nonfinite", "value": 3.0, "bound": 0.0, "against": None,
                  "times": math.inf, "reason": "2 NaN, 1 +inf of 4,096"}  # fmt: skip
    elif kind in ("missing", "absent"):
        check |= {"bound": None, "against": None, "times": None, "allowed": None}
    if kind == "absent":
        check |= {"metric": "", "value": None, "reason": "accepted, but not measured"}
    return check


def made_pictures(random_: random.Random, error: float, size: int = 24) -> list[Picture]:
    """One of every kind, with shapes like those of real tensors."""
    bins = [int(4000 * math.exp(-0.5 * ((k - 20) / 5) ** 2)) for k in range(41)]
    cells: list[int] = []
    for column in range(size):
        for row in range(max(0, column - 2), min(size, column + 3)):
            cells += [column, row, 1 + random_.randrange(400)]
    octaves = [math.exp(-0.5 * ((k - 8) / 2) ** 2) for k in range(12)]
    total = sum(octaves)
    shares = [octave / total for octave in octaves]
    levels = [(float(k), error * (1 + 0.3 * (k + 2) ** 2)) for k in range(-10, 11)]
    return [
        {
            "kind": "errors", "elements": 65536, "sampled": 16384, "rms": 0.7,
            "bins": {"edge": 3 * math.sqrt(error), "counts": bins, "below": 3, "above": 1},
            "density": {"size": size, "edge": 3.1, "cells": cells},
            "octaves": {"low": -8, "error": shares, "energy": shares[::-1],
                        "elements": [int(9000 * octave) for octave in shares]},
            "channels": [{"index": 17 * k, "share": 0.4 / (k + 1), "relative_mse": error * (9 - k)}
                         for k in range(8)],
            "channel_count": 256,
        },
        {"kind": "sweep", "format": "e4m3", "levels": levels, "recommended": -2.0, "accepted": 0.0},
        {
            "kind": "magnitudes", "format": "e4m3", "low": -12,
            "counts": [int(5000 * octave) for octave in shares], "zeros": 12, "nonfinite": 0,
            "largest": 8.8, "smallest": -9.0, "saturated": 3, "flushed": 40,
        },
    ]  # fmt: skip


def made_records(
    gates: int = 120,
    *,
    failing: int = 6,
    layers: int = 12,
    models: Sequence[str] = ("tiny-mamba",),
    pictures: bool = True,
    modes: Sequence[str] = MODES,
    seed: int = 0,
) -> Iterator[Record]:
    """Two records per gate, carried and local; failures of each kind in turn, spread out."""
    random_ = random.Random(seed)
    bad = {round(k * gates / failing): KINDS[k % len(KINDS)] for k in range(failing)}
    for number in range(gates):
        layer = number % layers
        mode = modes[number // layers % len(modes)]
        model = models[number // (layers * len(modes)) % len(models)]
        turn = number // (layers * len(modes) * len(models))
        name = f"layers.{layer}"
        site = f"backbone.{name}.mixer.in_proj:output" + (f".{turn}" if turn else "")
        error = 10 ** (
            -5.5 + 2.4 * modes.index(mode) / len(modes) + layer / layers + random_.random()
        )
        scope = "backward" if turn % 2 else "carried"
        kind = bad.get(number, "passed")
        rank = 1.2 + 30 * random_.random() if number in bad else 0.1 + 0.89 * random_.random()
        check = made_check(kind, site, name, error, rank) | {"scope": scope}
        same: Record = {
            "suite": "layer_outputs" if turn % 2 == 0 else "gradients",
            "node": f"suites/test_layer_outputs.py::test_layer_outputs[{model}-{mode}-{name}-{turn}]",
            "model": model, "mode": mode, "layer": name, "order": layer, "title": mode,
            "seconds": 0.01 + random_.random(), "attempt": 0, "file": "suites/test_layer_outputs.py",
            "line": 4, "ideal": {},
        }  # fmt: skip
        accepted = {"relative_mse": error / rank / 1.02} if kind != "missing" else {}
        values: dict[str, float | None] = {"relative_mse": error, "mse": error * 0.7}
        if kind == "nonfinite":
            values = {"relative_mse": math.nan, "mse": math.nan}
        first: Record = {**same, "site": site, "scope": scope, "values": values,
                         "accepted": accepted, "checks": [check], "passed": check["passed"]}  # fmt: skip
        if pictures:
            first["pictures"] = made_pictures(random_, error)
        yield with_finding(first)
        local = made_check("passed", site, name, error / 9, 0.5 + 0.4 * random_.random())
        yield {**same, "site": site, "scope": "local", "values": {"relative_mse": error / 9},
               "accepted": {"relative_mse": error / 9}, "checks": [local | {"scope": "local"}],
               "passed": True}  # fmt: skip


def with_finding(record: Record) -> Record:
    """The record with the words that the gate puts into one that failed."""
    if record["passed"]:
        return record
    check = next(check for check in record["checks"] if not check["passed"])
    return {**record, "finding": finding(Check(**check))}


def read_back(records: Iterable[Record]) -> list[Record]:
    """Return records as a results file gives them, which has no number for NaN."""
    return [json.loads(line(record)) for record in records]


def made_run(gates: int = 120, *, header: Record | None = None, **more: Any) -> Run:
    """The run of such records, as it is read back from its file."""
    head = header or made_header(more.get("models", ("tiny-mamba",)))
    return run_of_records(head, read_back(made_records(gates, **more)), "made")


def hostile_run() -> Run:
    """Every name there is, in every place where a name can be."""
    names = HOSTILE
    records = []
    for number, record in enumerate(made_records(len(names) * 2, failing=len(names), layers=4)):
        name = names[number % len(names)]
        record |= dict.fromkeys(("suite", "model", "mode", "layer", "node"), f"{name}{number}")
        record |= {
            "site": f"{name}:{number}",
            "scope": name if number % 5 == 0 else record["scope"],
        }
        record["checks"] = [
            {**check, "metric": name, "reason": name, "quantizer": name, "source": name}
            for check in record["checks"]
        ]
        records.append(json.loads(line(record)))
    header = made_header(names, broken={name: f"{name}\n{name}" for name in names})
    header |= {"errors": list(names), "device": names[0], "commit": names[1], "command": names}
    return run_of_records(header, records, names[0])


def write_results(path: Path, gates: int, **more: Any) -> Path:
    """The same as a file."""
    with path.open("w", encoding="utf-8") as file:
        file.write(line(made_header(more.get("models", ("tiny-mamba",)))))
        file.writelines(line(record) for record in made_records(gates, **more))
    return path
