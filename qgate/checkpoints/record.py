"""The record of one comparison: every weight of the child, and what is not as declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qgate.charts.overviews import Overview, Overviewed
from qgate.checkpoints.recipes import DeclaredFormat
from qgate.records.plain_data import plain_data
from qgate.text import one_line, shortened

KIND = "qgate checkpoint 1"
_SHOWN = 5
RecipeEntry = str | dict[str, str | int | list[int]]
"""A format in a recipe file: its name, or its name with what shares a scale."""
WrittenRecipe = dict[str, dict[str, RecipeEntry] | list[str]]
"""The targets of a recipe file, and what it ignores."""


@dataclass(frozen=True)
class ScaleFigures:
    """Counts of scales, and how they lie beside ideal ones.

    log2_ratio  median of log2(scale / ideal scale), None without a parent
    octaves     the exponent of the lowest octave with a scale, and how many are in each from there
    """

    count: int
    not_finite: int
    zero: int
    negative: int
    smallest: float | None
    largest: float | None
    all_equal: bool
    log2_ratio: float | None = None
    octaves: tuple[int, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class StepFigures:
    """Figures of codes beside the parent's nearest codes at the stored scales.

    over_nearest_db   error over that of the nearest codes
    share       share of codes that are not the nearest
    largest     most steps from the nearest code
    rms         root of the mean squared steps: of all, of the worst row, of the worst column
    offset      largest mean of the steps of a row, without sign
    slope       largest share of the values of a row or a column that these steps lose
    gain        squared correlation of steps and values in a group, 1 by chance
    left_db     error of a column that other columns do not explain, over that of the nearest codes
    """

    over_nearest_db: float
    share: float
    largest: int
    rms: float
    row_rms: float
    column_rms: float
    offset: float
    slope: float
    gain: float
    left_db: float | None


@dataclass(frozen=True)
class WeightFigures:
    """Figures of one quantized weight; errors are None without a parent.

    error            sum of squared differences over that of the parent's values
    cosine           of the values and the parent's
    over_ideal_db    error over that of the ideal quantizer
    over_codes_db    error over that of the nearest codes at the stored scales
    worst_row        the row with the most error over ideal, and by how much in dB
    rows_over        rows with more error over ideal than right exporters make
    other_rows_db    error of all other rows over ideal
    worst_group      the group with the most error over ideal: its first row and column, and by how
                     much in dB; None where a row is a group
    groups_over, other_groups_db   the same of groups
    at_ends_share    share of elements at the smallest or largest value of the format
    flushed_share    share of values that are zero, and not in the ideal quantizer
    steps            of codes with more error than ideal ones
    subnormal_scales     scales in E4M3 that are subnormal
    outside_zero_points  zero points that are no codes of the elements
    zero_blocks      blocks of GGUF that are zero, and not in the ideal quantizer
    fours_share      share of blocks of NVFP4 whose largest element is 4, of those with 4 or 6
    """

    count: int
    not_finite: int
    zero_share: float
    unused_codes: int
    at_ends_share: float
    scales: ScaleFigures
    error: float | None = None
    cosine: float | None = None
    over_ideal_db: float | None = None
    over_codes_db: float | None = None
    worst_row: tuple[int, float] | None = None
    flushed_share: float | None = None
    steps: StepFigures | None = None
    subnormal_scales: int = 0
    outside_zero_points: int = 0
    zero_blocks: int = 0
    rows_over: int = 0
    other_rows_db: float | None = None
    worst_group: tuple[int, int, float] | None = None
    groups_over: int = 0
    other_groups_db: float | None = None
    fours_share: float | None = None


@dataclass(frozen=True)
class WeightRecord:
    """One weight of the child.

    format   as stored: "int8 per row", or the dtype of one that is not quantized
    matched  how its parent was found: "name", "prefix", "fused", "content", "llama.cpp", or ""
    outcome  "quantized", "equal", "cast", "changed", "undoes" or "unmatched"
    method   what changed it on purpose: "as GPTQ changes it", …
    undone_by  tensors of the child that undo what a method did to this one
    stored   the format of a quantized weight
    """

    name: str
    packing: str
    format: str
    size: int
    count: int
    parents: tuple[str, ...] = ()
    matched: str = ""
    outcome: str = "unmatched"
    figures: WeightFigures | None = None
    method: str = ""
    undone_by: tuple[str, ...] = ()
    stored: DeclaredFormat | None = None


@dataclass(frozen=True)
class CheckpointFinding:
    """Something that is not as declared: the tensor or pattern it is about, and the cause."""

    subject: str
    cause: str
    over_ideal_db: float | None = None


@dataclass(frozen=True)
class WorstBlock:
    """The part of a weight with the most error: elements of one row that share a scale.

    column   the column of the first of `values` and of `parent`, what is stored and what was
    scale    the scale that they share
    error    of the whole block: sum of squared differences over that of the parent's values
    """

    name: str
    row: int
    column: int
    scale: float | None
    error: float | None
    values: tuple[float | None, ...]
    parent: tuple[float | None, ...]


@dataclass(repr=False)
class CheckpointRecord(Overviewed):
    """The comparison of a quantized checkpoint with what it declares and with its parent.

    method   the library that the configuration names, empty where it declares nothing
    recipe   what is declared, one line per format and for what is ignored
    blocks   the worst blocks of the worst weights, where they were asked for
    kind     name and version of this kind of record
    written_recipe   what the checkpoint is, in the form of a recipe file
    """

    child: str
    parent: str | None
    method: str
    weights: list[WeightRecord] = field(default_factory=list)
    findings: list[CheckpointFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmatched_parents: list[str] = field(default_factory=list)
    recipe: list[str] = field(default_factory=list)
    blocks: list[WorstBlock] = field(default_factory=list)
    kind: str = KIND
    written_recipe: WrittenRecipe = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return the record as plain data; numbers that are not finite are None."""
        return plain_data(self)

    def overview(self) -> Overview:
        """Describe the comparison: its findings, and the weights with the most error."""
        beside = f" beside {one_line(self.parent)}" if self.parent else ""
        count = len(self.findings)
        title = (
            f"CheckpointRecord of {one_line(self.child)}{beside}: {count or 'no'} "
            f"finding{'s' * (count != 1)}, {len(self.weights)} weights"
        )
        lines = [
            f"{shortened(finding.subject, 60)}: {shortened(finding.cause, 75)}"
            for finding in self.findings[:_SHOWN]
        ]
        if count > _SHOWN:
            lines.append(f"… and {count - _SHOWN} more in .findings")
        weights = ranked(self.weights)
        return Overview(title, weights, _weight_row, "weight", lines, "over ideal (dB)")


def _weight_row(weight: WeightRecord) -> dict[str, object]:
    figures = weight.figures
    return {
        "weight": weight.name,
        "format": weight.format,
        "over ideal (dB)": None if figures is None else figures.over_ideal_db,
        "relative error": None if figures is None else figures.error,
    }


def worst_first(weights: Sequence[WeightRecord]) -> list[tuple[WeightRecord, float]]:
    """Return the weights that were measured beside a parent with their error over ideal."""
    measured = [
        (weight, weight.figures.over_ideal_db)
        for weight in weights
        if weight.figures is not None and weight.figures.over_ideal_db is not None
    ]
    return sorted(measured, key=lambda pair: -pair[1])


def ranked(weights: Sequence[WeightRecord]) -> list[WeightRecord]:
    """Return all weights: quantized ones worst first, then the others as they are stored."""
    measured = [weight for weight, _ in worst_first(weights)]
    names = {weight.name for weight in measured}
    remaining = [weight for weight in weights if weight.name not in names]
    return [*measured, *sorted(remaining, key=lambda weight: weight.figures is None)]
