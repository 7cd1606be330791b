"""Fixtures for tests of models."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that connects to the network."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"the network was used: {args} {kwargs}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
