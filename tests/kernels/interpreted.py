"""Runs checks under triton's interpreter, in a process of its own, and prints what they say.

TRITON_INTERPRET=1 python -m tests.kernels.interpreted           all of them
TRITON_INTERPRET=1 python -m tests.kernels.interpreted mx hif4   some
"""

from __future__ import annotations

import json
import sys
import time
import warnings

import torch

from tests.kernels import checks

if __name__ == "__main__":
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
