"""Runs checks under triton's interpreter, in a process of its own, and prints what they say.

TRITON_INTERPRET=1 python -m tests.kernels.interpreted           all of them
TRITON_INTERPRET=1 python -m tests.kernels.interpreted mx hif4   some
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels import checks


def fused(_: object, x: Any, y: Any, z: Any) -> Any:
    """Multiply and add with one rounding of float32, or nearly: numpy rounds twice.

    The product is exact in float64, so the sum has its right sign and is zero only where it is.
    """
    a, b, c = (operand.data.astype(np.float64) for operand in (x, y, z))
    return interpreter.TensorHandle((a * b + c).astype(np.float32), z.dtype.scalar)


def to_bf16(_: object, src: Any, dst: Any) -> Any:
    """Round float32 to bf16, which is uint16 there, to nearest even; the interpreter cuts off."""
    if (src.dtype.scalar, dst.scalar) != (tl.float32, tl.bfloat16):
        return cast(_, src, dst)
    bits = src.data.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return interpreter.TensorHandle(np.where(nan, np.uint16(0x7FC0), rounded), tl.bfloat16)


cast = interpreter.InterpreterBuilder.cast_impl

if __name__ == "__main__":
    interpreter.InterpreterBuilder.create_fma = fused
    interpreter.InterpreterBuilder.cast_impl = to_bf16
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy about Inf and NaN
    torch.set_num_threads(1)
    found, took = {}, {}
    start = time.perf_counter()
    for name, wrong in checks.run(sys.argv[1:] or checks.CHECKS, torch.device("cpu")):
        found[name] = wrong
        took[name] = round(time.perf_counter() - start, 2)
        start = time.perf_counter()
    wrong = [plant(torch.device("cpu")) for plant in (checks.a_wrong_kernel, checks.wrong_errors)]
    print(json.dumps({"found": found, "seconds": took, "wrong": wrong}))
