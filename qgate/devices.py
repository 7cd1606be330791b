"""Where to compute, and how to compute the same thing twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from qgate.errors import QgateError

if TYPE_CHECKING:
    import torch


def resolve(name: str | torch.device) -> torch.device:
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`; an error if it is not there."""
    import torch

    text = str(name).strip().lower()
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = text.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise QgateError(f"unknown device {str(name)!r}. Allowed: auto, cpu, cuda, cuda:N.")
    if kind == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= there:
            seen = f"{there} CUDA devices" if there else "no CUDA device here"
            have = f"torch {torch.__version__} sees {seen}"
            raise QgateError(f"device {str(name)!r} was asked for, but {have}. Use auto or cpu.")
    return torch.device(text)


@contextlib.contextmanager
def exact_math() -> Iterator[None]:
    """Float32 means float32: no TF32, no bfloat16 inside products, no kernels chosen by trial."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = False
    cudnn.deterministic = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
