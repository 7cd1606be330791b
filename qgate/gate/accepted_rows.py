"""Measured rows beside what was accepted for them, and the sites that only were accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qgate.baselines import kind_of
from qgate.errors import QgateError
from qgate.gate.checks import NOT_QUANTIZED
from qgate.gate.ledger import AcceptedErrors
from qgate.gate.measured import Measured


def with_accepted(
    row: Measured,
    accepted: Mapping[str, float | str],
    elsewhere: Mapping[str, str] | None = None,
    kind: str = "",
) -> Measured:
    """Add what was accepted to a row; a text that was accepted is asked for.

    `elsewhere` has the devices of values of other arithmetic. Only those of another kind than this
    run's have the room that its own arithmetic needs.
    """
    if row.accepted is not None:
        raise QgateError(
            f"what was measured at {row.site} brings accepted errors of its own: leave `accepted` "
            "out, they come from the baseline."
        )
    texts = {name: value for name, value in accepted.items() if isinstance(value, str)}
    numbers = {name: value for name, value in accepted.items() if not isinstance(value, str)}
    now = {**dict.fromkeys(texts, NOT_QUANTIZED), **row.texts}
    devices = elsewhere or {}
    room = {
        name: size
        for name, size in row.device_room.items()
        if name in devices and kind_of(devices[name]) != kind
    }
    return replace(
        row, accepted=numbers or None, accepted_texts=texts, texts=now, elsewhere=devices,
        device_room=room,
    )  # fmt: skip


def absent_sites(
    accepted: AcceptedErrors, suite: str, measured: Sequence[Measured], whole: Sequence[str]
) -> dict[tuple[str, str], str]:
    """Return sites accepted in the layers measured here that were not measured now.

    Each has the quantizer that was accepted there. Sites in no layer can be of another test: they
    are listed at the end of a complete run.
    """
    layers, scopes = {row.layer for row in measured} - {""}, {row.scope for row in measured}
    absent: set[tuple[str, str]] = {
        (site, scope)
        for layer in layers
        for site, scope in accepted.by_layer.get((suite, layer), ())
        if scope in scopes
    }
    for layer in whole:
        absent |= accepted.by_layer.get((suite, layer), set())
    return {
        (site, scope): str(accepted.by_site[suite, site, scope].get("quantizer", ""))
        for site, scope in absent - {row.key for row in measured}
    }
