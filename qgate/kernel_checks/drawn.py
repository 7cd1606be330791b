"""Rounding at random by a named generator: each value is the neighbor that its draw chooses.

The draws follow from the seed and the place of an element, so a kernel's result is held bit for
bit, but where a draw lies within float noise of the share that decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats.philox import Philox, RandomWords
from qgate.formats.settings import QuantizerSettings
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.stochastic import STEP, Neighbors
from qgate.kernel_checks.subject import RESULT, KernelSubject

RATIO_ERRORS = {"hif4": 2.0**-8}
"""Relative error of the ratios of formats that multiply by a rounded reciprocal."""


def check_drawn(
    subject: KernelSubject,
    example: list[Any],
    actual: Tensor,
    declared: dict[Any, QuantizerSettings],
    report: CheckReport,
) -> None:
    """Hold the result at the neighbors that the draws of the declared generator choose."""
    if [*declared] != [RESULT]:
        raise QgateError(
            "a named generator is for the result, whose values its draws decide; declare it by "
            "output=…, or arguments with rounding 'stochastic' and no generator."
        )
    quantizer = declared[RESULT]
    choices = dict.fromkeys(subject.slots, 0)
    expected = replace(subject, output=None).expected(example, choices)
    beside = Neighbors.of(expected.values, quantizer).rounded(actual.dtype)
    noise = torch.zeros_like(beside.exact) if expected.sigma is None else expected.sigma
    values = actual.double()
    draws = quantizer.draws_of(values)
    assert draws is not None
    noise = noise + beside.exact.abs() * RATIO_ERRORS.get(quantizer.format.name, 0.0)
    wrong = _differ(values, beside, noise, draws)
    if not bool(wrong.any()):
        report.conventions["result"] = f"rounded at random by {quantizer.generator!r}"
        report.held.append("the example, draw by draw")
        report.left_out["derived inputs"] = "rounding at random is held at the example alone"
        return
    index = tuple(int(position) for position in wrong.nonzero()[0])
    detail = (
        f"at {list(index)}: {float(values[index]):g}, neighbors {float(beside.below[index]):g} and "
        f"{float(beside.above[index]):g}, exact {float(beside.exact[index]):g}, draw "
        f"{float(draws[index]):.6f}"
    )
    outside = beside.wrong(values, noise)
    if bool(outside.any()):
        raise CheckFailure(
            f"{report.name} is wrong: {int(outside.sum()):,} of {outside.numel():,} values are "
            "neither neighbor of the exact value", report, detail,
        )  # fmt: skip
    for words, other in _other_draws(quantizer, values):
        if not bool(_differ(values, beside, noise, other).any()):
            raise CheckFailure(f"{report.name} is wrong: {words}", report, detail)
    raise CheckFailure(
        f"{report.name} is wrong: {int(wrong.sum()):,} of {wrong.numel():,} values are the other "
        f"neighbor than {quantizer.generator!r} draws", report, detail,
    )  # fmt: skip


def _differ(values: Tensor, beside: Neighbors, noise: Tensor, draws: Tensor) -> Tensor:
    """Find values that are not the chosen neighbor; a draw rounds up in size."""
    is_up = beside.exact >= 0
    share = torch.where(is_up, beside.share, 1 - beside.share)
    grows = draws.to(share.device) < share
    chosen = torch.where(grows == is_up, beside.above, beside.below)
    gap = (beside.above - beside.below).clamp_min(torch.finfo(torch.float64).tiny)
    is_close = (draws.to(share.device) - share).abs() <= STEP + noise / gap
    differs = (values - chosen).abs() > STEP * values.abs() + noise
    return differs & (~is_close | beside.wrong(values, noise))


def _other_draws(quantizer: QuantizerSettings, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """List draws that faulty kernels take instead."""
    own = quantizer.generator
    draws = quantizer.draws_of(values)
    assert draws is not None
    if values.dim() > 1:
        yield "every row has the draws of the first one", draws[:1].expand_as(draws)
    if isinstance(own, RandomWords) or (isinstance(own, Philox) and own.layout == "words"):
        ways = "carry over", "are below what they are compared with"
        words = f"it rounds up where the random bits {ways[own.carry]}"
        flipped = replace(own, carry=not own.carry)
        yield words, flipped.uniform(tuple(values.shape), values.device)
    if isinstance(own, Philox):
        if values.dim() > 1:
            turned = own.uniform(tuple(values.mT.shape), values.device).mT
            yield "its draws run down the columns, not along the rows", turned
        if own.layout == "words":
            first_words = replace(own, layout="triton", bits=32, carry=False).words(values.numel())
            alone = RandomWords(first_words.view(values.shape), own.bits, own.carry)
            yield (
                "each element has the first word of a counter of its own",
                alone.uniform(tuple(values.shape), values.device),
            )
        step = 4 if own.layout == "torch" else 1
        for offset in (0, own.offset - step, own.offset + step):
            if offset >= 0 and offset != own.offset:
                moved = replace(own, offset=offset)
                yield (
                    f"its draws are those of offset {offset}, not {own.offset}",
                    moved.uniform(tuple(values.shape), values.device),
                )
        if own.seed:
            zero = replace(own, seed=0).uniform(tuple(values.shape), values.device)
            yield f"its draws are those of seed 0, not {own.seed}", zero
