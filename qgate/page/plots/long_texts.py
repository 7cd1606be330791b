"""Plots of a mode along a long text: its divergence from the reference, and its loss."""

from __future__ import annotations

from collections.abc import Sequence

from qgate.charts import svg
from qgate.charts.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    brief,
    color,
    label,
    markers,
    path,
    polyline,
    times,
)
from qgate.results.pictures import LongTextPicture, predicted_tokens


def divergence_along(picture: LongTextPicture) -> str:
    """Draw the KL divergence of each stretch of tokens."""
    x = _tokens(picture)
    y = svg.logarithmic(picture["kl"], BOTTOM, TOP + 16, "KL divergence (nat)")
    points = [
        (x.place(at), y.place(kl)) if kl > 0 else None
        for at, kl in zip(_middles(picture), picture["kl"], strict=True)
    ]
    shapes = path(polyline(points), stroke=color("blue"), stroke_width=1.4, fill="none")
    shapes += markers("circle", [point for point in points if point], "blue")
    first, last = brief(picture["kl"][0]), brief(picture["kl"][-1])
    description = f"{len(points)} stretches of {picture['stretch']} tokens, {first} in the first, "
    description += f"{last} in the last."
    end, name = _end(picture, x)
    return svg.panel(x, y, shapes + end, name, divergence_finding(picture), description)


def loss_along(picture: LongTextPicture) -> str:
    """Draw the loss of each stretch of tokens, over the interval of the reference's."""
    x = _tokens(picture)
    middles = _middles(picture)
    pairs = [*zip(picture["reference"], picture["half_95"], strict=True)]
    edges = [[mean + sign * half for mean, half in pairs] for sign in (-1, 1)]
    values = [*picture["bits"], *edges[0], *edges[1]]
    room = 0.05 * (max(values) - min(values)) or 0.1
    y = svg.linear(min(values) - room, max(values) + room, BOTTOM, TOP + 16, "bits per token", 6)

    def places(numbers: Sequence[float]) -> list[tuple[float, float]]:
        return [(x.place(at), y.place(n)) for at, n in zip(middles, numbers, strict=True)]

    band = polyline([*places(edges[0]), *places(edges[1])[::-1]])
    shapes = path(band, fill=color("green"), fill_opacity=0.15, stroke="none")
    shapes += path(
        polyline(places(picture["bits"])), stroke=color("blue"), stroke_width=1.4, fill="none"
    )
    end, name = _end(picture, x)
    name += label(RIGHT, svg.STRIP, "shaded: 95 % of the reference", "end", fill="green")
    description = f"{brief(picture['bits'][-1])} bits in the last stretch, "
    description += f"the reference has {brief(picture['reference'][-1])}."
    return svg.panel(x, y, shapes + end, name, loss_finding(picture), description)


def divergence_finding(picture: LongTextPicture) -> str:
    """Say how the divergence of the last quarter compares with that of the first."""
    quarter = max(1, len(picture["kl"]) // 4)
    first, last = sum(picture["kl"][:quarter]), sum(picture["kl"][-quarter:])
    if first <= 0 or last <= 0:
        return "The divergence is zero in parts of the text"
    tokens = f"{quarter * picture['stretch']:,} tokens"
    if last < first:
        return f"The divergence falls {times(first / last)} from the first {tokens} to the last"
    return f"The divergence grows {times(last / first)} from the first {tokens} to the last"


def loss_finding(picture: LongTextPicture) -> str:
    """Say where the loss leaves the interval of the reference's for good."""
    predicted, total = predicted_tokens(picture), picture["stretch"] * len(picture["bits"])
    if predicted >= total:
        return f"Predicts as the reference to the end, {total:,} tokens"
    return f"Stops predicting at token {predicted:,} of {total:,}"


def _tokens(picture: LongTextPicture) -> svg.Axis:
    total = picture["stretch"] * len(picture["kl"])
    return svg.linear(0, total, LEFT, RIGHT, "token", 8)


def _middles(picture: LongTextPicture) -> list[float]:
    return [(number + 0.5) * picture["stretch"] for number in range(len(picture["kl"]))]


def _end(picture: LongTextPicture, x: svg.Axis) -> tuple[str, str]:
    """Draw a line where the mode stops predicting, if it does, and its name."""
    predicted = predicted_tokens(picture)
    if predicted >= picture["stretch"] * len(picture["bits"]):
        return "", ""
    at = x.place(predicted)
    name = label(min(at, RIGHT - 90), TOP + 9, "stops predicting", fill="red")
    return svg.rule(at, TOP + 14, "red", "4 3"), name
