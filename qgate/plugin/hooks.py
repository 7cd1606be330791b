"""Hooks that a conftest may implement; `pytest --help` lists them with the first line of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from qgate.models import Model
    from qgate.modes import Mode
    from qgate.results.schema import Record


@pytest.hookspec
def pytest_qgate_models(config: pytest.Config) -> Mapping[str, Callable[..., Model]]:  # type: ignore[empty-body]
    """Return models of your own: a name for --model → a callable that returns a qgate.Model.

    The callable is given those of samples, seqlen, seed … that its signature names.
    """


@pytest.hookspec
def pytest_qgate_modes(config: pytest.Config) -> Sequence[Mode]:  # type: ignore[empty-body]
    """Return modes of your own: a list of qgate.modes.Mode, for every model they fit."""


@pytest.hookspec
def pytest_qgate_record(item: pytest.Item, record: Record) -> None:
    """Read the result of a gate, site by site, before it is stored, and add keys of your own."""


def listed() -> list[str]:
    """A line for every hook."""
    hooks = (pytest_qgate_models, pytest_qgate_modes, pytest_qgate_record)
    # `python -OO` leaves no docstrings.
    firsts = {hook.__name__: (hook.__doc__ or "").partition("\n")[0] for hook in hooks}
    return [f"{name}: {first}" for name, first in firsts.items()]
