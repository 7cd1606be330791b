"""Devices, and settings that make their results repeatable."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError, first_line
from qgate.loading import LateModule

if TYPE_CHECKING:
    import ctypes

    import torch
else:
    ctypes = LateModule("ctypes")  # 5 ms of every run of pytest

_SPINS = "3000"
"""Turns that a thread of GNU OpenMP waits awake, some 10 microseconds: the next work is near."""

_DEVICE_FILES = "/dev"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MEMORY = {_M_TRIM_THRESHOLD: 256 << 20, _M_MMAP_THRESHOLD: 32 << 20}
"""Settings of `mallopt`: free memory that stays, and the size from which a tensor is mapped."""


def resolve(name: str | torch.device) -> torch.device:
    """Return the device of `auto` (CUDA if present), `TYPE` or `TYPE:N`, if it exists.

    Types are `cpu`, `cuda` and every other accelerator that torch knows here.
    """
    import torch

    text = str(name).strip().lower()
    if text == "auto":
        text = "cuda" if _count("cuda") else "cpu"
    parts = re.fullmatch("([a-z][a-z0-9_]*)(?::(0|[1-9][0-9]{0,3}))?", text)
    kind, number = parts.groups() if parts else ("", None)
    if not _is_type(kind):
        raise QgateError(
            f"unknown device {str(name)!r}. Allowed: auto, cpu, cuda, cuda:N, and TYPE or TYPE:N "
            f"of another accelerator that torch knows; {_here()}."
        )
    if int(number or 0) >= _count(kind):
        reason = why_no_cuda() if kind == "cuda" and not _count(kind) else ""
        raise QgateError(
            f"device {str(name)!r} was asked for, but {reason or _here()}. Use auto or cpu."
        )
    return torch.device(text)


def accelerators() -> tuple[str, ...]:
    """Return the types of accelerators that torch knows here, present or not."""
    import torch

    private = torch._C._get_privateuse1_backend_name()
    return ("cuda", "xpu", "mps", "mtia", "hpu", private)


_OLD_DRIVER = re.compile(r"driver on your system is too old \(found version (\d+)\)")


def why_no_cuda() -> str:
    """Say why torch uses no CUDA device of a machine that has one; empty where it has none."""
    import torch

    build = torch.version.cuda or torch.version.hip
    if build is None:
        if not _has_nvidia_device():
            return ""
        return (
            f"torch {torch.__version__} is a build for the CPU, though this machine has an NVIDIA "
            "GPU; install a build for CUDA, see https://pytorch.org/get-started/locally"
        )
    if torch.cuda.is_available():
        return ""
    text = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        text = first_line(error)
    if old := _OLD_DRIVER.search(text):
        has = f"{int(old[1]) // 1000}.{int(old[1]) % 1000 // 10}"
        return (
            f"the NVIDIA driver here is made for CUDA {has}, and torch {torch.__version__} wants "
            f"{build}; update the driver, or install a torch that is built for CUDA {has}"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all CUDA devices" if _has_nvidia_device() else ""
    if not _has_nvidia_device():
        return ""
    reason = f": {text}" if text else ""
    return (
        f"torch {torch.__version__} cannot use the NVIDIA GPU of this machine{reason}; "
        "`nvidia-smi` tells if its driver works"
    )


def cpu_notice(name: str) -> str:
    """Return the line that `auto` took the CPU of a machine with a GPU; empty where it did not."""
    if str(name).strip().lower() != "auto" or not (reason := why_no_cuda()):
        return ""
    return f"device auto is the CPU: {reason}."


def _has_nvidia_device() -> bool:
    """Tell if the system shows an NVIDIA GPU."""
    return any(Path(_DEVICE_FILES).glob("nvidia[0-9]*")) or bool(shutil.which("nvidia-smi"))


def _here() -> str:
    """Say which devices exist."""
    import torch

    names = [f"{kind}:{i}" for kind in accelerators() for i in range(_count(kind))]
    return f"torch {torch.__version__} sees {', '.join(['cpu', *names]) if names else 'only cpu'}"


def _is_type(kind: str) -> bool:
    """Tell if torch has devices of a type, and a module for them such as `torch.cuda`."""
    import torch

    if not hasattr(getattr(torch, kind, None), "device_count"):
        return False
    try:
        return torch.device(kind).type == kind
    except RuntimeError:
        return False


def _count(kind: str) -> int:
    """Return how many devices of a type exist here."""
    import torch

    if kind == "cpu" or not _is_type(kind):
        return int(kind == "cpu")
    module = torch.get_device_module(kind)
    is_available = (
        getattr(module, "is_available", None) or getattr(torch.backends, kind).is_available
    )
    return int(module.device_count()) if is_available() else 0


@functools.lru_cache(maxsize=8)
def arithmetic_of(device: torch.device) -> str:
    """Return a name of a device's arithmetic, such as `cpu-avx512-0f3b1c22`.

    Machines of one arithmetic compute the same bits; others flip single codes, which later layers
    amplify. Names of processors and versions do not determine it, so it ends with a digest of
    results of some products, sums and functions.
    """
    import torch

    with exact_math(), torch.inference_mode():
        digest = hashlib.sha256(b"".join(_sample_results(device))).hexdigest()
    return "-".join([device.type, *_instructions(device), digest[:8]])


def _instructions(device: torch.device) -> list[str]:
    """Return the word for what a device can compute, or no word where its backend has none."""
    import torch

    if device.type == "cpu":
        return [torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")]
    if device.type == "cuda":
        return ["sm_{}{}".format(*torch.cuda.get_device_capability(device))]
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    words = re.findall("[a-z0-9]+", str(name_of(device)).lower()) if name_of else []
    return ["_".join(words)] if words else []


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
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", *accelerators()):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
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
