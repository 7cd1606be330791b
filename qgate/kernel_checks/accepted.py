"""Accepted figures of a kernel: one small file per check, written on request and held otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from qgate.expected.longer import is_longer
from qgate.kernel_checks.record import OVER_BUDGET, CheckFailure, CheckReport
from qgate.kernel_checks.updating import UPDATING
from qgate.records import required_fields, validate
from qgate.storage.files import replacing
from qgate.storage.foreign import MOST_SETTINGS, read_foreign

TOLERANCE = 1.05
"""Times the accepted relative error, and times the accepted noise."""
REMEDY = "run pytest with --update-baselines to accept what was measured"


class AcceptedFigures(TypedDict):
    """The content of a file.

    conventions  how each quantized position is quantized, by its words
    held         inputs that were held against the expected result
    error        relative error; `noise` is that of float arithmetic
    """

    name: str
    conventions: dict[str, str]
    held: list[str]
    error: float
    noise: float


FIELDS = required_fields(AcceptedFigures)


def hold_accepted(path: Path, report: CheckReport) -> None:
    """Compare a report with the accepted one; write it if the run updates accepted values."""
    figures = {name: value for name, value in report.to_dict().items() if name in FIELDS}
    if UPDATING.get():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as written:
            text = json.dumps(figures, indent=1) + "\n"
            written.write_text(text, encoding="utf-8", newline="\n")
        return
    if not path.exists():
        raise CheckFailure(f"{report.name} has no accepted values in '{path}'", report, REMEDY)
    accepted = _read(path)
    for position, name in report.conventions.items():
        before = accepted["conventions"].get(position)
        if before != name:
            raise CheckFailure(
                f"{report.name} quantizes {position} by {name!r}, accepted is {before!r}",
                report,
                REMEDY,
            )
    missing = [name for name in accepted["held"] if not _holds(report, name)]
    if missing:
        reasons = [f"{name}: {report.left_out.get(name, 'not derived')}" for name in missing]
        raise CheckFailure(
            f"{report.name} no longer holds {len(missing)} of {len(accepted['held'])} accepted "
            f"inputs, first {missing[0]!r}",
            report,
            *reasons[:5],
            REMEDY,
        )
    pairs = {
        "error": (report.error, accepted["error"]), "noise": (report.noise, accepted["noise"]),
    }  # fmt: skip
    for name, (value, limit) in pairs.items():
        if not value <= limit * TOLERANCE:
            raise CheckFailure(
                f"{report.name} has a relative {name} of {value:.4g}, accepted is {limit:.4g}",
                report,
                REMEDY,
            )


def _holds(report: CheckReport, name: str) -> bool:
    """Tell if a check held an accepted input, apart from what depends on how fast a machine is.

    A machine with less time leaves the longest inputs out, one with more holds longer ones instead.
    """
    if reason := report.left_out.get(name):
        return reason.startswith(OVER_BUDGET)
    return name in report.held or any(is_longer(held, name) for held in report.held)


def _read(path: Path) -> AcceptedFigures:
    try:
        accepted: AcceptedFigures = json.loads(read_foreign(path, "accepted values", MOST_SETTINGS))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"accepted values '{path}' cannot be read: {error}. {REMEDY}.") from None
    try:
        validate(accepted, AcceptedFigures)
    except ValueError as error:
        raise ValueError(
            f"'{path}' holds no accepted values of a kernel check (fields {', '.join(FIELDS)}): "
            f"{error}; {REMEDY}."
        ) from None
    return accepted
