"""Plot of the sweep in a record: the error over scale exponents, recommended and accepted."""

from __future__ import annotations

from qgate.charts.scale_curves import ScaleCurve, scale_curve, scale_finding
from qgate.results.pictures import SweepPicture


def sweep_curve(picture: SweepPicture) -> str:
    """Draw relative MSE over the scale exponent, exact levels in a row at the bottom."""
    return scale_curve(_curve(picture))


def sweep_finding(picture: SweepPicture) -> str:
    """Say what the recommended scale saves beside the accepted one."""
    return scale_finding(_curve(picture))


def _curve(picture: SweepPicture) -> ScaleCurve:
    return ScaleCurve(
        picture["format"], picture["levels"], picture["recommended"], picture["accepted"]
    )
