"""The gate decides: plain numbers and limits in, a verdict with reasons out."""

from qgate.gate.checks import Check
from qgate.gate.limits import Bound, Limits, parse_bound
from qgate.gate.measured import Measured
from qgate.gate.policy import Policy
from qgate.gate.texts import failure_text, first_line
from qgate.gate.updating import WHICH, EntryChange, GateUpdate, decide_update
from qgate.gate.verdict import Verdict, judge
from qgate.metrics.grades import grade_of, grades_of
from qgate.results.scopes import SCOPES

__all__ = [
    "SCOPES",
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
    "grade_of",
    "grades_of",
    "judge",
    "parse_bound",
]
