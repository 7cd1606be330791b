"""The files of a sweep: text, data and pictures under the names users know."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.report._files import write_text
from qgate.report.sweeps import texts as sweep_text
from qgate.text import for_csv

if TYPE_CHECKING:
    from qgate.report.plots.sweep import Picture
    from qgate.urls import Place

Record = dict[str, Any]


def write(folder: Place, record: Record) -> list[Place]:
    """Text and data, but for the log; the paths written."""
    name = record["format"].get("asked", record["format"]["name"])
    if record["kind"] == "block":
        stem = folder / f"mxfp_block_scaling_{name}"
        files = {".json": _json(record), ".csv": _csv(record)}
        texts = {stem.with_name(stem.name + end): text for end, text in files.items()}
    else:
        texts = {
            folder / f"mxfp_scaling_results_{name}.txt": sweep_text.results_text(record),
            folder / f"mxfp_scaling_{name}.json": _json(record),
            folder / f"mxfp_scaling_{name}.csv": _csv(record),
        }
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def picture_names(record: Record) -> list[str]:
    """The files that `draw` writes."""
    return [name for name, _ in _pictures(record)]


def draw(folder: Path, record: Record) -> None:
    """The pictures, which take most of the time of a sweep's files."""
    for name, picture in _pictures(record):
        picture.draw(folder / name, record)


def _pictures(record: Record) -> list[tuple[str, Picture]]:
    from qgate.report.plots.sweep import PICTURES

    name = record["format"].get("asked", record["format"]["name"])
    return [(f"{each.stem}_{name}.png", each) for each in PICTURES if each.kind == record["kind"]]


def _json(record: Record) -> str:
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def _csv(record: Record) -> str:
    """One row per level, the metrics and severities as columns of their own.

    Each row names its tensor and the version, so that rows of many files can be put together.
    """
    tensor = record["tensor"]
    about = {
        "tensor": tensor.get("source") or tensor["name"],
        "sha256": tensor["sha256"],
        "format": record["format"]["name"],
        "qgate": record["versions"]["qgate"],
    }
    about = {name: for_csv(each) for name, each in about.items()}
    rows = []
    for level in record["levels"]:
        row = {k: v for k, v in level.items() if k not in ("metrics", "severity", "marks")}
        row |= level["metrics"]
        row |= {f"{kind}_severity": grade for kind, grade in level["severity"].items()}
        rows.append(
            {**{k: for_csv(v) for k, v in about.items()}, **row, "marks": " ".join(level["marks"])}
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
