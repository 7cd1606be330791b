"""Linear layers in parts, as the ranks of tensor parallelism compute them: split K and split N.

Each rank has its part of the quantized weight. Where a format promises that a part quantizes as it
does in the whole, a rank that quantizes its own part has to get the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from qgate.expected.shared_scales import mixes
from qgate.formats import Quantizer
from qgate.modes import Quantized
from qgate.relations.recording import Recording

PARTS = (2, 4)
_TOKENS = 64


@dataclass(frozen=True)
class PartResult:
    """Result of one linear layer in parts, and of the whole of it.

    is_own   True if it is about what a rank quantizes by itself, which has to be the same bits
    """

    relation: str
    words: str
    site: str
    actual: Tensor
    expected: Tensor
    is_own: bool = False


def part_results(
    quantized: Quantized, recording: Recording, left_out: dict[str, str]
) -> Iterator[PartResult]:
    """Compute every plain linear layer in parts; others are noted."""
    quantizers = quantized.plan.quantizers()
    skipped = 0
    for site in quantized.model.sites():
        if site.kind != "linear" or site.port != "output":
            continue
        tensors = [recording.tensors.get(f"{site.module}:{port}") for port in ("input", "output")]
        layer = _layer(quantized, site.module)
        if layer is None or not all(tensors):
            skipped += 1
            continue
        x, y = (t[0].flatten(0, 1)[:_TOKENS] for t in tensors if t)
        yield from _of_layer(site.module, layer, x, y, quantizers, left_out)
    if skipped:
        left_out[f"split K and N of {skipped} layers"] = (
            "their products are no plain linear layers: call check_relations with the kernel"
        )


def _layer(quantized: Quantized, name: str) -> nn.Linear | None:
    """Return a module that computes what nn.Linear does, with a weight of numbers."""
    try:
        module = quantized.model.module.get_submodule(name)
    except AttributeError:
        return None
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    weight = getattr(module, "weight", None)
    has_numbers = isinstance(weight, Tensor) and weight.is_floating_point()
    return module if is_plain and has_numbers else None  # type: ignore[return-value]


@torch.no_grad()
def _of_layer(
    name: str,
    layer: nn.Linear,
    x: Tensor,
    y: Tensor,
    quantizers: Mapping[str, Quantizer],
    left_out: dict[str, str],
) -> Iterator[PartResult]:
    weight, own = layer.weight, layer._parameters["weight"]
    of_input, of_weight = quantizers.get(f"{name}:input"), quantizers.get(f"{name}:weight")
    entered = x.to(weight.dtype) if of_input is None else of_input(x)
    bias = layer.bias
    plain = y if bias is None else y - bias
    site = f"{name}:output"
    for count in PARTS:
        columns, terms = weight.shape
        if terms % count == 0:
            words = f"as the sum of {count} parts of K = {terms}"
            sums = [
                linear(a, b) for a, b in zip(entered.chunk(count, -1), weight.chunk(count, 1),
                                             strict=True)
            ]  # fmt: skip
            yield PartResult("split K", words, site, torch.stack(sums).sum(0), plain)
            for port, q, source, whole in (
                ("input", of_input, x, entered), ("weight", of_weight, own, weight),
            ):  # fmt: skip
                yield from _own("split K", f"{name}:{port}", q, source, whole, count, -1, left_out)
        if columns % count == 0:
            words = f"in {count} parts of N = {columns}"
            joined = torch.cat([linear(entered, part) for part in weight.chunk(count, 0)], -1)
            yield PartResult("split N", words, site, joined, plain)
            yield from _own("split N", f"{name}:weight", of_weight, own, weight, count, 0, left_out)


def _own(
    relation: str,
    site: str,
    quantizer: Quantizer | None,
    source: Tensor | None,
    whole: Tensor,
    count: int,
    dim: int,
    left_out: dict[str, str],
) -> Iterator[PartResult]:
    """Quantize each part by itself, where the format promises that nothing else decides it."""
    if quantizer is None or source is None:
        return
    dim = dim % source.dim()
    size = source.shape[dim] // count
    is_block = quantizer.granularity == "block" or quantizer.format.kind == "block"
    needs_all = quantizer.format.kind == "block" and quantizer.format.needs_amax
    along = is_block and quantizer.axis_of(source.dim()) == dim and not needs_all
    block = int(quantizer.block or 1)
    if quantizer.tile is not None or (not along and mixes(quantizer, source.dim(), dim)):
        key = f"{relation}, ranks that quantize the {site.rpartition(':')[2]} themselves"
        left_out[key] = f"a scale of {quantizer.format.name} is of more than their part"
        return
    if along and size % block:
        key = f"{relation}, ranks that quantize parts of {size}"
        left_out[key] = f"they are no whole blocks of {block}"
        return
    parts = torch.cat([quantizer(part) for part in source.detach().chunk(count, dim)], dim)
    words = f"where each of {count} ranks quantizes its part"
    yield PartResult(relation, words, site, parts, whole, is_own=True)
