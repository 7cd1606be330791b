"""Rows of isolated errors: each site with its limit, and in words what a wrong one looks like."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qgate.expected.derived import CutAxis
from qgate.expected.modules import exact_product
from qgate.expected.noise import Expected
from qgate.expected.products import Product
from qgate.gate.measured import Measured
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.segments.noise import limit_of
from qgate.gate.segments.segments import Segments, Worst, row_scales
from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate.causes import outputs as outputs
    from qgate.causes import terms as terms
    from qgate.gate.modules import holding as holding
    from qgate.gate.segments import recurrent_faults as recurrent_faults
else:
    outputs = LateModule("qgate.causes.outputs")
    terms = LateModule("qgate.causes.terms")
    holding = LateModule("qgate.gate.modules.holding")
    recurrent_faults = LateModule("qgate.gate.segments.recurrent_faults")


SAYS_NOTHING = r"elements are wrong, the first at|a small error in all"
"""Words of a fault that has no name."""
IS_PLACE = r"(?:is|are) (?:wrong|zero)$"
"""How words end that say where a fault is, and not what it is."""
IS_VAGUE = (
    r"rows of its .* are other ones$|by a (?:factor|number) each|by the same vector"
    r"|tokens .*hold others: token"
)
"""Words that may be said of several faults."""
_UNEXPLAINED = 0.02
"""The share of a residual's energy that may be left when lost terms are called the cause."""
_ENOUGH = 1e-5
"""The share of it that is noise, so that no more terms are looked for."""
_CLEAR = 4.0
"""Times its noise that the factor of a token is away from 1."""
_ROWS, _CHANNELS = 96, 512
_LEAST_SHARE = 0.02
_TINY = 1e-300
_PEAK = 6.0
"""Times the RMS of a row's allowed error that one element of it may reach."""


def segment_rows(
    segments: Segments, sensitivities: Mapping[str, float], sites: ModelSites
) -> list[Measured]:
    """Return a row for each site that was compared, in no order."""
    compared: dict[str, Measured] = {}
    last = len(sites.order)
    for number, (site, errors) in enumerate(segments.errors.items()):
        limit = limit_of(errors, sensitivities.get(site, 1.0))
        worst = errors.worst.error
        is_wrong = not worst <= limit
        reason = explain_segment(segments, site, limit) if is_wrong else ""
        if errors.unit and errors.worst.actual is not None and not is_wrong:
            lost = _lost_in_noise(errors.worst, weight_of(segments, site))
            reason = f"is not its product: {lost}, below the rounding of its dtype" if lost else ""
        order = sites.order.get(site, last + number)
        compared[site] = sites.isolated(
            site, order, errors.relative_mse, worst, limit, reason,
            nonfinite=errors.nonfinite, channels=errors.channels,
        )  # fmt: skip
    uncompared = () if segments.is_own else segments.left_out.keys() & sites.order.keys()
    for site in sorted(uncompared):
        why = {"isolated": f"cannot be compared with FP32 code: {segments.left_out[site]}"}
        row = compared.get(site) or sites.row(site, "isolated", sites.place(site))
        compared[site] = replace(row, why=why)
    return list(compared.values())


def explain_segment(segments: Segments, site: str, limit: float) -> str:
    """Say what is wrong at a site, where, and in which sample."""
    errors = segments.errors[site]
    worst = errors.clearest(limit)
    weight = weight_of(segments, site)
    words = _lost_terms(worst, weight)
    if not words and errors.unit:
        words = _lost_in_noise(worst, weight)
    words = words or _lost_channel(segments, site, worst)
    module = site.rpartition(":")[0]
    layer = segments.base.module.get_submodule(module) if ":" in site else None
    if errors.unit and site.endswith(":output"):
        words = words or _fault_of_torch(segments.model.module.get_submodule(module), worst, limit)
    if isinstance(layer, nn.RNNBase) and site.endswith(":output"):
        own = segments.model.module.get_submodule(module)
        words = recurrent_faults.recurrent_fault(layer, own, worst)
    words = words or _router_fault(segments, module) or _stored_fault(segments, module)
    words = words or worst.some_of_batch(limit) + (
        _bias_fault(layer, site, worst) or _pattern_there(segments, module, worst, limit)
    )
    source = "what FP32 code makes of the tensors before it"
    if weight is not None and worst.inputs is not None:
        source = "the product of its quantized input and weight"
    elif site.endswith(":output"):
        source = f"what FP32 code of {module} makes of the same tensors"
    agreeing = errors.agreeing(limit)
    others = f"; {' and '.join(agreeing)} agree{'s' * (len(agreeing) == 1)}" if agreeing else ""
    return f"is not {source}: {words} ({worst.place()}{others})"


def _fault_of_torch(module: nn.Module, worst: Worst, limit: float) -> str:
    """Say that torch's own convolution in 16 bits is wrong, which oneDNN computes on a CPU."""
    weight, x = getattr(module, "weight", None), worst.inputs
    if not isinstance(module, nn.modules.conv._ConvNd) or x is None or weight is None:
        return ""

    def gives(wanted: Tensor | None) -> bool:
        product = exact_product(module, x, weight, dtype=weight.dtype)
        product = None if product is None else product.movedim(1, -1)
        if product is None or wanted is None or product.shape != wanted.shape:
            return False
        distance = (product.double() - wanted.double()).square().sum()
        return float(distance) <= limit * float(wanted.double().square().sum())

    if not gives(worst.actual):
        return ""
    # torch.backends.mkldnn.flags warns of GPUs.
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        is_right = gives(worst.expected)
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    off = "torch's own convolution is wrong here, and right with torch.backends.mkldnn.enabled off"
    return off if is_right else ""


def _router_fault(segments: Segments, module: str) -> str:
    """Say what a router does otherwise whose experts, or whose block, a module is."""
    for name, words in segments.routers.faults.items():
        mixture = name.rpartition(".")[0]
        if f"{module}.".startswith(f"{mixture}.") or module == segments.base.layer_of(name):
            return f"its router {name} {words}"
    return ""


def _stored_fault(segments: Segments, module: str) -> str:
    """Name a stored weight around a site that is not the reference's, where none is quantized."""
    block = segments.base.layer_of(module) or module
    run, base = segments.model.module, segments.base.module
    kernels = {site.rpartition(":")[0] for site in segments.view.silent}
    try:
        skipped = {
            f"{name}.{key}"
            for name, values in segments.view.weights.items()
            for key in values
            if getattr(run.get_submodule(name), key).dtype == torch.float32
        }
        skipped |= {
            f"{name}.{key}"
            for name in kernels
            for key, _ in base.get_submodule(name).named_parameters()
        }
        inside = {name.removeprefix(f"{block}.") for name in skipped}
        pair = base.get_submodule(block), run.get_submodule(block)
    except AttributeError:  # of a module that the run has fused
        return ""
    return holding.other_weights(*pair, inside, base) if block else ""


def weight_of(segments: Segments, site: str) -> Tensor | None:
    """Return the weight of a linear layer as (outputs, inputs), None for other sites."""
    name, _, port = site.rpartition(":")
    listed = [s for s in segments.view.sites if s.name == site and s.kind == "linear"]
    if port != "output" or not listed:
        return None
    values = segments.view.weights.get(name, {})
    weight = values.get("weight", segments.base.module.get_submodule(name).weight)
    assert isinstance(weight, Tensor | nn.Parameter)
    return weight.detach().t() if listed[0].transposed else weight.detach()


def _lost_terms(worst: Worst, weight: Tensor | None) -> str:
    """Name input channels that a product lacks, or weighs otherwise, if they explain its error."""
    if weight is None or worst.inputs is None:
        return ""
    inputs, residual = _inputs_and_residual(worst)
    energy = float(residual.double().square().sum())
    fault = terms.find_term_fault(
        _product(inputs), residual, (inputs, weight), _UNEXPLAINED * energy, _ENOUGH
    )
    return fault.words("input channel", "input channels") if fault else ""


def _lost_channel(segments: Segments, site: str, worst: Worst) -> str:
    """Name the input channel that a convolution lacks, or weighs otherwise."""
    name, _, port = site.rpartition(":")
    module = segments.base.module.get_submodule(name) if name else None
    if port != "output" or not isinstance(module, nn.modules.conv._ConvNd) or module.groups > 1:
        return ""
    assert worst.actual is not None
    assert worst.expected is not None
    inputs = worst.inputs
    if inputs is None or inputs.dim() != worst.actual.dim() or inputs.shape[1] > _CHANNELS:
        return ""
    weight = segments.view.weights.get(name, {}).get("weight", module.weight)
    residual = (worst.actual - worst.expected).double().movedim(-1, 1)
    energy, x = float(residual.square().sum()), inputs.double()
    for channel in range(x.shape[1]):
        alone = torch.zeros_like(x)
        alone[:, channel] = x[:, channel]
        part = exact_product(module, alone, weight, biased=False)
        if part is None or part.shape != residual.shape:
            return ""
        size = float(part.square().sum())
        share = float((residual * part).sum()) / size if size else 0.0
        if float((residual - share * part).square().sum()) <= _UNEXPLAINED * energy:
            times = f"counts {1 + share:.4g} times"
            return f"input channel {channel} {'is missing' if share < -0.98 else times}"
    return ""


def _lost_in_noise(worst: Worst, weight: Tensor | None) -> str:
    """Name input channels that are lost below the noise of a coarse dtype.

    Rounding moves large results more than small ones: rows and columns are first brought to one
    size of noise.
    """
    if weight is None or worst.inputs is None:
        return ""
    inputs, residual = _inputs_and_residual(worst)
    inputs, residual = inputs[:_ROWS].double(), residual[:_ROWS].double()
    rows = residual.square().mean(1, keepdim=True).sqrt().clamp_min(_TINY)
    columns = (residual / rows).square().mean(0).sqrt().clamp_min(_TINY)
    even = residual / rows / columns
    arguments = inputs / rows, weight.double() / columns.unsqueeze(1)
    fault = terms.find_term_fault(_product(inputs), even, arguments, math.inf)
    if fault is None or abs(fault.share) < _LEAST_SHARE:
        return ""
    return fault.words("input channel", "input channels")


def _inputs_and_residual(worst: Worst) -> tuple[Tensor, Tensor]:
    assert worst.inputs is not None
    assert worst.actual is not None
    assert worst.expected is not None
    residual = (worst.actual - worst.expected).nan_to_num(0.0, 0.0, 0.0)
    inputs = worst.inputs.reshape(-1, worst.inputs.shape[-1]).float()
    return inputs, residual.reshape(-1, residual.shape[-1])


def _product(inputs: Tensor) -> Product:
    axis = CutAxis(((0, 1), (1, 1)), inputs.shape[-1], None)
    return Product((0, 1), "ak", "bk", "ab", "k", axis)


def _bias_fault(layer: nn.Module | None, site: str, worst: Worst) -> str:
    """Say that a product counts its bias otherwise, if that explains its error."""
    bias = getattr(layer, "bias", None)
    if not isinstance(layer, nn.Linear) or not isinstance(bias, Tensor) or worst.actual is None:
        return ""
    assert worst.expected is not None
    if not site.endswith(":output") or worst.expected.shape[-1:] != bias.shape:
        return ""
    b = bias.detach().double()
    error = (worst.actual.double() - worst.expected.double()).reshape(-1, len(b)).mean(0)
    share = float(error.dot(b) / b.square().sum().clamp_min(_TINY))
    unexplained = float((error - share * b).square().sum())
    if unexplained > _UNEXPLAINED * float(error.square().sum()) or not share:
        return ""
    return (
        "a bias is dropped: its own"
        if abs(share + 1) < 0.02
        else f"its bias counts {1 + share:.3g} times"
    )


def _pattern_there(segments: Segments, module: str, worst: Worst, limit: float) -> str:
    words = pattern(worst, limit)
    if re.search(SAYS_NOTHING, words):
        return _border(segments, module, worst, limit) or words
    return words


def _border(segments: Segments, module: str, worst: Worst, limit: float) -> str:
    """Say that a convolution is wrong along the border of its images alone."""
    layer = segments.base.module.get_submodule(module)
    if not isinstance(layer, nn.Conv2d) or worst.expected is None or worst.expected.dim() != 4:
        return ""
    _, _, outside = _bounds(worst, limit)
    wrong = outside.any(-1)[0]
    widths = [size // 2 for size in layer.kernel_size]
    inside = [slice(width, size - width) for width, size in zip(widths, wrong.shape, strict=True)]
    if not bool(wrong.any()) or not wrong[tuple(inside)].numel() or wrong[tuple(inside)].any():
        return ""
    return "the border of the image is wrong, and nothing within: it is padded otherwise"


def _bounds(worst: Worst, limit: float) -> tuple[Tensor, Expected, Tensor]:
    """Return an actual tensor, the expected one with room for noise, and what is outside of it."""
    actual, expected = worst.actual, worst.expected
    assert actual is not None
    assert expected is not None
    scale = row_scales(expected.double().square().sum(-1)).sqrt().unsqueeze(-1)
    room = scale * (_PEAK * math.sqrt(limit / expected.shape[-1]))
    bounds = Expected.around(expected.double(), room)
    return actual, bounds, bounds.outside(actual.double())


def _row_factors(actual: Tensor, expected: Tensor) -> str:
    """Say that tokens have a factor each, below the rounding of every element."""
    right = expected.reshape(-1, expected.shape[-1])
    error = actual.double().reshape(right.shape) - right
    energy = right.square().sum(-1).clamp_min(_TINY)
    sizes = (error * right).sum(-1) / energy
    noise = (error - sizes.unsqueeze(-1) * right).square().sum(-1) / energy / right.shape[-1]
    is_clear = sizes.square() > _CLEAR**2 * noise
    if right.shape[-1] < 2 or float(is_clear.double().mean()) < 0.5:
        return ""
    least, most = (1 + float(side(sizes[is_clear])) for side in (torch.min, torch.max))
    count = f"{int(is_clear.sum()):,} of {len(right):,}"
    return (
        f"{count} tokens are off by a factor each, {least:.4g} to {most:.4g}: their scales are off"
    )


def pattern(worst: Worst, limit: float) -> str:
    actual, bounds, wrong = _bounds(worst, limit)
    if not bool(wrong.any()):
        return _row_factors(actual, bounds.values) or "a small error in all elements"
    words = (
        outputs.describe_ruin(actual, bounds, wrong)
        or outputs.describe(actual, bounds, wrong)
        or outputs.scattered(wrong)
    )
    words = re.sub(r"\brow", "token", words)
    return re.sub(r"\bcolumn", "channel", words)
