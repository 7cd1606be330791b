"""`--shard 2/8`: which of the tests this job runs, so that eight jobs run each test once.

What a mode of a model costs is measured once per job, so all its gates stay together; the shards
are filled with the largest groups first. The same tests are dealt in the same way everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

from qgate.plugin.options import update_choice, value
from qgate.plugin.selection import Selection


def shard_of(config: pytest.Config) -> tuple[int, int] | None:
    """The number of this shard, from 1, and of all; None where the run is not divided."""
    text = value(config, "shard")
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        raise pytest.UsageError(
            f"qgate: shard {text!r} is not allowed; 2/8 is the second of eight, from 1/8 to 8/8."
        )
    if update_choice(config) is not None:
        raise pytest.UsageError(
            "qgate: --update-baselines is refused with --shard: baselines are written whole, by "
            "one run that has measured all of them. Update without --shard."
        )
    return number, of


def deal(config: pytest.Config, items: list[pytest.Item], found: Selection) -> None:
    """Leave the tests of this shard, and tell what became of the others."""
    shard = shard_of(config)
    if shard is None or found.refused or not items:
        return
    number, of = shard
    dealt = dealt_to([_group(item) for item in items], of)
    mine = {place for place, to in enumerate(dealt) if to == number - 1}
    if not mine:
        groups = len(set(map(_group, items)))
        raise pytest.UsageError(
            f"qgate: shard {number}/{of} is empty: what was asked for comes in {groups} groups "
            f"that stay together (a mode of a model is one). Use at most {groups} shards."
        )
    left = [item for place, item in enumerate(items) if place not in mine]
    config.hook.pytest_deselected(items=left)
    found.notes.append(f"shard {number}/{of}: {len(mine)} of {len(items)} tests")
    items[:] = [item for place, item in enumerate(items) if place in mine]
    found.collected = sum(item.get_closest_marker("qgate") is not None for item in items)


def dealt_to(groups: Sequence[Hashable], of: int) -> list[int]:
    """The shard of each item, from 0: groups stay whole, the largest are dealt first."""
    sizes: dict[Hashable, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    filled = [0] * of
    home: dict[Hashable, int] = {}
    for group in sorted(sizes, key=lambda each: (-sizes[each], repr(each))):
        home[group] = min(range(of), key=lambda shard: (filled[shard], shard))
        filled[home[group]] += sizes[group]
    return [home[group] for group in groups]


def _group(item: pytest.Item) -> Hashable:
    """A mode or format of a model; other tests are one by one."""
    call = getattr(item, "callspec", None)
    params = {} if call is None else call.params
    if item.get_closest_marker("qgate") is None or not isinstance(params.get("model"), str):
        return item.nodeid
    what = params.get("mode", params.get("fmt"))
    return params["model"], str(what) if what is not None else Path(str(item.path)).stem
