"""The record of one check: what was held, what was left out and why, what would have been seen."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from qgate.charts.overviews import Overview, Overviewed
from qgate.errors import CopyableError
from qgate.text import counted, lines_for_terminal

INCONCLUSIVE = "inconclusive:"
"""Words with which the cause of a check begins that could not have seen a plain defect."""
OVER_BUDGET = "beyond budget_s"
"""Words with which a reason begins where an input was left out for the time it would take."""


@dataclass(repr=False)
class CheckReport(Overviewed):
    """The record of one check.

    name             the function that was checked
    conventions      argument or "result" → the convention that its quantization follows
    held             the inputs at which the kernel agreed: "the example", names of derived inputs
    left_out         derived inputs that were not checked, with the reason
    largest          "argument 0" → the largest size that was tried along each of its dimensions
    unvaried         dimensions along which no other size was tried
    noise            float noise allowed at a typical element, relative to the expected values' RMS
    error            relative mean squared error against the unquantized reference
    format_error     that of a correct kernel: what the format itself costs
    smallest_defect  by kind: the smallest relative error of that kind that would have failed
    kappa            of a result that is cast without a scale: the most values of its format that it
                     lies from the defined one, as IEEE P3109 counts them
    gradients        "argument 0" → the record of the check of its gradient
    notes            what else a reader should know, a sentence each
    seed             of the derived inputs
    """

    name: str
    conventions: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    largest: dict[str, list[int]] = field(default_factory=dict)
    unvaried: list[str] = field(default_factory=list)
    noise: float = 0.0
    error: float = 0.0
    format_error: float = 0.0
    smallest_defect: dict[str, float] = field(default_factory=dict)
    kappa: int | None = None
    gradients: dict[str, CheckReport] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seed: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return the record as plain data."""
        return asdict(self)

    def overview(self) -> Overview:
        """Describe the check: its lines, and which inputs were held or left out."""
        first, *lines = str(self).splitlines()
        inputs = [(name, "") for name in self.held] + list(self.left_out.items())
        return Overview(first, inputs, _input_row, "input", [line.strip() for line in lines])

    def __str__(self) -> str:
        inputs = counted(len(self.held), "input")
        lines = [f"{self.name} agrees at {inputs}; float noise is {self.noise:.1e}"]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {position}: {name}" for position, name in self.conventions.items()]
        sizes = ", ".join(f"{of} {'x'.join(map(str, size))}" for of, size in self.largest.items())
        lines += [f"  largest sizes tried: {sizes}; seed {self.seed}"] if sizes else []
        if self.unvaried:
            lines.append(f"  no other size was tried along: {', '.join(self.unvaried)}")
        if self.format_error:
            lines.append(
                f"  relative error against unquantized values {self.error:.3g}, of an ideal kernel "
                f"{self.format_error:.3g}"
            )
        if self.kappa is not None:
            steps = counted(self.kappa, "value step")
            lines.append(f"  kappa {self.kappa}: {steps} from the defined result at most")
        lines += [
            f"  smallest defect seen, {_share_words(kind, size)}"
            for kind, size in self.smallest_defect.items()
        ]
        lines += [f"  left out: {name} ({reason})" for name, reason in self.left_out.items()]
        for report in self.gradients.values():
            lines += [f"  {line}" for line in str(report).splitlines()]
        return lines_for_terminal(lines)


def _share_words(kind: str, size: float) -> str:
    """Write a share in percent; `kind` may end with what it is a share of."""
    defect, _, of = kind.partition(", of ")
    return f"{defect}: {100 * size:.2g} %{' of ' + of if of else ''}"


def _input_row(pair: tuple[str, str]) -> dict[str, object]:
    name, reason = pair
    return {"input": name, "held": "no" if reason else "yes", "reason": reason}


@dataclass(frozen=True)
class WorstValue:
    """The value of a result that is farthest outside of what float noise allows.

    index      where it is
    actual     what the kernel gave; None for NaN or Inf
    expected   the nearest right value, and the least and the most that float noise allows
    """

    index: list[int]
    actual: float | None
    expected: float | None
    least: float | None
    most: float | None


class CheckFailure(CopyableError, AssertionError):
    """A check that failed: its first line says what is wrong, the rest where and by how much.

    input   the input that the first line is about, where it is about one
    worst   its worst value
    """

    __module__ = "qgate.testing"  # Where users import it: pytest's summary begins with it.

    def __init__(
        self,
        cause: str,
        report: CheckReport,
        *details: str,
        input: str = "",
        worst: WorstValue | None = None,
    ) -> None:
        super().__init__(lines_for_terminal([cause, *details], "  "))
        self.cause, self.report, self.details = cause, report, details
        self.input, self.worst = input, worst

    @property
    def is_inconclusive(self) -> bool:
        """Return True if the kernel agrees, and the check could not have seen a plain defect."""
        return self.cause.startswith(INCONCLUSIVE)
