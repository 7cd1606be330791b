"""Where to compute, and how to compute the same thing twice."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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


def wait_calmly() -> None:
    """Let threads that wait for others sleep, if torch is not loaded yet and nobody chose.

    Small operations are most of a gate. On a machine that is busy with something else, threads that
    spin until their neighbor had its turn make it ten times slower; no number depends on it.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextlib.contextmanager
def exact_math() -> Iterator[None]:
    """Float32 means float32: no TF32, no bfloat16 inside products, no autocast of the caller."""
    import torch

    changed = [*_precisions(), *_flags()]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    try:
        for owner, name, value in changed:
            setattr(owner, name, value)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _precisions() -> list[tuple[Any, str, Any]]:
    """The switches of float32 precision, in the one interface that this torch prefers.

    Newer versions refuse to mix it with the older one, and reading the older one can raise.
    """
    import torch

    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]
    owners = [backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv]
    owners += [backends.cudnn.rnn, backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv]
    return [(owner, "fp32_precision", "ieee") for owner in owners]


def _flags() -> list[tuple[Any, str, Any]]:
    from torch import backends

    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    return [
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
    ]
