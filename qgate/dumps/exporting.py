"""Export a dump as the flat `.pt` files of megatron-tensor-saver, generation 3.

Gradients at linear layers and the context of attention get the names they have in that layout.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

import torch
from torch import Tensor

from qgate.charts.overviews import Overview, Overviewed
from qgate.dumps.reading import Dump
from qgate.dumps.record import Record
from qgate.dumps.tensor_saver_files import BACKWARD_NAMES
from qgate.dumps.tensor_saver_names import TensorFileName
from qgate.storage import locations
from qgate.storage.new_folders import filled_folder
from qgate.text import counted

_LONGEST = 80
_OWN_EXTRAS = ("known_name", "generation", "timestamp", "counter", "overflow_info")
_NAMES = {
    ("linear", "backward", phase, ours): theirs for (phase, theirs), ours in BACKWARD_NAMES.items()
} | {("attention", "forward", "post", "context"): "output"}


@dataclass(repr=False)
class ExportReport(Overviewed):
    """Number of files written, and titles of the records without values to write."""

    files: int = 0
    without_values: list[str] = field(default_factory=list)

    def overview(self) -> Overview:
        """Count the files, and name the records without values."""
        return Overview(
            f"{counted(self.files, 'file')} written",
            self.without_values,
            lambda title: {"without values": title},
            "record",
        )


def export_dump(
    dump: Dump, folder: locations.Location | str, records: Iterable[Record] | None = None
) -> ExportReport:
    """Write the records, by default all, into an empty folder, where they appear at the end."""
    report = ExportReport()
    try:
        created = datetime.fromisoformat(dump.manifest.created).astimezone()
    except ValueError:
        stamp = dump.files.stamp()
        created = datetime.fromtimestamp(stamp.moment / 1e9 if stamp else 0.0)
    with filled_folder(folder) as output:
        for record in dump.records() if records is None else records:
            if record.tensor is None:
                report.without_values.append(record.title)
                continue
            # In memory first: where a disk is full torch raises a RuntimeError of its own.
            written = io.BytesIO()
            torch.save(_content(record, dump.tensor(record), created), written)
            output.put(file_name(record, created), written.getvalue())
            report.files += 1
    return report


def file_name(record: Record, created: datetime) -> str:
    """Name a file; a character that a file name cannot have becomes a hyphen."""
    return TensorFileName(
        timestamp=str(record.extra.get("timestamp") or f"{created:%Y%m%d_%H%M%S}"),
        counter=record.order,
        iteration=max(0, record.iteration or 0),
        layer_type=_safe(record.layer_type, "-"),
        layer=None if record.layer is None else max(0, record.layer),
        operation=record.operation,
        phase=record.phase,
        component=_safe(record.component, "-"),
        quant_type=_safe(record.quant_type or "none"),
        rank=record.rank,
        sample=max(0, record.sample or 0),
        name=_safe(_tensor_name(record)),
    ).file_name()


def _safe(text: str, underscore: str = "_") -> str:
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", text).replace("_", underscore)
    return safe[:_LONGEST] or "none"


def _tensor_name(record: Record) -> str:
    key = (record.layer_type, record.operation, record.phase, record.name)
    return _NAMES.get(key, record.name)


def _content(record: Record, tensor: Tensor, created: datetime) -> dict[str, object]:
    values = tensor.clone()
    return {
        "tensor": values,
        "tensor_info": _info(values),
        "metadata": {
            "save_time": f"{created:%Y-%m-%d %H:%M:%S}",
            **{key: value for key, value in record.extra.items() if key not in _OWN_EXTRAS},
            "layer_type": record.layer_type,
            "operation": record.operation,
            "quant_type": record.quant_type,
            "tensor_name": _tensor_name(record),
            "layer_idx": record.layer,
            "phase": record.phase,
            "component": record.component,
            "rank": record.rank,
            "iteration": record.iteration or 0,
            "sample_idx": record.sample or 0,
            "module": record.module,
            "call": record.call,
        },
    }


def _info(tensor: Tensor) -> dict[str, object]:
    """Return statistics over all values; limits are of the tensor's own dtype."""
    info: dict[str, object] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "device": "cpu",
        "requires_grad": False,
        "is_leaf": True,
    }
    if not tensor.numel() or tensor.is_complex():
        return info
    x = tensor.float()
    std = float(x.std()) if x.numel() > 1 else math.nan
    info |= {"min": float(x.min()), "max": float(x.max()), "mean": float(x.mean()), "std": std}
    if tensor.is_floating_point():
        upper, lower = int((x == math.inf).sum()), int((x == -math.inf).sum())
        limit = torch.finfo(tensor.dtype).max
        info["overflow_info"] = {
            "upper_overflow_count": upper,
            "lower_overflow_count": lower,
            "upper_overflow_ratio": upper / x.numel(),
            "lower_overflow_ratio": lower / x.numel(),
            "total_overflow_ratio": (upper + lower) / x.numel(),
            "max_threshold": limit,
            "min_threshold": -limit,
        }
    return info
