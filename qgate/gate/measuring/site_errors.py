"""Errors of one comparison at a site: plain numbers, with and without massive elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.gate.measured import Measured
from qgate.gate.measuring.pictures import error_picture
from qgate.models import Model
from qgate.models.rows import split_rows
from qgate.results.kinds import TENSOR_METRICS, scope_of
from qgate.stats import ErrorStats, errors, massive_beyond

FLOOR = 1e-12
# A thousandth of the mean amplitude. The quietest channels of the tiny models have 1e-3 of the mean
# energy, beside outliers of 1000 times the amplitude 1e-6; float32 noise is 1e-13 of the mean.
_QUIET = 1e-6
PART_METRICS = ("relative_mse", "correlation")
Pairs = Sequence[tuple[Tensor, Tensor]]


def site_errors(
    site: str,
    layer: str,
    scope: str,
    order: int,
    pairs: Pairs,
    *,
    beyond: float | None = None,
    ideal: float | None = None,
    unexplained: str = "",
    quantizer: str = "",
    draw: bool = False,
    is_gated: bool = True,
    whole: bool = False,
) -> Measured:
    """Compare all pairs at a site; with `beyond`, also its worst channel and what is not massive.

    `ideal` is the relative MSE of an ideal quantizer there, None where nothing is quantized;
    `unexplained` says why a kernel's tensor is not what that quantizer gives. What is not gated
    is held against the ideal alone. Of `whole` samples the worst one is measured, and the worst
    token of a local error.
    """
    stats = compare(pairs, channels=beyond is not None)
    parts = {} if beyond is None else tensor_parts(stats, pairs, beyond)
    if whole:
        parts |= worst_rows(pairs, tokens=scope_of(scope).is_local)
    texts = {"quantizer": quantizer} if quantizer else {}
    return Measured(
        site=site,
        layer=layer,
        scope=scope,
        values=stats.metrics(),
        order=order,
        nonfinite=stats.actual_non_finite.total,
        nonfinite_reference=stats.reference_non_finite.total,
        ideal=None if ideal is None else {"relative_mse": ideal},
        quantizer=quantizer,
        why={"budget": unexplained} if unexplained else None,
        floor=FLOOR,
        parts=parts,
        texts=texts,
        gated=(*TENSOR_METRICS, *texts) if is_gated else (),
        pictures=(error_picture(pairs, stats),) if draw else (),
        positions=tuple(map(_positions, (a for a, _ in pairs))),
    )


def _positions(tensor: Tensor) -> int:
    """Count the positions of a sample: all axes but the last; 0 for one vector per sample."""
    return tensor.numel() // tensor.shape[-1] if tensor.dim() > 2 and tensor.numel() else 0


def row_pairs(
    model: Model, name: str, actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> Pairs:
    """Pair the rows of all samples at a site or of an output, without padding."""
    check_alike(model, name, actual, expected)
    sides = zip(actual, expected, strict=True)
    rows = (
        zip(split_rows(a, sample), split_rows(e, sample), strict=True)
        for sample, (a, e) in zip(model.inputs, sides, strict=False)
    )
    return [pair for of_sample in rows for pair in of_sample]


def check_alike(
    model: Model, name: str, actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    """Refuse a mode that has other tensors than the reference, or in other shapes."""
    shapes, of_reference = ([tuple(t.shape) for t in tensors] for tensors in (actual, expected))
    if shapes == of_reference:
        return
    pairs = zip(shapes, of_reference, strict=False)
    shape, right = next((pair for pair in pairs if pair[0] != pair[1]), (None, of_reference[0]))
    returned = "not there" if shape is None else f"of shape {shape}"
    raise QgateError(
        f"{name} of {model.name} is {returned} in this mode, and of shape {right} in the "
        "reference: return what the reference returns."
    )


def channels_last(pairs: Pairs, axis: int) -> Pairs:
    """Return pairs with the channels along the last axis."""
    if axis == -1:
        return pairs
    return [(a.movedim(axis, -1), r.movedim(axis, -1)) for a, r in pairs]


def differs(row: Measured) -> bool:
    return bool(row.nonfinite) or row.values.get("relative_mse", 0) != 0


def unless_idle(rows: list[Measured]) -> list[Measured]:
    """Return the rows of a mode, all of which fail where none differs from the reference."""
    if any(map(differs, rows)):
        return rows
    why = {"nothing": "the mode changes no block and no output"}
    return [replace(row, why=why) for row in rows]


def unless_vanished(
    row: Measured, actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> Measured:
    """Return a row of gradients, which fails where only the reference's are not zero."""
    if any(map(torch.any, actual)) or not any(map(torch.any, expected)):
        return row
    why = (
        "the gradient is zero, and the reference's is not; what is rounded passes none on, "
        "x + (rounded - x).detach() does"
    )
    return replace(row, why={"nothing": why})


def compare(pairs: Pairs, channels: bool = False) -> ErrorStats:
    """Sum the errors of all pairs together; `channels` are indices of the last axis."""
    if not pairs:
        raise QgateError("nothing was compared: there is no pair of tensors.")
    for a, r in pairs:
        if a.shape != r.shape:
            raise QgateError(
                f"a tensor of shape {tuple(a.shape)} cannot be compared with {tuple(r.shape)}."
            )
    if not channels:
        return errors((a.float() for a, _ in pairs), (r.float() for _, r in pairs))
    actual, reference = (_rows([pair[side] for pair in pairs]) for side in (0, 1))
    return errors(actual, reference.to(actual.device), channel_axis=-1)


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Join samples, which may differ in length, but not in channels."""
    if len(tensors) == 1:
        return tensors[0].float()
    return torch.cat([tensor.float().reshape(-1, tensor.shape[-1]) for tensor in tensors])


Parts = dict[str, dict[str, float | None]]


def tensor_parts(stats: ErrorStats, pairs: Pairs, beyond: float) -> Parts:
    """Return the errors of the worst channel, and of what is not massive."""
    worst = worst_channel(stats)
    parts: Parts = {} if worst is None else {"worst_channel": {"relative_mse": worst}}
    return {**parts, "without_massive": dict(without_massive(stats, pairs, beyond))}


def worst_rows(pairs: Pairs, *, tokens: bool) -> Parts:
    """Return the error of the worst sample, and of the worst token if asked for.

    An error that is carried along moves the worst token by up to 98 % on other instructions, one
    that is made in a block by less than 1 %.
    """
    ratios = {"worst_sample": [_worst_row(a, r, a.dim()) for a, r in pairs]}
    if tokens:
        ratios["worst_token"] = [_worst_row(a, r, 1) for a, r in pairs]
    worst = {
        part: max((ratio for ratio in of_pairs if ratio is not None), default=None)
        for part, of_pairs in ratios.items()
    }
    return {part: {"relative_mse": ratio} for part, ratio in worst.items() if ratio is not None}


def _worst_row(actual: Tensor, reference: Tensor, axes: int) -> float | None:
    """Return the largest ratio of squared error to energy over the last axes.

    A row below `_QUIET` of the mean energy is measured against that floor.
    """
    if actual.dim() < axes or not actual.numel():
        return None
    over = tuple(range(-axes, 0))
    energy = reference.float().square().sum(over)
    error = (actual.float() - reference.float()).square().sum(over)
    floor = _QUIET * float(energy.mean())
    return float((error / energy.clamp_min(floor)).max()) if floor else None


def massive_from(reference: Sequence[Tensor]) -> float:
    """Return the magnitude above which elements of a site are massive, over all samples."""
    return massive_beyond(tensor.float() for tensor in reference)


def without_massive(stats: ErrorStats, pairs: Pairs, beyond: float) -> dict[str, float]:
    """Return the metrics over the elements whose reference is not above a magnitude.

    They are those of the whole where there are none. NaN in a reference is not left out: what is
    not finite is for the gate to see.
    """
    if beyond < float("inf"):
        usual = [(a[~massive], r[~massive]) for a, r in pairs for massive in [r.abs() > beyond]]
        stats = compare(usual)
    metrics = stats.metrics()
    return {name: metrics[name] for name in PART_METRICS}


def worst_channel(stats: ErrorStats) -> float | None:
    """Return the largest ratio of a channel's squared error to its own energy.

    A channel below `_QUIET` of the mean energy is measured against that floor: it is silent, and
    its own energy would make float noise look like a fault.
    """
    channels = stats.channels
    if channels is None:
        return None
    energy = channels.sum_square_reference
    floor = _QUIET * float(energy.mean())
    return float((channels.sum_square_error / energy.clip(min=floor)).max()) if floor else None


def more_error(less: Measured, more: Measured) -> dict[str, float]:
    """Return by how much metrics are larger, where they are."""
    pairs = {name: (less.value(name), more.value(name)) for name in more.compared}
    return {
        name: value - before
        for name, (before, value) in pairs.items()
        if before is not None and value is not None and math.isfinite(value) and value > before
    }
