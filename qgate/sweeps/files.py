"""The files of a sweep: text, data and pictures under the names users know."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.storage.writing import write_text
from qgate.sweeps import texts as sweep_text
from qgate.sweeps.record import file_stem
from qgate.text import for_csv

if TYPE_CHECKING:
    from qgate.storage.places import Place
    from qgate.sweeps.plots import SweptPicture

Record = dict[str, Any]


def write(folder: Place, record: Record) -> list[Place]:
    """Text and data, but for the log; the paths written."""
    block = record["kind"] == "block"
    stem = file_stem(record, "block_scaling" if block else "scaling")
    texts = {f"{stem}.json": _json(record), f"{stem}.csv": _csv(record)}
    if not block:
        results = f"{file_stem(record, 'scaling_results')}.txt"
        texts = {results: sweep_text.results_text(record), **texts}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def picture_names(record: Record) -> list[str]:
    """The files that `draw` writes."""
    return [name for name, _ in _pictures(record)]


def draw(folder: Path, record: Record) -> None:
    """The pictures, which take most of the time of a sweep's files."""
    for name, picture in _pictures(record):
        picture.draw(folder / name, record)


def _pictures(record: Record) -> list[tuple[str, SweptPicture]]:
    from qgate.sweeps.plots import PICTURES

    mine = [each for each in PICTURES if each.kind == record["kind"]]
    return [(f"{file_stem(record, each.stem)}.png", each) for each in mine]


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
