"""The gate decides: plain numbers and limits in, a verdict with reasons out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy

if TYPE_CHECKING:
    from qgate.gate.checks import Check, Verdict, judge
    from qgate.gate.ledger import WHICH, EntryChange, GateUpdate, decide_update
    from qgate.gate.measured import Measured
    from qgate.gate.policy import Bound, Limits, Policy, parse_bound
    from qgate.gate.texts import failure_text, first_line

__all__ = [
    "WHICH",
    "Bound",
    "Check",
    "EntryChange",
    "GateUpdate",
    "Limits",
    "Measured",
    "Policy",
    "Verdict",
    "decide_update",
    "failure_text",
    "first_line",
    "judge",
    "parse_bound",
]

__getattr__ = lazy(
    __name__,
    {
        "checks": "Check Verdict judge",
        "ledger": "EntryChange GateUpdate WHICH decide_update",
        "measured": "Measured",
        "policy": "Bound Limits Policy parse_bound",
        "texts": "failure_text first_line",
    },
)
