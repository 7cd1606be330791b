"""The modules that load torch, records or pages: named here once, loaded when they are needed.

The plugin runs in every pytest of the environment, mostly in projects without gates.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qgate.loading import without_collector

if TYPE_CHECKING:
    from qgate import formats as formats
    from qgate import testing as testing
    from qgate.gate.measuring import suite_needs as suite_needs
    from qgate.plugin import html_columns as html_columns
    from qgate.plugin import records as records
    from qgate.plugin import sessions as sessions
    from qgate.plugin import summary as summary
    from qgate.sweeps import underflow as underflow

_MODULES = {
    "formats": "qgate.formats",
    "html_columns": "qgate.plugin.html_columns",
    "records": "qgate.plugin.records",
    "sessions": "qgate.plugin.sessions",
    "suite_needs": "qgate.gate.measuring.suite_needs",
    "summary": "qgate.plugin.summary",
    "testing": "qgate.testing",
    "underflow": "qgate.sweeps.underflow",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(name)
    path = _MODULES[name]
    return sys.modules[path] if path in sys.modules else _load(path)


def _load(path: str) -> Any:
    """Import a module, and let no garbage collection look at what stays as long as the process."""
    with without_collector():
        module = import_module(path)
    if path == _MODULES["sessions"]:
        # Gates come before any test; elsewhere this would keep garbage of tests that ran.
        gc.freeze()
    return module
