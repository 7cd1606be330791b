"""Codes of attention weights that float noise turned: the one cast whose tensor no run can be fed.

What softmax gives has another width in each chunk, so that a compared run casts its own, and noise
now and then moves a value to the neighboring code. Few tokens are off by less than one code, and
none of them if the same runs are made without that cast: a fault of the code around it stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qgate.models import Model
from qgate.modes.attention.core import AttentionCore

_RARE = 0.02
"""Share of tokens that noise may reach; at least one."""
_CODE = 2.0**-3
"""Distance between neighboring codes of the coarsest format of weights, FP8 with three bits."""


def cores_by_site(model: Model) -> dict[str, AttentionCore]:
    """Return attentions that cast their weights, by the site that the product of these reaches."""
    return {
        f"{name}.output:input": module
        for name, module in model.module.named_modules()
        if isinstance(module, AttentionCore) and getattr(module.attend.weights, "quantizer", None)
    }


def may_be_flips(errors: Sequence[Tensor], limit: float) -> bool:
    """Tell if errors of tokens beyond a limit are as few and as small as turned codes make them."""
    listed = torch.cat(list(errors))
    beyond = int((~(listed <= limit)).sum())
    return beyond <= max(1, _RARE * len(listed)) and bool((listed <= _CODE).all())


@contextmanager
def without_casts(cores: Sequence[AttentionCore]) -> Iterator[None]:
    """Leave the weights of attentions as softmax gives them."""
    casts = [core.attend.weights for core in cores]
    try:
        for core in cores:
            core.attend.weights = nn.Identity()  # type: ignore[assignment]
        yield
    finally:
        for core, cast in zip(cores, casts, strict=True):
            core.attend.weights = cast
