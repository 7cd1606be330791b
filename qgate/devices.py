"""Where to compute, and how to compute the same thing twice."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
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
    if kind not in ("cpu", "cuda") or (number and not re.fullmatch("[0-9]{1,4}", number)):
        raise QgateError(f"unknown device {str(name)!r}. Allowed: auto, cpu, cuda, cuda:N.")
    if kind == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= there:
            seen = f"{there} CUDA devices" if there else "no CUDA device here"
            have = f"torch {torch.__version__} sees {seen}"
            raise QgateError(f"device {str(name)!r} was asked for, but {have}. Use auto or cpu.")
    return torch.device(text)


@functools.lru_cache(maxsize=8)
def arithmetic_of(device: torch.device) -> str:
    """What decides how its sums are rounded, as in `cpu-avx512-0f3b1c22`: two machines of one
    arithmetic have the same bits, others flip single codes, which later layers amplify.

    Names of processors and versions promise too much or too little, so the end of it is a digest of
    what some products, sums and functions come to.
    """
    import torch

    if device.type == "cuda":
        instructions = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    else:
        instructions = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    with exact_math(), torch.inference_mode():
        digest = hashlib.sha256(b"".join(_worked_out(device))).hexdigest()
    return f"{device.type}-{instructions}-{digest[:8]}"


def _worked_out(device: torch.device) -> Iterator[bytes]:
    """The bits of what a model does most, on numbers that are the same everywhere."""
    import torch
    from torch.nn import functional

    def numbers(rows: int, columns: int, step: float) -> torch.Tensor:
        exact = torch.arange(rows * columns, dtype=torch.float64, device="cpu") * step
        return exact.frac().mul(4).sub(2).float().view(rows, columns).to(device)

    x, w = numbers(96, 384, 0.6180339887498949), numbers(128, 384, 0.7548776662466927)
    four = x.view(1, 4, 24, 384)
    for found in (
        functional.linear(x, w),
        w @ x[0],
        torch.bmm(four[0], four[0].transpose(1, 2)),
        functional.conv1d(x[None], w[:96, None, :4].contiguous(), groups=96),
        functional.scaled_dot_product_attention(four, four, four),
        x.softmax(-1),
        x.exp(),
        x.sigmoid(),
        functional.softplus(x),
        x * torch.rsqrt(x.square().mean(-1, keepdim=True)),
    ):
        yield found.contiguous().cpu().numpy().tobytes()


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
