"""Static scales of activations beside tensors of a calibration: what these lose at each scale.

A scale from other samples may be somewhat larger or smaller than the largest value here needs. It
is a finding where the error at that scale is far above that at the best one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from qgate.checkpoints.activation_scales import DIVIDES, LARGEST_CODES, activation_format
from qgate.checkpoints.compute import ratio_db, squared
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.dumps import Dump, Record
from qgate.errors import QgateError, unknown
from qgate.formats import Quantizer
from qgate.text import counted

Tensors = Callable[[], Iterator[Tensor]]
Calibration = Mapping[tuple[str, str], Tensors]
"""The tensors at the input or output of a module, by its name and "input" or "output"."""

ALLOWED_DB = 6.0
"""Error above that of the best scale: twice the scale of int8 costs 6 dB, of FP8 next to none."""
_STEPS = range(-2, 13)
"""Half octaves below the largest value at which scales are tried."""
_MOST = 1 << 20
"""Values of one tensor that are looked at, about."""
_BLOCK = 16
_PORTS = {"input_scale": "input", DIVIDES: "input", "output_scale": "output"}


def open_calibration(spec: str) -> Calibration:
    """Return the inputs and outputs of modules in a dump, read when they are asked for."""
    dump = Dump.open(spec)
    records: dict[tuple[str, str], list[Record]] = {}
    for record in dump.records(operation="forward", name=("input", "output")):
        if record.module and record.tensor is not None:
            records.setdefault((record.module, record.name), []).append(record)
    if not records:
        raise QgateError(
            f"{spec} has no inputs or outputs of modules with their values: collect them with "
            "`qgate collect --sites linear -- COMMAND`."
        )

    def reader(listed: list[Record]) -> Tensors:
        return lambda: (dump.tensor(record) for record in listed)

    return {site: reader(listed) for site, listed in records.items()}


def calibration_findings(
    child: Checkpoint, weights: Iterable[StoredWeight], calibration: Calibration
) -> Iterator[CheckpointFinding]:
    """Find static scales at which the tensors of a calibration lose far more than they need to.

    A calibration with no tensor of any module that has such a scale is an error.
    """
    formats = {w.name.removesuffix(".weight"): activation_format(w) for w in weights if w.packing}
    scales = {
        name: (module, ending)
        for name in child.entries
        for module, _, ending in [name.rpartition(".")]
        if ending in _PORTS
        and module in formats
        and f"{module}.input_zero_point" not in child.entries  # its codes are not symmetric
    }
    if not scales:
        raise QgateError(
            f"{child.label} has no static scale of activations (input_scale, input_global_scale, "
            "output_scale): leave --calibration out."
        )
    places = {
        name: _place(module, _PORTS[ending], calibration)
        for name, (module, ending) in scales.items()
    }
    if not any(places.values()):
        modules = [module for module, _ in calibration]
        raise unknown("module of the calibration", next(iter(scales.values()))[0], modules)
    for name, (module, ending) in scales.items():
        tensors = places[name]
        if tensors is None:
            continue
        values = child.read(name).float().reshape(-1)
        if len(values) != 1 or not 0 < float(values) < math.inf:
            continue
        scale = 1 / float(values) if ending == DIVIDES else float(values)
        words = judge_scale(formats[module], scale, tensors)
        if words:
            yield CheckpointFinding(name, words)


def _place(module: str, port: str, calibration: Calibration) -> Tensors | None:
    """Return the tensors of a module, whose name may begin elsewhere in the model."""
    if (module, port) in calibration:
        return calibration[module, port]
    alike = [
        tensors
        for (name, of), tensors in calibration.items()
        if of == port and (name.endswith(f".{module}") or module.endswith(f".{name}"))
    ]
    return alike[0] if len(alike) == 1 else None


def judge_scale(fmt: str, scale: float, tensors: Tensors) -> str:
    """Say that a scale loses far more of some tensors than the best one; empty if it does not."""
    largest = 0.0
    for x in tensors():
        finite = x[x.isfinite()].abs()
        largest = max(largest, float(finite.max()) if len(finite) else 0.0)
    if not largest:
        return ""
    top = LARGEST_CODES[fmt]
    needed = largest / top
    count, saturated, energy = 0, 0, 0.0
    errors = dict.fromkeys((scale, *(needed * 2.0 ** (-step / 2) for step in _STEPS)), 0.0)
    for x in tensors():
        values = _some(x)
        count += values.numel()
        saturated += int((values.abs() > scale * top).sum())
        energy += squared(values)
        for tried in errors:
            errors[tried] += squared(_quantized(values, fmt, tried, top) - values)
    best = min(errors, key=lambda tried: errors[tried])
    over = ratio_db(errors[scale], errors[best], energy)
    if over <= ALLOWED_DB:
        return ""
    excess = f"{saturated:,} of {counted(count, 'value')} saturate" if saturated else (
        f"{scale / needed:.3g} times what the largest of {counted(count, 'value')} needs"
    )  # fmt: skip
    return (
        f"at scale {scale:.3g} the calibration loses {over:.1f} dB more than at the best, "
        f"{best:.3g}: {excess}"
    )


def _some(x: Tensor) -> Tensor:
    """Return the rows of a tensor that are looked at, in float32 and whole blocks."""
    width = x.shape[-1] if x.dim() else 1
    rows = x.detach().float().reshape(-1, width).nan_to_num(0.0, 0.0, 0.0)
    rows = rows[:: max(1, rows.numel() // _MOST)]
    return torch.nn.functional.pad(rows, (0, -width % _BLOCK))


def _quantized(rows: Tensor, fmt: str, scale: float, top: float) -> Tensor:
    """Return the values of a format at one scale of the whole tensor."""
    if fmt != "nvfp4":
        return Quantizer(fmt, scale=scale)(rows)
    # Its scale is that of its largest value: another row has that, and none a larger one.
    largest = torch.full((1, rows.shape[1]), scale * top)
    values = Quantizer(fmt)(torch.cat([rows.clamp(-scale * top, scale * top), largest]))
    return values[:-1]
