"""Products of linear layers and convolutions with a given input and weight, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qgate.models.sites import is_plain_conv, is_transposed_linear

_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def exact_product(
    module: nn.Module,
    x: Tensor,
    weight: Tensor,
    *,
    biased: bool = True,
    bias_dtype: torch.dtype = torch.float64,
) -> Tensor | None:
    """Return what a module makes of an input and a weight; None where it has a way of its own.

    The bias is rounded to `bias_dtype` first, as a model in 16 bits stores it.
    """
    bias = getattr(module, "bias", None)
    # A step projection leaves its bias to the scan.
    biased = biased and isinstance(bias, Tensor) and type(module).__name__ != "StepProjection"
    stored = bias.detach().to(bias_dtype) if biased and isinstance(bias, Tensor) else None
    bias = None if stored is None else stored.double().to(x.device)
    x, weight = x.detach().double(), weight.detach().double()
    if not isinstance(module, nn.modules.conv._ConvNd):
        turned = is_transposed_linear(module)
        product = torch.matmul(x, weight if turned else weight.mT)
        return product if bias is None else product + bias
    if not is_plain_conv(module):
        return None
    if not module.transposed:
        plain: Any = module
        return plain._conv_forward(x, weight, bias)  # type: ignore[no-any-return]
    return _TRANSPOSED[len(module.kernel_size)](
        x, weight, bias, module.stride, module.padding, module.output_padding, module.groups,
        module.dilation,
    )  # fmt: skip
