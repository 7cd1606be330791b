"""The wish to write accepted figures of kernels, which every run of pytest can have."""

from __future__ import annotations

from contextvars import ContextVar

UPDATING: ContextVar[bool] = ContextVar("UPDATING", default=False)
"""True in a pytest run with --update-baselines."""
