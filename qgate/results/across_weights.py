"""Errors of a run that were held against those of other weights, for its summary and its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from qgate.text import listed

_SHOWN = 12


class AcrossWeights(TypedDict):
    """Errors of one model that were held against accepted errors of other weights.

    baseline   folder of the accepted errors
    accepted   hashes of the weights that they are of; empty where they are those that ran
    weights    hash of the weights that ran
    room       least and largest share by which the error of a whole tensor may exceed the accepted
               one, by scope
    left_out   what cannot be compared across weights, and what stands in for it
    """

    model: str
    baseline: str
    accepted: list[str]
    weights: str
    room: dict[str, list[float]]
    left_out: list[str]


def add_across_weights(
    one: Sequence[AcrossWeights], other: Sequence[AcrossWeights]
) -> list[AcrossWeights]:
    """Join what two parts of a run held across weights, by model."""
    by_model: dict[str, AcrossWeights] = {}
    for part in (*one, *other):
        joined = by_model.setdefault(part["model"], {**part, "room": {}, "left_out": []})
        joined["accepted"] = sorted({*joined["accepted"], *part["accepted"]})
        for scope, ends in part["room"].items():
            shares = [*joined["room"].get(scope, ()), *ends]
            joined["room"][scope] = [min(shares), max(shares)]
        joined["left_out"] = sorted({*joined["left_out"], *part["left_out"]})
    return [*by_model.values()]


def across_weights_of(header: Mapping[str, object]) -> list[AcrossWeights]:
    """Return what a header says was held across weights; nothing in those of other runs."""
    return header.get("across_weights") or []  # type: ignore[return-value]


def across_weights_texts(header: Mapping[str, object], folded: bool = True) -> list[str]:
    """Write whose errors were held across weights, with which room, and what was not compared.

    What was not compared is one sentence for each model, or one for each reason.
    """
    return [text for model in across_weights_of(header) for text in _texts(model, folded)]


def _texts(model: AcrossWeights, folded: bool) -> Iterator[str]:
    name, baseline = model["model"], model["baseline"]
    if not model["accepted"]:
        yield (
            f"not held across weights: the baseline of {name} ({baseline}) is of the weights that "
            "ran, so its errors were held as they always are"
        )
        return
    of = listed([_short(weights) for weights in model["accepted"]], 3)
    yield (
        f"held across weights: errors of {name} (weights {_short(model['weights'])}) against the "
        f"baseline of weights {of} ({baseline}){_room_text(model)}"
    )
    left_out = model["left_out"]
    for text in ["; ".join(left_out)] if folded and left_out else left_out:
        yield f"not compared across weights: {text}"


def _room_text(model: AcrossWeights) -> str:
    """Write `, with 25 % to 50 % room (carried), 100 % room (task)`; empty if nothing was held."""
    scopes: dict[str, list[str]] = {}
    for scope, ends in sorted(model["room"].items(), key=lambda room: (room[1], room[0])):
        share = " to ".join(dict.fromkeys(f"{100 * end:g} %" for end in ends))
        scopes.setdefault(share, []).append(scope)
    parts = [f"{share} room ({', '.join(of)})" for share, of in scopes.items()]
    return f", with {', '.join(parts)}" if parts else ""


def _short(weights: str) -> str:
    return weights if len(weights) <= _SHOWN else f"{weights[:_SHOWN]}…"
