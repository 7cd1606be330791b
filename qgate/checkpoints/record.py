"""The record of one comparison: every weight of the child, and what is not as declared."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from qgate.checkpoints.recipes import DeclaredFormat


@dataclass(frozen=True)
class ScaleFigures:
    """Counts of scales, and how they lie beside ideal ones.

    log2_ratio  median of log2(scale / ideal scale), None without a parent
    """

    count: int
    not_finite: int
    zero: int
    negative: int
    smallest: float
    largest: float
    all_equal: bool
    log2_ratio: float | None = None


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
    at_ends_share    share of elements at the smallest or largest value of the format
    flushed_share    share of values that are zero, and not in the ideal quantizer
    steps            of codes with more error than ideal ones
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


@dataclass(frozen=True)
class WeightRecord:
    """One weight of the child.

    format   as stored: "int8 per row", or the dtype of one that is not quantized
    matched  how its parent was found: "name", "prefix", "fused", "content", or "" for none
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


@dataclass
class CheckpointRecord:
    """The comparison of a quantized checkpoint with what it declares and with its parent.

    written_recipe   what the checkpoint is, in the form of a recipe file
    """

    child: str
    parent: str | None
    method: str
    weights: list[WeightRecord] = field(default_factory=list)
    findings: list[CheckpointFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmatched_parents: list[str] = field(default_factory=list)
    written_recipe: dict[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return asdict(self)
