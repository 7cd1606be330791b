"""Compare two exports of one recipe: equal bits, equal values, or other codes and scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from qgate.charts.overviews import Overview, Overviewed
from qgate.checkpoints.grids import TALL, QuantizedWeight, row_spans
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.methods.steps import element_indices
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.own_layouts import with_layout
from qgate.checkpoints.pairing import strip_prefix
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.rows import ContiguousRows, WeightRows, common_spans
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.errors import QgateError

Progress = Callable[[int, int], None]
EQUAL, SAME_VALUES, OTHER_VALUES, ALONE = "equal bits", "equal values", "other values", "missing"


@dataclass(frozen=True)
class TensorAgreement:
    """The agreement of one tensor of two exports.

    outcome      "equal bits", "equal values", "other values" or "missing"
    difference   in words, empty for equal bits
    steps        of codes: steps from one export to the other, and how many codes have them
    """

    name: str
    outcome: str
    difference: str = ""
    steps: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class AgreementRecord(Overviewed):
    """The comparison of two exports, tensor by tensor."""

    first: str
    second: str
    tensors: list[TensorAgreement]

    @property
    def differences(self) -> list[TensorAgreement]:
        return [t for t in self.tensors if t.outcome in (OTHER_VALUES, ALONE)]

    def overview(self) -> Overview:
        """Describe the comparison: how tensors agree, those that differ first."""
        outcomes = Counter(tensor.outcome for tensor in self.tensors)
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
        rows = [*self.differences, *(t for t in self.tensors if t not in self.differences)]
        return Overview(f"{self.first} and {self.second}: {counts}", rows, _tensor_row, "tensor")

    def to_dict(self) -> dict[str, object]:
        """Return the record as plain data."""
        return asdict(self)


def _tensor_row(tensor: TensorAgreement) -> dict[str, object]:
    return {"tensor": tensor.name, "it has": tensor.outcome, "difference": tensor.difference}


@dataclass(frozen=True)
class _Export:
    checkpoint: Checkpoint
    recipe: Recipe
    weights: dict[str, StoredWeight]


def compare_exports(
    first: str,
    second: str,
    progress: Progress | None = None,
    recipe_file: str | None = None,
    layout_file: str | None = None,
) -> AgreementRecord:
    """Compare two exports of one recipe."""
    opened = [open_checkpoint(spec) for spec in (first, second)]
    recipes = with_layout(recipe_file, layout_file, *opened)
    exports = [_export(*pair) for pair in zip(opened, recipes, strict=True)]
    names = list(dict.fromkeys([*exports[0].weights, *exports[1].weights]))
    if not exports[0].weights.keys() & exports[1].weights.keys():
        raise QgateError(
            f"{first!r} and {second!r} are no exports of one recipe: no tensor has one name."
        )
    tensors = []
    for number, name in enumerate(names):
        if progress is not None:
            progress(number, len(names))
        tensors.append(_agreement(name, *exports))
    return AgreementRecord(first, second, tensors)


def _export(checkpoint: Checkpoint, recipe: Recipe) -> _Export:
    weights = {strip_prefix(weight.name): weight for weight in find_weights(checkpoint)}
    return _Export(checkpoint, recipe, weights)


def _agreement(name: str, first: _Export, second: _Export) -> TensorAgreement:
    a, b = (export.weights.get(name) for export in (first, second))
    if a is None or b is None:
        owner = "first" if b is None else "second"
        return TensorAgreement(name, ALONE, f"it is in the {owner} export alone")
    if _have_equal_bits(first, a, second, b):
        return TensorAgreement(name, EQUAL)
    if (a.packing is None) != (b.packing is None):
        stored = [_stored_as(weight) for weight in (a, b)]
        return TensorAgreement(name, OTHER_VALUES, f"it is {stored[0]}, and {stored[1]}")
    if a.packing is None:
        entries = [next(iter(weight.parts.values())) for weight in (a, b)]
        return _plain_agreement(name, first.checkpoint, entries[0], second.checkpoint, entries[1])
    try:
        one = WeightRows(first.checkpoint, a, first.recipe)
        other = WeightRows(second.checkpoint, b, second.recipe)
        return _quantized_agreement(name, one, other, [_stored_as(a), _stored_as(b)])
    except QgateError as error:
        return TensorAgreement(name, OTHER_VALUES, str(error))


def _stored_as(weight: StoredWeight) -> str:
    entry = next(iter(weight.parts.values()))
    return f"not quantized ({entry.dtype})" if weight.packing is None else weight.packing.name


def _have_equal_bits(first: _Export, a: StoredWeight, second: _Export, b: StoredWeight) -> bool:
    """Compare stored tensors by their parts; equal words mean equal weights in one layout."""
    if a.parts.keys() != b.parts.keys() or a.packing != b.packing:
        return False
    recipes = first.recipe, second.recipe
    tiles = {recipe.tile_of(a.name.removesuffix(".weight")) for recipe in recipes}
    if recipes[0].bits != recipes[1].bits or len(tiles) > 1:
        return False
    for ending, entry in a.parts.items():
        other = b.parts[ending]
        if (entry.dtype, entry.shape) != (other.dtype, other.shape):
            return False
        pairs = _elements(first.checkpoint, entry, second.checkpoint, other)
        if not all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs):
            return False
    return True


def _elements(
    first: Checkpoint, a: StoredEntry, second: Checkpoint, b: StoredEntry
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read two tensors of one shape, some elements at a time."""
    one, other = ContiguousRows(first, a.name, 1), ContiguousRows(second, b.name, 1)
    for start, stop in row_spans((math.prod(a.shape), 1), 1):
        yield one[start:stop], other[start:stop]


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _plain_agreement(
    name: str, first: Checkpoint, a: StoredEntry, second: Checkpoint, b: StoredEntry
) -> TensorAgreement:
    if a.shape != b.shape:
        return TensorAgreement(name, OTHER_VALUES, f"shapes are {a.shape} and {b.shape}")
    kinds: list[str] = []
    different = 0
    for x, y in _elements(first, a, second, b):
        different += int(_differ(x.double(), y.double()).sum())
        kinds = [str(t.dtype).removeprefix("torch.") for t in (x, y)]
    if not different:
        words = f"stored as {' and '.join(kinds)}" if a.dtype != b.dtype else "zeros of other signs"
        return TensorAgreement(name, SAME_VALUES, words)
    count = math.prod(a.shape)
    return TensorAgreement(name, OTHER_VALUES, _counted(different, count, "values differ"))


def _quantized_agreement(
    name: str, a: WeightRows, b: WeightRows, packings: list[str]
) -> TensorAgreement:
    if a.shape != b.shape:
        return TensorAgreement(name, OTHER_VALUES, f"shapes are {a.shape} and {b.shape}")
    sums = GridSums()
    for start, stop in common_spans(a, b):
        sums.add(start, a.rows(start, stop), b.rows(start, stop))
    if not sums.values:
        packed = f"packed as {packings[0]} and as {packings[1]}"
        words = packed if packings[0] != packings[1] else "packed in another way"
        return TensorAgreement(name, SAME_VALUES, words)
    differences = list(_other_grids(a, b, sums))
    if sums.steps:
        differences.append(_steps_in_words(sums.steps, math.prod(a.shape)))
    words = "; ".join(differences) or "values differ"
    return TensorAgreement(name, OTHER_VALUES, words, dict(sorted(sums.steps.items())))


@dataclass
class GridSums:
    """Counts over the spans of two weights: what differs of values, scales and codes."""

    values: int = 0
    scales: int = 0
    scale_count: int = 0
    zeros: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    ratios: list[Tensor] = field(default_factory=list)

    def add(self, start: int, a: QuantizedWeight, b: QuantizedWeight) -> None:
        """Compare rows of both, of which `start` is the first."""
        self.values += int(_differ(a.values(), b.values()).sum())
        # A scale of more rows than a span has counts once.
        is_first = a.tile[0] <= TALL or start % a.tile[0] == 0
        if is_first and a.tile == b.tile and a.scales.shape == b.scales.shape:
            self._add_scales(a, b)
        if a.element.removeprefix("u") == b.element.removeprefix("u"):
            moved = element_indices(a) - element_indices(b)
            if a.zero_points is not None and b.zero_points is not None and a.tile == b.tile:
                moved = moved - (a.spread(a.zero_points) - b.spread(b.zero_points))
            moved = moved.long()
            sizes, counts = moved[moved != 0].unique(return_counts=True)
            self.steps.update(dict(zip(sizes.tolist(), counts.tolist(), strict=True)))

    def _add_scales(self, a: QuantizedWeight, b: QuantizedWeight) -> None:
        different = _differ(a.scales, b.scales)
        self.scales += int(different.sum())
        self.scale_count += different.numel()
        ratios = (a.scales[different] / b.scales[different]).log2()
        self.ratios.append(ratios[ratios.isfinite()].abs())
        if a.zero_points is not None and b.zero_points is not None:
            self.zeros += int(_differ(a.zero_points, b.zero_points).sum())


def _other_grids(a: WeightRows, b: WeightRows, sums: GridSums) -> Iterator[str]:
    """Say in words how formats, groups, scales and zero points differ."""
    if a.element != b.element:
        yield f"elements are {a.element} and {b.element}"
    if not sums.scale_count:
        yield f"groups are {_tile(a)} and {_tile(b)}"
        return
    if sums.scales:
        ratios = torch.cat(sums.ratios)
        size = f", at the median by {2 ** float(ratios.median()):.4g}" if len(ratios) else ""
        yield _counted(sums.scales, sums.scale_count, f"scales differ{size}")
    if a.has_zero_points and b.has_zero_points:
        if sums.zeros:
            yield _counted(sums.zeros, sums.scale_count, "zero points differ")
    elif a.has_zero_points != b.has_zero_points:
        yield f"the {'first' if a.has_zero_points else 'second'} alone has zero points"


def _tile(weight: WeightRows) -> str:
    return f"{weight.tile[0]} x {weight.tile[1]}"


def _differ(x: Tensor, y: Tensor) -> Tensor:
    """Return where values differ; NaN equals NaN."""
    return (x != y) & ~(x.isnan() & y.isnan())


def _counted(count: int, total: int, words: str) -> str:
    return f"{count:,} of {total:,} {words}"


def _steps_in_words(counts: Counter[int], total: int) -> str:
    sizes: Counter[int] = Counter()
    for step, count in counts.items():
        sizes[min(abs(step), 3)] += count
    names = {1: "by one step", 2: "by two", 3: "by more"}
    listed = ", ".join(f"{sizes[size]:,} {names[size]}" for size in sorted(sizes))
    return f"{_counted(counts.total(), total, 'codes differ')}: {listed}"


def agreement_lines(record: AgreementRecord, limit: int = 40) -> Iterator[str]:
    """Say whether two exports are equal, and where they are not."""
    counts = Counter(tensor.outcome for tensor in record.tensors)
    differences = record.differences
    names = f"{record.first} and {record.second}"
    if not differences:
        more = f", {counts[SAME_VALUES]:,} packed in another way" if counts[SAME_VALUES] else ""
        yield f"{names} are the same: {len(record.tensors):,} tensors are equal{more}"
    else:
        yield (
            f"{names} differ in {len(differences):,} of {len(record.tensors):,} tensors; "
            f"{differences[0].name}: {differences[0].difference}"
        )
    for tensor in differences[1:limit]:
        yield f"{tensor.name}: {tensor.difference}"
    if len(differences) > limit:
        yield f"… and {len(differences) - limit} more; --json has all"
    for tensor in record.tensors:
        if tensor.outcome == SAME_VALUES and counts[SAME_VALUES] <= limit:
            yield f"{tensor.name}: equal values, {tensor.difference}"
