"""Products of linear layers and convolutions with a given input and weight, in float64."""

from __future__ import annotations

import copy
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

_SAME = 1e-4
"""Tolerance of code that computes in float32, for numbers around 1."""


def exact_product(
    module: nn.Module,
    x: Tensor,
    weight: Tensor,
    *,
    biased: bool = True,
    bias_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> Tensor | None:
    """Return what a module makes of an input and a weight; None where it has a way of its own.

    The bias is rounded to `bias_dtype` first, as a model in 16 bits stores it. The product is
    exact, or what torch makes in another `dtype`.
    """
    bias = getattr(module, "bias", None)
    stored = bias.detach().to(bias_dtype) if biased and isinstance(bias, Tensor) else None
    bias = None if stored is None else stored.to(x.device, dtype)
    x, weight = x.detach().to(dtype), weight.detach().to(dtype)
    if not isinstance(module, nn.modules.conv._ConvNd):
        turned = is_transposed_linear(module)
        of_product, of_bias = own_factors(module)
        product = torch.matmul(x, weight if turned else weight.mT) * of_product
        return product if bias is None else product + bias * of_bias
    if not is_plain_conv(module):
        return None
    if not module.transposed:
        plain: Any = module
        return plain._conv_forward(x, weight, bias)  # type: ignore[no-any-return]
    return _TRANSPOSED[len(module.kernel_size)](
        x, weight, bias, module.stride, module.padding, module.output_padding, module.groups,
        module.dilation,
    )  # fmt: skip


@torch.no_grad()
def own_factors(module: nn.Module) -> tuple[float, float]:
    """Return by what a layer multiplies its product and its bias, in code of its own.

    Such as a scale that keeps the variance, or no bias where other code adds it. What is neither is
    held against the product and the bias themselves.
    """
    kind = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if kind is nn.Linear or not isinstance(module, nn.Linear):
        return 1.0, 1.0
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (4, module.in_features), **{n: p.shape for n, p in module.named_parameters()}}
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    x, twin = drawn.pop("x"), copy.copy(module)
    twin._parameters = {name: nn.Parameter(values) for name, values in drawn.items()}
    twin.__class__ = kind
    try:
        constant = twin.forward(torch.zeros_like(x))
        product, result = functional.linear(x, twin.weight), twin.forward(x) - constant
        of_product = float((result * product).sum() / product.square().sum())
        parts, of_bias = [(result, of_product * product)], 1.0
        if twin.bias is not None:
            of_bias = float((constant[0] * twin.bias).sum() / twin.bias.square().sum())
            parts.append((constant, (of_bias * twin.bias).expand_as(constant)))
    except Exception:  # such as a layer that takes another input
        return 1.0, 1.0
    is_explained = all(torch.allclose(*pair, rtol=_SAME, atol=_SAME) for pair in parts)
    return (of_product, of_bias) if is_explained else (1.0, 1.0)
