"""Inputs that no sample has, for products of own kernels: beyond a range, zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.gate.measured import Conformance
from qgate.gate.modules.relations import METRIC, RelatedCall
from qgate.loading import LateModule
from qgate.models import Model
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.modes import Quantized

if TYPE_CHECKING:
    from qgate.kernel_checks import explained as explained
    from qgate.kernel_checks import subject as subject
else:
    explained = LateModule("qgate.kernel_checks.explained")
    subject = LateModule("qgate.kernel_checks.subject")


_LARGE = {torch.float16: 2.0**4}
"""Factor of large values, by dtype; in the others sums of larger ones do not overflow."""


def hard_rows(
    rows: Tensor, large: float = 2.0**18, small: float = 2.0**12
) -> Iterator[tuple[str, Tensor]]:
    """List hard inputs that are made from rows of a tensor, each with a name.

    Scales in float16 hold values that are so much larger, and so much smaller.
    """
    large, small = (_LARGE.get(rows.dtype, factor) for factor in (large, small))
    half = torch.arange(len(rows), device=rows.device).unsqueeze(1) % 2 == 0
    yield "with rows of zeros", rows.where(half, 0.0)
    yield f"{large:,.0f} times as large", rows * large
    yield f"{small:,.0f} times smaller", rows / small
    channel = torch.arange(rows.shape[1], device=rows.device) == min(3, rows.shape[1] - 1)
    yield "with one large channel", rows.where(~channel, rows * (large / 4))
    yield (
        "with rows of very different sizes",
        rows * torch.where(half, large, 1 / small).to(rows.dtype),
    )


class HardInputs:
    """Holds an own kernel at hard inputs, beside what it stands for."""

    def __init__(self, quantized: Quantized, base: Model, meant: Quantized) -> None:
        declared = meant is not quantized and quantized.mode.own and not quantized.mode.convention
        self._quantizers = meant.plan.quantizers() if declared else {}
        self._products = {
            site.module for site in base.sites() if site.is_product and site.kind == "linear"
        }
        self._base, self._own = base.module, quantized.model.module
        self._is_wrong = False

    def add(self, site: str, call: RelatedCall, agreement: Conformance) -> Conformance:
        """Add the first fault at hard inputs to an agreement, or how many of them are right.

        After one fault the others of a mode are not looked for: they mostly are the same one. What
        is wrong for ordinary rows as well is no fault of hard inputs.
        """
        name = site.rpartition(":")[0]
        ports = ("input", "weight", "output")
        quantizers = {
            p: self._quantizers[s] for p in ports if (s := f"{name}:{p}") in self._quantizers
        }
        if agreement.differing or self._is_wrong or not quantizers or name not in self._products:
            return agreement
        (x, *_others) = (x for x in call.arguments.values() if isinstance(x, Tensor))
        rows = x.reshape(-1, x.shape[-1])[: explained.FEW_ROWS]
        reference, own = (of.get_submodule(name) for of in (self._base, self._own))

        def fault(values: Tensor, *, names: bool) -> str:
            return explained.module_fault(reference, own, values, quantizers, names=names)

        count = 0
        for words, hard in hard_rows(rows):
            try:
                if not fault(hard, names=False):
                    count += 1
                    continue
                if fault(x, names=False):
                    return agreement
                about = f"is wrong for inputs {words}: {fault(hard, names=True)}"
            except (QgateError, subject.KernelRefusal, *LENGTH_REFUSALS):
                continue
            self._is_wrong = True
            return Conformance(METRIC, agreement.values, max(1, hard.numel()), about)
        about = f"{agreement.about}, right for {count} hard inputs"
        return replace(agreement, about=about)
