"""Gates behind a kernel that ended its device: they are not held, and say so at once.

After a device-side assert nothing runs on that device in this process any more. Gates that need it
would each end in the same error, or in a crash.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from qgate.loading import LateModule
from qgate.plugin.gate_collection import has_fixture
from qgate.plugin.settings import options_of
from qgate.text import one_line

if TYPE_CHECKING:
    from qgate import device_errors as device_errors
else:
    device_errors = LateModule("qgate.device_errors")

_ENDED = 3
_LOSS: pytest.StashKey[str] = pytest.StashKey()
_NEEDED_BY = ("model", "device")
"""Fixtures that something on the device comes from."""


def note_loss(item: pytest.Item, error: BaseException) -> None:
    """Keep that a test lost the device of this process."""
    loss = device_errors.device_error(error, item.name)
    if isinstance(loss, device_errors.LostDeviceError):
        item.config.stash.setdefault(_LOSS, f"{loss} It showed in {item.nodeid}.")


def loss_of(config: pytest.Config) -> str | None:
    """Return how this process lost its device; None if it has it."""
    return config.stash.get(_LOSS, None)


def end_worker_without_device(config: pytest.Config) -> None:
    """End a worker of pytest-xdist that lost its device: another one takes its other gates.

    An update goes on, as it has to say that it writes nothing.
    """
    is_worker = hasattr(config, "workerinput")
    if is_worker and loss_of(config) is not None and options_of(config).update is None:
        os._exit(_ENDED)


def refuse_without_device(item: pytest.Item) -> None:
    """End the set-up of a test that needs a device which this process lost."""
    loss = loss_of(item.config)
    if loss is not None and has_fixture(item, *_NEEDED_BY):
        pytest.fail(f"not held: {one_line(loss)}", pytrace=False)
