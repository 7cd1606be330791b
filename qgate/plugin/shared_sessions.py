"""The sessions of a process, made when they are first needed; this file loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from qgate.errors import QgateError
from qgate.plugin import lazy
from qgate.plugin.settings import option_error, options_of

if TYPE_CHECKING:
    from qgate.plugin.sessions import Sessions

_ALL_SESSIONS: pytest.StashKey[Sessions] = pytest.StashKey()


def sessions_of(config: pytest.Config) -> Sessions:
    """Return the sessions of this process."""
    if _ALL_SESSIONS not in config.stash:
        config.stash[_ALL_SESSIONS] = lazy.sessions.Sessions(config)
    return config.stash[_ALL_SESSIONS]


def check_sample_files(config: pytest.Config) -> None:
    """Refuse files of samples on the command line that cannot be read, before collection."""
    if {"text", "tokens", "calib-text"} & options_of(config).typed.keys():
        try:
            _ = sessions_of(config).sampling
        except QgateError as error:
            raise option_error(f"qgate: {error}") from None
