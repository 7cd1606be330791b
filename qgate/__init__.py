"""A regression and accuracy gate for quantization.

`import qgate` loads nothing heavy: the pytest plugin lives in every pytest run of an environment,
so torch is imported when the first tensor is quantized and not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qgate._version import __version__
from qgate.errors import QgateError

if TYPE_CHECKING:
    from qgate import analysis, capture, checkpoints, formats, models, modes, stats
    from qgate.activation_stats.compute import activations
    from qgate.collecting.starting import collect, collect_from_environment
    from qgate.formats.encoded import Encoded
    from qgate.formats.quantizer import Quantizer, encode, quantize
    from qgate.models.model import Model
    from qgate.modes.mode import Mode, Rule
    from qgate.sweeps.compute import Sweep, sweep
    from qgate.sweeps.underflow import watch_underflow
    from qgate.testing import check_relations

__all__ = [
    "Encoded",
    "Mode",
    "Model",
    "QgateError",
    "Quantizer",
    "Rule",
    "Sweep",
    "__version__",
    "activations",
    "analysis",
    "capture",
    "check_relations",
    "checkpoints",
    "collect",
    "collect_from_environment",
    "encode",
    "formats",
    "models",
    "modes",
    "quantize",
    "stats",
    "sweep",
    "watch_underflow",
]

_HOME = {
    "Encoded": "qgate.formats.encoded",
    "Mode": "qgate.modes.mode",
    "Model": "qgate.models.model",
    "Rule": "qgate.modes.mode",
    "check_relations": "qgate.testing",
    "activations": "qgate.activation_stats.compute",
    "collect": "qgate.collecting.starting",
    "collect_from_environment": "qgate.collecting.starting",
    "Quantizer": "qgate.formats.quantizer",
    "encode": "qgate.formats.quantizer",
    "Sweep": "qgate.sweeps.compute",
    "quantize": "qgate.formats.quantizer",
    "sweep": "qgate.sweeps.compute",
    "watch_underflow": "qgate.sweeps.underflow",
}


def __getattr__(name: str) -> Any:
    from qgate.loading import explained_imports

    with explained_imports():
        if name in _HOME:
            globals()[name] = value = getattr(importlib.import_module(_HOME[name]), name)
            return value
        if name in __all__:
            return importlib.import_module(f"qgate.{name}")
    raise AttributeError(f"module 'qgate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
