"""What Triton's interpreter needs to run kernels of packages on a CPU.

A compiled kernel gets float32 for a float of Python, and reciprocal roots and tanh from a library
of the device; the interpreter has neither. `prepare` adds both, and leaves the kernels as they are.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

IS_ACTIVE = os.environ.get("TRITON_INTERPRET") == "1"
_convert = interpreter._implicit_cvt


def _with_floats(value: Any) -> Any:
    if isinstance(value, float):
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _convert(value)


def _tanh(x: Any) -> Any:
    return 2 * tl.sigmoid(2 * x) - 1


def _rsqrt(x: Any) -> Any:
    return 1 / tl.sqrt(x)


_FUNCTIONS = {"tanh": _tanh, "rsqrt": _rsqrt}
_LIBRARY = {**_FUNCTIONS, "libdevice": SimpleNamespace(**_FUNCTIONS)}


def prepare(package: str) -> None:
    """Let the kernels of an imported package run in the interpreter, if it is active."""
    if not IS_ACTIVE:
        return
    interpreter._implicit_cvt = _with_floats
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for attribute, replacement in _LIBRARY.items():
                if hasattr(module, attribute):
                    setattr(module, attribute, replacement)
