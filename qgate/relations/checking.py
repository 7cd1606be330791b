"""The check of relations in anybody's test: of a model in a mode, or of one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qgate.errors import QgateError, unknown
from qgate.models import Model
from qgate.models.long_texts import long_text
from qgate.modes import CalibrationSettings, Mode, apply, calibrated, modes_of
from qgate.relations.compute import ModelRelations, checked_relations
from qgate.relations.decoding import check_all
from qgate.relations.kernels import OF_KERNELS, KernelRelations
from qgate.relations.record import RELATIONS, RelationFailure, RelationReport
from qgate.relations.restarts import Rebuilding


def check_model(
    model: Model | nn.Module,
    samples: Sequence[Any],
    *,
    mode: str | Mode,
    relations: Sequence[str] | None,
    bitwise: bool,
    rebuild: Callable[[], Model] | None,
) -> RelationReport:
    """Compare the ways in which a model in a mode computes the same; RelationFailure names one."""
    subject = model if isinstance(model, Model) else Model(model, list(samples))
    if isinstance(model, Model) and samples:
        raise QgateError(f"{model.name} has samples of its own: leave {len(samples)} more out.")
    chosen = checked_relations(relations)
    selected = mode if isinstance(mode, Mode) else _one_mode(subject, mode)
    calibration = calibrated(subject, CalibrationSettings()) if selected.calibrated else None
    quantized = apply(selected, subject, calibration)
    base = subject.in_basis(quantized.model.basis)
    rebuilding = None
    if rebuild is not None:
        threads = torch.get_num_threads()
        rebuilding = Rebuilding(rebuild, selected, calibration, threads)
    relations_of_model = ModelRelations(quantized, base, bitwise=bitwise, rebuilding=rebuilding)
    return _passed(check_all(relations_of_model, long_text(subject), chosen))


def check_kernel(
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    like: Callable[..., Any],
    inputs: Mapping[int, Any] | None,
    relations: Sequence[str] | None,
    arithmetic: str,
    bitwise: bool,
    seed: int,
) -> RelationReport:
    """Compare a kernel with itself on parts of its arguments; RelationFailure names one."""
    chosen = checked_relations(relations)
    for relation in sorted(chosen - {*OF_KERNELS}) if relations is not None else ():
        raise unknown("relation of a kernel", relation, OF_KERNELS)
    subject = KernelRelations(
        kernel, arguments, like=like, inputs=inputs, arithmetic=arithmetic, bitwise=bitwise,
        seed=seed,
    )  # fmt: skip
    return _passed(subject.check(chosen))


def _one_mode(model: Model, name: str) -> Mode:
    modes = modes_of(model, name)
    if len(modes) != 1:
        listed = ", ".join(mode.name for mode in modes)
        raise QgateError(f"mode {name!r} means {len(modes)} modes ({listed}): name one.")
    return modes[0]


def _passed(report: RelationReport) -> RelationReport:
    if report.disagreements:
        raise RelationFailure(report)
    if not report.agreed:
        names = ", ".join(RELATIONS)
        raise QgateError(f"no relation of {report.name} was compared; there are {names}.")
    return report
