"""Devices, and settings that make their results repeatable."""

from __future__ import annotations

import contextlib
import ctypes
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

_SPINS = "3000"
"""Turns that a thread of GNU OpenMP waits awake, some 10 microseconds: the next work is near."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MEMORY = {_M_TRIM_THRESHOLD: 256 << 20, _M_MMAP_THRESHOLD: 32 << 20}
"""Settings of `mallopt`: free memory that stays, and the size from which a tensor is mapped."""


def resolve(name: str | torch.device) -> torch.device:
    """Return the device of `auto` (CUDA if present), `cpu`, `cuda` or `cuda:N`, if it exists."""
    import torch

    text = str(name).strip().lower()
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch("cpu(:0)?|cuda(:(0|[1-9][0-9]{0,3}))?", text):
        raise QgateError(f"unknown device {str(name)!r}. Allowed: auto, cpu, cuda, cuda:N.")
    kind, _, number = text.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            devices = f"{count} CUDA devices" if count else "no CUDA device here"
            reason = f"torch {torch.__version__} sees {devices}"
            raise QgateError(f"device {str(name)!r} was asked for, but {reason}. Use auto or cpu.")
    return torch.device(text)


@functools.lru_cache(maxsize=8)
def arithmetic_of(device: torch.device) -> str:
    """Return a name of a device's arithmetic, such as `cpu-avx512-0f3b1c22`.

    Machines of one arithmetic compute the same bits; others flip single codes, which later layers
    amplify. Names of processors and versions do not determine it, so it ends with a digest of
    results of some products, sums and functions.
    """
    import torch

    if device.type == "cuda":
        instructions = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    else:
        instructions = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    with exact_math(), torch.inference_mode():
        digest = hashlib.sha256(b"".join(_sample_results(device))).hexdigest()
    return f"{device.type}-{instructions}-{digest[:8]}"


def _sample_results(device: torch.device) -> Iterator[bytes]:
    """Yield the bits of common operations of models, on numbers that are the same everywhere."""
    import torch
    from torch.nn import functional

    def numbers(rows: int, columns: int, step: float) -> torch.Tensor:
        exact = torch.arange(rows * columns, dtype=torch.float64, device="cpu") * step
        return exact.frac().mul(4).sub(2).float().view(rows, columns).to(device)

    x, w = numbers(96, 384, 0.6180339887498949), numbers(128, 384, 0.7548776662466927)
    four = x.view(1, 4, 24, 384)
    for result in (
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
        yield result.contiguous().cpu().numpy().tobytes()


def wait_calmly() -> None:
    """Let waiting threads sleep soon, unless torch is loaded or the environment says otherwise.

    A gate is mostly small operations. On a busy machine, threads that spin while they wait make it
    ten times slower; threads that sleep at once make it slower by a quarter on a quiet one. No
    number depends on it.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def keep_freed_memory() -> None:
    """Let the memory of freed tensors stay with the process, unless the environment says otherwise.

    A gate makes and frees tensors of a few megabytes by the thousand. To return each of them to the
    system and to fetch it again, page by page, is a tenth of its time. Other allocators than the
    one of GNU have no such setting.
    """
    chosen = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    mallopt = None
    if sys.platform == "linux" and not chosen:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, size in _MEMORY.items():
            mallopt(setting, size)


@contextlib.contextmanager
def exact_math() -> Iterator[None]:
    """Compute float32 exactly: no TF32, no bfloat16 in products, no autocast of the caller."""
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
    """Return the switches of float32 precision, in the interface that this torch prefers.

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
