"""The record of one comparison: every weight of the child, and what is not as declared."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
class WeightFigures:
    """Figures of one quantized weight; errors are None without a parent.

    error            sum of squared differences over that of the parent's values
    cosine           of the values and the parent's
    over_ideal_db    error over that of the ideal quantizer
    over_codes_db    error over that of the nearest codes at the stored scales
    worst_row        the row with the most error over ideal, and by how much in dB
    at_ends_share    share of elements at the smallest or largest value of the format
    flushed_share    share of values that are zero, and not in the ideal quantizer
    zero_blocks      blocks of GGUF that are zero, and not in the ideal quantizer
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
    zero_blocks: int = 0


@dataclass(frozen=True)
class WeightRecord:
    """One weight of the child.

    format   as stored: "int8 per row", or the dtype of one that is not quantized
    matched  how its parent was found: "name", "prefix", "fused", "content", "llama.cpp", or ""
    outcome  "quantized", "equal", "cast", "changed" or "unmatched"
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


@dataclass(frozen=True)
class CheckpointFinding:
    """Something that is not as declared: the tensor or pattern it is about, and the cause."""

    subject: str
    cause: str
    over_ideal_db: float | None = None


@dataclass
class CheckpointRecord:
    """The comparison of a quantized checkpoint with what it declares and with its parent."""

    child: str
    parent: str | None
    method: str
    weights: list[WeightRecord] = field(default_factory=list)
    findings: list[CheckpointFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmatched_parents: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return asdict(self)
