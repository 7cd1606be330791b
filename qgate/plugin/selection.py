"""What was asked for and cannot run: options that mean nothing, modes that fit no model.

Within collection an error is one of a test file; a usage error is told when it is over. A worker of
pytest-xdist tells the process that talks to the user, which collects nothing itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from qgate.plugin.options import settings_of
from qgate.plugin.settings import home_above


@dataclass
class Selection:
    """What a run left out, and why; `empty` if that was all that was asked for."""

    refused: list[str] = field(default_factory=list)
    unfit: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    empty: bool = False
    collected: int = 0
    narrowed: bool = False

    def refuse(self, reason: str) -> None:
        if reason not in self.refused:
            self.refused.append(reason)

    def does_not_fit(self, model: str, mode: str, why: str) -> None:
        self.unfit[model, mode] = why


_SELECTION: pytest.StashKey[Selection] = pytest.StashKey()


def selection_of(config: pytest.Config) -> Selection:
    return config.stash.setdefault(_SELECTION, Selection())


def sort_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse, or deselect what does not fit; without a gate left nothing may look green."""
    found = selection_of(config)
    found.collected = _gates(items)
    _check_home(config, items, found)
    if found.refused:
        if hasattr(config, "workerinput"):
            items[:] = []
            return
        raise pytest.UsageError(found.refused[0])
    unfit = Counter(case for item in items if (case := _case(item)) in found.unfit)
    if not unfit:
        return
    tests = {case: f"{n} test{'s' * (n > 1)} deselected" for case, n in unfit.items()}
    found.notes += [f"{tests[case]}: {found.unfit[case]}" for case in unfit]
    left = [item for item in items if _case(item) not in found.unfit]
    if not any(_case(item)[1] for item in left):
        found.empty = True
        left = [item for item in left if item.get_closest_marker("qgate") is None]
    kept = set(map(id, left))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = left
    found.collected = _gates(left)


def _gates(items: list[pytest.Item]) -> int:
    return sum(item.get_closest_marker("qgate") is not None for item in items)


def note_left(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whether -k, a conftest or anything else left gates out: then nothing is unused."""
    found = selection_of(config)
    found.narrowed = _gates(items) != found.collected


def _check_home(config: pytest.Config, items: list[pytest.Item], found: Selection) -> None:
    """Refuse gates of a project that has settings of its own: they would run under others."""
    home = settings_of(config).home
    for folder in {item.path.parent for item in items if item.get_closest_marker("qgate")}:
        own = home_above(folder)
        if own is not None and own != home and own.is_relative_to(config.rootpath):
            found.refuse(
                f"qgate: {folder} is of the project in {own}, and this run has the settings of "
                f"{home}: run its gates by themselves, pytest {folder}."
            )


def _case(item: pytest.Item) -> tuple[str, str]:
    params = getattr(item, "callspec", None)
    found = {} if params is None else params.params
    if item.get_closest_marker("qgate") is None or not isinstance(found.get("mode"), str):
        return "", ""
    return str(found.get("model", "")), found["mode"]
