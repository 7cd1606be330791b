"""`--watch-underflow`: what quantization loses at the lower end of its formats, in a whole run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from qgate.plugin.options import value

if TYPE_CHECKING:
    from qgate.sweeps.underflow import Watch

_WATCH: pytest.StashKey[Watch] = pytest.StashKey()


def is_watched(config: pytest.Config) -> bool:
    return bool(value(config, "watch-underflow"))


def start_watching(config: pytest.Config) -> None:
    """Look at every tensor that is quantized until the run ends, where that is asked for."""
    if not is_watched(config):
        return
    from qgate.sweeps.underflow import watch_underflow

    stack = contextlib.ExitStack()
    config.stash[_WATCH] = stack.enter_context(watch_underflow(lambda _text: None))
    config.add_cleanup(stack.close)


def watched_sites(config: pytest.Config) -> list[dict[str, Any]]:
    """Return what this process saw, as plain data."""
    if _WATCH not in config.stash:
        return []
    return [site.to_dict() for site in config.stash[_WATCH].sites.values()]


def underflow_lines(config: pytest.Config, parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sum up what all processes of a run saw; nothing where it was not asked for."""
    if not is_watched(config):
        return []
    from qgate.sweeps.underflow import Watch, WatchedSite

    watch = Watch()
    for part in parts:
        for site in part["underflow"]:
            watch.add(WatchedSite.from_dict(site))
    return watch.lines()
