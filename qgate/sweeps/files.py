"""Write the files of a sweep: text, data and pictures."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.interruptions import raise_interruption
from qgate.storage.access import write_text
from qgate.storage.files import scratch_folder
from qgate.storage.foreign import read_foreign
from qgate.sweeps.plots import PICTURES
from qgate.sweeps.record import SweepRecord, SweepView, flat_level
from qgate.sweeps.texts import results_text
from qgate.text import for_csv

if TYPE_CHECKING:
    from qgate.storage.locations import Location


def safe_name(name: str) -> str:
    """Turn a tensor's name into a file name that neither leaves the folder nor is hidden."""
    cleaned = re.sub(r"[^\w.+=,@-]+", "_", name).strip("._") or "tensor"
    return cleaned[:120]


def folder_for(root: Location, name: str, source: str, used: Collection[Location]) -> Location:
    """Return root/name, or root/name-2 … if the first belongs to another tensor."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folders = (root / own for own in names)
    return next(folder for folder in folders if folder not in used and _belongs(folder, source))


def _belongs(folder: Location, source: str) -> bool:
    """Tell whether a folder is new, or has results of this source."""
    records: list[Location] = sorted(folder.glob("*scaling_*.json"), key=str)
    for record in records:
        try:
            tensor = json.loads(read_foreign(record, "records"))["tensor"]
            return bool(tensor["source"] == source)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
    return True


def write(folder: Location, record: SweepRecord) -> list[Location]:
    """Write text and data, without the log, and return the paths."""
    view = SweepView(record)
    stem = view.stem("block_scaling" if view.is_block else "scaling")
    data = json.dumps(record, indent=1, allow_nan=False) + "\n"
    texts = {f"{stem}.json": data, f"{stem}.csv": _csv(record)}
    if not view.is_block:
        texts = {f"{view.stem('scaling_results')}.txt": results_text(record), **texts}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def draw_pictures(records: Sequence[SweepRecord]) -> tuple[list[dict[str, bytes]], str]:
    """Draw the pictures of each record as bytes, by name; the text is the reason of a failure.

    A worker does not write them: its node need not see the output folder.
    """
    pictures_of: list[dict[str, bytes]] = [{} for _ in records]
    if not records:
        return pictures_of, ""
    with scratch_folder() as folder:
        for index, record in enumerate(records):
            pictures: dict[str, bytes] = {}
            for picture in PICTURES:
                if picture.kind == record["kind"]:
                    path = Path(folder, f"{SweepView(record).stem(picture.stem)}.png")
                    try:
                        picture.draw(path, record)
                    except Exception as error:
                        raise_interruption()
                        return pictures_of, f"cannot draw the results: {error}"
                    pictures[path.name] = path.read_bytes()
            pictures_of[index] = pictures
    return pictures_of, ""


def _csv(record: SweepRecord) -> str:
    """Write one row per level, each with its tensor and the version, to be merged with others."""
    tensor = record["tensor"]
    about = {
        "tensor": tensor.get("source") or tensor["name"],
        "sha256": tensor["sha256"],
        "format": record["format"]["name"],
        "qgate": record["versions"]["qgate"],
    }
    about = {name: for_csv(value) for name, value in about.items()}
    rows = [about | flat_level(level) for level in record["levels"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
