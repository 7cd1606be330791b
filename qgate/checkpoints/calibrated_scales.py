"""Static scales of activations beside tensors of a calibration: what these lose at each scale.

A scale from other samples may be somewhat larger or smaller than the largest value here needs. It
is a finding where the error at that scale is far above that at the best one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qgate.checkpoints.activation_scales import DIVIDES
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
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


@dataclass
class _Losses:
    """Squared errors of the tensors at one place by scale, and what saturates at the stored one."""

    largest: float = 0.0
    count: int = 0
    saturated: int = 0
    energy: float = 0.0
    errors: dict[float, float] = field(default_factory=dict)


def calibration_findings(
    child: Checkpoint, weights: Iterable[StoredWeight], calibration: Calibration
) -> Iterator[CheckpointFinding]:
    """Find static scales at which the tensors of a calibration lose far more than they need to.

    A calibration with no tensor of any module that has such a scale is an error.
    """
    formats = {weight.name.removesuffix(".weight"): _format_of(weight) for weight in weights}
    scales = {
        name: (module, ending)
        for name in child.entries
        for module, _, ending in [name.rpartition(".")]
        if ending in _PORTS
        and formats.get(module)
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
        values = child.read(name).float().reshape(-1)
        if tensors is None or len(values) != 1 or not 0 < float(values) < math.inf:
            continue
        scale = 1 / float(values) if ending == DIVIDES else float(values)
        words = judge_scale(formats[module], scale, tensors)
        if words:
            yield CheckpointFinding(name, words)


def _format_of(weight: StoredWeight) -> str:
    """Return the format of activations beside a weight; nothing where it has no static scale."""
    if weight.packing is None:
        return ""
    if "NVFP4" in weight.packing.name:
        return "nvfp4"
    is_float = "F8_E4M3" in {entry.dtype for entry in weight.parts.values()}
    return "fp8_e4m3" if is_float else "int8"


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
    losses = _Losses()
    for x in tensors():
        finite = x[x.isfinite()].abs()
        losses.largest = max(losses.largest, float(finite.max()) if len(finite) else 0.0)
    if not losses.largest:
        return ""
    top = {"nvfp4": 6.0 * 448, "fp8_e4m3": 448.0, "int8": 127.0}[fmt]
    needed = losses.largest / top
    for x in tensors():
        values = _some(x)
        losses.count += values.numel()
        losses.saturated += int((values.abs() > scale * top).sum())
        losses.energy += float(values.double().square().sum())
        for tried in (scale, *(needed * 2.0 ** (-step / 2) for step in _STEPS)):
            error = float((_quantized(values, fmt, tried, top) - values).double().square().sum())
            losses.errors[tried] = losses.errors.get(tried, 0.0) + error
    best = min(losses.errors, key=lambda tried: losses.errors[tried])
    least, own = losses.errors[best], losses.errors[scale]
    floor = 1e-12 * losses.energy
    over = 10 * math.log10(max(own, floor) / max(least, floor))
    if over <= ALLOWED_DB:
        return ""
    share = losses.saturated / losses.count
    excess = f"{share:.2g} of {counted(losses.count, 'value')} saturate" if losses.saturated else (
        f"{scale / needed:.3g} times what the largest of {counted(losses.count, 'value')} needs"
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
