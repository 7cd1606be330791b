"""The audit of one run: comparisons are judged as they pass, and added up by place.

No tensor is kept. An exception in here is counted and named, and never reaches a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from qgate._version import __version__
from qgate.audits.assertions import Assertion, assertion_on
from qgate.audits.callers import Caller, ProjectFiles, caller_of
from qgate.audits.compute import Judgment, judge_closeness, judge_similarity
from qgate.audits.criteria import Closeness, Similarity
from qgate.audits.faults import FAULTS
from qgate.audits.reading import LeftOut, reader_of
from qgate.audits.record import (
    KIND,
    AuditRecord,
    PlaceRecord,
    add_judgment,
    add_limit,
    new_place,
)
from qgate.audits.sources import UnreadableError
from qgate.audits.watching import Comparison
from qgate.text.wording import brief, shortened

MOST_CALLS = 100
"""Comparisons of one place that are judged; later ones are only counted."""
_THOROUGH_CALLS = 3
"""Those of them that try all faults; later ones try those that passed so far, on few elements."""
_NOT_ASSERTED = "results that are not asserted"
_MOST_UNASSERTED = 10


class AuditSession:
    """The places of a run, and the test that is running."""

    def __init__(self, root: str) -> None:
        self.files = ProjectFiles(root)
        self.test = ""
        self.test_files: frozenset[str] = frozenset()
        self.errors: Counter[str] = Counter()
        self._places: dict[tuple[str, int, str, str], PlaceRecord] = {}

    def hear(self, compared: Callable[[], Comparison]) -> None:
        """Judge a comparison that has just passed, if a test is running."""
        if not self.test:
            return
        try:
            with np.errstate(all="ignore"):
                self._judge(compared())
        except Exception as error:
            self.errors[f"{type(error).__name__}: {error}"[:200]] += 1

    def _judge(self, comparison: Comparison) -> None:
        if _is_truth(comparison.returned) and not comparison.returned:
            return
        caller = caller_of(self.files, self.test_files)
        if caller is None:
            return
        spot = self._place_at(caller, comparison)
        spot["calls"] += 1
        thorough = spot["judged"] < _THOROUGH_CALLS
        faults = [name for name in FAULTS if name not in spot["refuses"]]
        if not thorough:
            faults = spot["accepts"]
        unasserted = spot["left_out"].get(_NOT_ASSERTED, 0)
        tries = spot["judged"] + sum(spot["left_out"].values())
        if not faults or tries >= MOST_CALLS or unasserted >= _MOST_UNASSERTED:
            return
        try:
            judgment = self._judgment(comparison, caller, spot, faults, thorough)
        except LeftOut as reason:
            spot["left_out"][str(reason)] = spot["left_out"].get(str(reason), 0) + 1
            return
        except UnreadableError:
            spot["left_out"][_NOT_ASSERTED] = unasserted + 1
            return
        spot["judged"] += 1
        add_judgment(
            spot, judgment.accepted, judgment.refused, judgment.differences, [judgment.coarser]
        )

    def _judgment(
        self,
        comparison: Comparison,
        caller: Caller,
        spot: PlaceRecord,
        faults: list[str],
        thorough: bool,
    ) -> Judgment:
        first, second = comparison.first, comparison.second
        truth = _is_truth(comparison.returned)
        if truth or not comparison.measure:
            # A later call only clears the place of faults, and is not read again.
            assertion = self._assertion(caller, comparison) if truth and thorough else None
            if assertion and (assertion.accepts(False) or not assertion.accepts(True)):
                raise LeftOut(_NOT_ASSERTED)
            add_limit(spot, _limit_text(comparison))
            return judge_closeness(first, second, _closeness(comparison), faults, thorough=thorough)
        assertion = self._assertion(caller, comparison)
        add_limit(spot, shortened(assertion.text, 60))
        reader_of(first)  # refuses what holds no numbers, such as tensors inside vmap
        numbers = _numbers(comparison.returned)
        criterion = Similarity(
            comparison.measure, assertion.accepts, comparison.axis, np.shape(numbers)
        )
        return judge_similarity(first, second, numbers, criterion, faults, thorough=thorough)

    def _assertion(self, caller: Caller, comparison: Comparison) -> Assertion:
        called = comparison.function.rpartition(".")[2]
        assertion = assertion_on(caller.frame, called)
        if assertion is None:
            raise LeftOut(_NOT_ASSERTED)
        if not self.files.holds_tests(assertion.code.co_filename, self.test_files):
            raise LeftOut(_NOT_ASSERTED)
        return assertion

    def _place_at(self, caller: Caller, comparison: Comparison) -> PlaceRecord:
        function = comparison.function
        if function == "assert_close" and caller.library:
            function = caller.library
        key = (caller.file, caller.line, caller.through, function)
        if key not in self._places:
            self._places[key] = new_place(*key, self.test)
        return self._places[key]

    def record(self) -> AuditRecord:
        """Return what was heard so far."""
        places = list(self._places.values())
        return {
            "kind": KIND, "qgate": __version__, "places": places, "errors": dict(self.errors),
            "notes": [],
        }  # fmt: skip


def _is_truth(returned: Any) -> bool:
    return isinstance(returned, bool | np.bool_)


def _closeness(comparison: Comparison) -> Closeness:
    limits = comparison.limits
    if "decimal" in limits:
        return Closeness(0.0, 1.5 * 10.0 ** -limits["decimal"])
    return Closeness(limits["rtol"], limits["atol"])


def _limit_text(comparison: Comparison) -> str:
    if not any(comparison.limits.values()):
        return "exact"
    return ", ".join(f"{name}={brief(value)}" for name, value in comparison.limits.items())


def _numbers(returned: Any) -> Any:
    """Return the number that a comparison returned, or an array of them."""
    if hasattr(returned, "detach"):
        returned = returned.detach().cpu().double().numpy()
    return np.asarray(returned, dtype=np.float64)
