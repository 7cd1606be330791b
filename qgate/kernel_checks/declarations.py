"""Declarations that explain a kernel for which none was given, or one without scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.expected.noise import Expected
from qgate.formats import Encoded, Quantizer
from qgate.formats.options import Options
from qgate.kernel_checks.closeness import explains_closely
from qgate.kernel_checks.declared import declare
from qgate.kernel_checks.runs import Failing

COMMON: tuple[tuple[str, Options], ...] = (
    ("int8", {"granularity": "channel", "axis": 0}),
    ("int8", {"granularity": "tensor"}),
    ("fp8_e4m3", {"granularity": "channel", "axis": 0}),
    ("fp8_e4m3", {"granularity": "tensor"}),
    ("fp8_e4m3", {}),
    ("fp8_e5m2", {}),
    ("fp8_e5m2", {"granularity": "tensor"}),
    ("mxfp8", {}),
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("int4", {"granularity": "block", "block": 32}),
    ("int4", {"granularity": "block", "block": 128}),
    ("int4", {"granularity": "channel", "axis": 0}),
)
"""Formats with the granularities that most kernels have."""
SMALLEST = 32
"""Elements of an argument that a kernel may quantize."""
HELPS = 0.8
"""Share of the energy of differences from which on a declaration is worth another argument's."""
EXPLAINED = 0.15
"""Share of the energy of differences that a declaration may leave: its own roundings."""
LEFT = 2.0
"""Times the rounding of a result in 16 bits that may be left."""


def describe_declaration(case: Failing) -> str:
    """Name the declaration of arguments under which the reference gives the actual result."""
    subject = case.subject
    if subject.output or not bool(case.actual.isfinite().all()):
        return ""
    common = {name for name, _ in COMMON}
    settled = {
        position
        for position, q in subject.inputs.items()
        if q.quantizer is None or q.quantizer.granularity or q.name not in common
    }
    undeclared = list(case.ideal)
    for position in subject.inputs.keys() - settled:
        undeclared[position] = case.arguments[position]
    chosen: dict[int, str] = {}
    values = undeclared
    energy = _energy(case, undeclared)
    while energy > 0 and len(chosen) < 3:
        trials = []
        for position, text, cast in _casts(case):
            if position not in chosen and position not in settled:
                changed = [*values[:position], cast, *values[position + 1 :]]
                trials.append((_energy(case, changed), position, text, changed))
        best = min(trials, key=lambda trial: trial[0], default=None)
        if best is None or best[0] > HELPS * energy:
            break
        energy, position, text, values = best
        chosen[position] = text
        if _explains(case, values) or _explains(case, _rounded(case, values, list(chosen))):
            return _declared_words(case, chosen)
    if chosen and explains_closely(case, _rounded(case, values, list(chosen))):
        return _declared_words(case, chosen)
    return ""


def _declared_words(case: Failing, chosen: dict[int, str]) -> str:
    listed = ", ".join(f"{number}: {chosen[number]}" for number in sorted(chosen))
    are = "arguments are" if len(chosen) > 1 else f"argument {next(iter(chosen))} is"
    redeclared = case.subject.inputs.keys() & chosen.keys()
    declared = "not as declared" if redeclared else "and not declared to be"
    return f"{are} quantized, {declared}: declare inputs={{{listed}}}"


def _casts(case: Failing) -> Iterator[tuple[int, str, Tensor]]:
    for position, argument in enumerate(case.arguments):
        if isinstance(argument, Encoded) or not isinstance(argument, Tensor):
            continue
        if not argument.is_floating_point() or argument.numel() < SMALLEST:
            continue
        for name, options in (*COMMON, *_by_row(argument)):
            try:
                quantizer = Quantizer(name, **options)
                values = declare(quantizer, f"argument {position}", argument.dtype).ideal(argument)
            except (QgateError, ValueError, IndexError):
                continue
            yield position, declaration_text(name, options), values


def _by_row(argument: Tensor) -> Iterator[tuple[str, Options]]:
    """List formats with a scale for each row of each head."""
    if argument.dim() > 2:
        for name in ("int8", "fp8_e4m3"):
            yield name, {"granularity": "block", "block": argument.shape[-1]}


def declaration_text(name: str, options: Options) -> str:
    if not options:
        return repr(name)
    listed = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"Quantizer({name!r}, {listed})"


def _energy(case: Failing, arguments: list[Any]) -> float:
    result = case.result_of(arguments)
    if result.shape != case.actual.shape:
        return float("inf")
    return float((case.actual.double() - result).nan_to_num(0.0, 0.0, 0.0).square().sum())


def _rounded(case: Failing, arguments: list[Any], positions: list[int]) -> list[Any]:
    """Round dequantized values to the dtype of their argument, as a kernel in 16 bits does."""
    values = list(arguments)
    for position in positions:
        values[position] = values[position].to(case.arguments[position].dtype).double()
    return values


def _explains(case: Failing, arguments: list[Any]) -> bool:
    """Tell if a result is that of arguments, but for float noise or one rounding to 16 bits."""
    result = case.result_of(arguments)
    if Expected.around(result, case.expected.width).explains(case.actual):
        return True
    energy = _energy(case, arguments)
    eps = torch.finfo(case.actual.dtype).eps
    rounding = eps / 12**0.5 * float(result.norm())
    return energy < (LEFT * rounding) ** 2 and energy < EXPLAINED * _energy(case, case.ideal)
