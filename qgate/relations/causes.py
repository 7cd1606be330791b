"""Causes of a disagreement that the mode or its modules tell."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qgate.expected.shared_scales import mixes
from qgate.models import Model
from qgate.models.random_draws import draws_numbers
from qgate.modes import Quantized
from qgate.relations.recording import Recording

LOUDER = 64.0
BATCH_SCALE = (
    "a dynamic scale per tensor, made of the whole batch: a louder row changes what others get"
)
BATCH_LEAK = "values of other rows in what it gives for one"
_CHANGED = 1e-8
OF_ROWS = ("alone", "others", "permuted", "padded right", "padded left", "prefix", "decoded",
           "chunked", "stepwise", "warm prefix", "reused cache")  # fmt: skip


def explain(quantized: Quantized, site: str, relation: str, recording: Recording) -> str:
    """Say why a module gives other values for the same input; empty where nothing tells."""
    if relation == "repeat":
        return _why_unsteady(quantized.model)
    module, _, port = site.rpartition(":")
    if relation not in OF_ROWS or port != "output":
        return ""
    quantizers = quantized.plan.quantizers()
    declared = quantizers.get(f"{module}:input")
    inputs = recording.tensors.get(f"{module}:input")
    if declared is not None and inputs and mixes(declared, inputs[0].dim(), 0):
        return f"{declared.format.name} of {module}:input has {BATCH_SCALE}"
    try:
        owner = quantized.model.module.get_submodule(module)
    except AttributeError:
        return ""
    rows = inputs[0] if inputs else None
    if rows is not None and len(rows) == 1 and rows.shape[1] > 1:
        # Two halves of a text are two rows.
        rows = rows[0, : len(rows[0]) // 2 * 2].unflatten(0, (2, -1))
    if rows is None or len(rows) < 2:
        return ""
    try:
        words = other_rows_in(functools.partial(_row_of, owner, rows))
    except Exception:  # of a module that takes more than this tensor
        return ""
    return f"the module has {words}" if words else ""


def _why_unsteady(model: Model) -> str:
    """Say why two calls differ: random numbers, where seeds decide; else what is kept between."""
    draws, is_same = _draws(model)
    if not draws:
        return "it draws no random numbers, so it depends on the calls before (a counter? a cache?)"
    return "it draws random numbers: with the same seed two calls give the same bits" * is_same


def follows_a_seed(model: Model) -> bool:
    """Tell whether a model draws random numbers, and gives the same bits with the same seed."""
    return all(_draws(model))


@torch.no_grad()
def _draws(model: Model) -> tuple[bool, bool]:
    outputs = []
    with torch.random.fork_rng():
        draws = draws_numbers(lambda: model(model.inputs[0]))
        for _ in range(2):
            torch.manual_seed(0)
            outputs.append(model(model.inputs[0]))
    return draws, torch.equal(*outputs)


@torch.no_grad()
def other_rows_in(first_row: Callable[[float], Tensor]) -> str:
    """Say how the first row of a result depends on the others, which are multiplied by a number.

    A scale that is made from magnitudes does not see signs; values that get into a row have them.
    """
    alike, louder, negative = (first_row(factor).double() for factor in (1.0, LOUDER, -LOUDER))
    least = _CHANGED * float(alike.square().sum())
    if not float((louder - alike).square().sum()) > least:
        return ""
    is_scale = float((louder - negative).square().sum()) <= least
    return BATCH_SCALE if is_scale else BATCH_LEAK


def _row_of(module: nn.Module, x: Tensor, factor: float) -> Tensor:
    result = module(torch.cat([x[:1], x[1:2] * factor]))
    tensor: Tensor = result if isinstance(result, Tensor) else result[0]
    return tensor[0]
