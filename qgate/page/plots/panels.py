"""All panels of what a record carries to be drawn; a new kind of picture is a new entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qgate.page.plots import _findings
from qgate.page.plots._checked import checked
from qgate.page.plots.errors import error_by_magnitude, error_histogram, worst_channels
from qgate.page.plots.magnitudes import magnitude_histogram, magnitudes_finding
from qgate.page.plots.scatter import density
from qgate.page.plots.sweeps import sweep_curve, sweep_finding
from qgate.text import one_line

# So many pictures of one record are drawn; a record that has more was not written by qgate.
MOST = 12
Draw = tuple[str, Callable[[Any], str], Callable[[Any], str]]


@dataclass(frozen=True)
class Panel:
    """A picture, the finding that is drawn as its title, and which picture it is."""

    title: str
    svg: str
    kind: str


# By kind of picture: the panels it makes, what draws each, and what says its finding.
DRAWN: dict[str, tuple[Draw, ...]] = {
    "errors": (
        ("error_histogram", error_histogram, _findings.histogram_finding),
        ("density", density, _findings.density_finding),
        ("worst_channels", worst_channels, _findings.channels_finding),
        ("error_by_magnitude", error_by_magnitude, _findings.magnitude_finding),
    ),
    "sweep": (("sweep", sweep_curve, sweep_finding),),
    "magnitudes": (("magnitudes", magnitude_histogram, magnitudes_finding),),
}


# Panels that there is nothing to draw for: a record without channels, a reference of zeros.
EMPTY: dict[str, Callable[[Any], bool]] = {
    "worst_channels": lambda picture: not picture.get("channels"),
    "density": lambda picture: not picture["density"]["cells"],
}


def panels_of(record: Mapping[str, Any]) -> tuple[list[Panel], list[str]]:
    """The panels of a record, and why others could not be drawn; nothing it holds is an error."""
    carried = record.get("pictures")
    if carried is None:
        return [], []
    if not isinstance(carried, list | tuple):
        return [], ["the pictures of this record are no list"]
    panels: list[Panel] = []
    problems = [f"{len(carried) - MOST} more pictures are not drawn"] * (len(carried) > MOST)
    for number, picture in enumerate(carried[:MOST], start=1):
        try:
            panels += _panels(checked(picture))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as reason:
            problems.append(one_line(f"picture {number} cannot be drawn: {reason}"))
    return panels, problems


def _panels(picture: Any) -> Iterable[Panel]:
    for kind, draw, finding in DRAWN[picture["kind"]]:
        if kind in EMPTY and EMPTY[kind](picture):
            continue
        yield Panel(finding(picture), draw(picture), kind)
