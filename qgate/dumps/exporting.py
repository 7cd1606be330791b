"""A dump as the flat `.pt` files of the known collector, generation 3, for tools that read them.

Gradients at linear layers and the context of attention get the names they have there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

from qgate.dumps.known_files import BACKWARD_NAMES
from qgate.dumps.known_names import KnownName
from qgate.dumps.reading import Dump
from qgate.dumps.records import Record
from qgate.storage import places
from qgate.storage.opening import empty_folder

_LONGEST = 80
_OURS = ("known_name", "generation", "timestamp", "counter", "overflow_info")
_THEIR_NAMES = {
    ("linear", "backward", phase, ours): theirs for (phase, theirs), ours in BACKWARD_NAMES.items()
} | {("attention", "forward", "post", "context"): "output"}


@dataclass
class Exported:
    """How many files there are, and the records that have no values to write."""

    files: int = 0
    without_values: list[str] = field(default_factory=list)


def export_dump(
    dump: Dump, folder: places.Place | str, records: Iterable[Record] | None = None
) -> Exported:
    """Write the records, all unless told, into an empty folder."""
    output = empty_folder(folder, "is not empty")
    done = Exported()
    created = _created(dump)
    for record in dump.records() if records is None else records:
        if record.tensor is None:
            done.without_values.append(record.title)
            continue
        with output.writing(their_name(record, created)) as neighbor:
            torch.save(_content(record, dump.tensor(record), created), neighbor)
        done.files += 1
    return done


def their_name(record: Record, created: datetime) -> str:
    """The file name; whatever a file name cannot have becomes a hyphen, the metadata have it."""
    return KnownName(
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
        name=_safe(_their_tensor_name(record)),
    ).file_name()


def _safe(text: str, underscore: str = "_") -> str:
    made = re.sub(r"[^A-Za-z0-9._-]", "-", text).replace("_", underscore)
    return made[:_LONGEST] or "none"


def _their_tensor_name(record: Record) -> str:
    key = (record.layer_type, record.operation, record.phase, record.name)
    return _THEIR_NAMES.get(key, record.name)


def _created(dump: Dump) -> datetime:
    try:
        return datetime.fromisoformat(dump.about.created).astimezone()
    except ValueError:
        stamp = dump.files.stamp()
        return datetime.fromtimestamp(stamp.moment / 1e9 if stamp else 0.0)


def _content(record: Record, tensor: Tensor, created: datetime) -> dict[str, Any]:
    values = tensor.clone()
    return {
        "tensor": values,
        "tensor_info": _info(values),
        "metadata": {
            "save_time": f"{created:%Y-%m-%d %H:%M:%S}",
            **{key: value for key, value in record.extra.items() if key not in _OURS},
            "layer_type": record.layer_type,
            "operation": record.operation,
            "quant_type": record.quant_type,
            "tensor_name": _their_tensor_name(record),
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


def _info(tensor: Tensor) -> dict[str, Any]:
    """Their statistics over all values; limits are of the tensor's own dtype."""
    told: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "device": "cpu",
        "requires_grad": False,
        "is_leaf": True,
    }
    if not tensor.numel() or tensor.is_complex():
        return told
    x = tensor.float()
    std = float(x.std()) if x.numel() > 1 else math.nan
    told |= {"min": float(x.min()), "max": float(x.max()), "mean": float(x.mean()), "std": std}
    if tensor.is_floating_point():
        upper, lower = int((x == math.inf).sum()), int((x == -math.inf).sum())
        limit = torch.finfo(tensor.dtype).max
        told["overflow_info"] = {
            "upper_overflow_count": upper,
            "lower_overflow_count": lower,
            "upper_overflow_ratio": upper / x.numel(),
            "lower_overflow_ratio": lower / x.numel(),
            "total_overflow_ratio": (upper + lower) / x.numel(),
            "max_threshold": limit,
            "min_threshold": -limit,
        }
    return told
