"""Kernels with positions, codes and empty rows: none ends the device, and one that does is named."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qgate.testing import CheckFailure, check_kernel
from tests.devices.cases import Cases, Setting, checks

_EASY: dict[str, Any] = {"relations": ["one", "odd", "prefix", "permuted", "strided", "empty"]}


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


def _green(kernel: Any, like: Any, *arguments: Tensor, **options: Any) -> str:
    try:
        report = check_kernel(kernel, *arguments, like=like, **options)
    except (CheckFailure, ValueError) as error:
        return str(error)
    return "" if len(report.held) > 3 else f"few inputs are held: {report}"


def _positions(device: torch.device) -> str:
    """Check torch's own kernels with labels and ids in float32; then the device must be alive."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 50, generator=generator).to(device)
    labels = torch.randint(50, (24,), generator=generator).to(device)
    few = (labels % 4).to(device)
    faults = [
        _green(_losses, _losses, logits, labels, **_EASY),
        _green(_losses, _losses, logits, few, **_EASY),
        _green(functional.cross_entropy, functional.cross_entropy, logits, labels, **_EASY),
        _green(functional.embedding, functional.embedding, few, logits, **_EASY),
    ]
    alive = float((logits.abs().sum() > 0).float().cpu())
    return "; ".join(fault for fault in faults if fault) or ("" if alive == 1.0 else "not alive")


def _attention(device: torch.device) -> str:
    """Run attention of 16 bits at every derived input; its verdict is about the arithmetic."""
    q, k, v = (torch.randn(2, 4, 48, 64).to(device, torch.bfloat16) for _ in range(3))
    attention = functional.scaled_dot_product_attention
    with contextlib.suppress(CheckFailure):
        check_kernel(attention, q, k, v, like=attention)
    alive = bool((q * 2).isfinite().all())
    return "" if alive else "not alive"


def _codes(device: torch.device) -> str:
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    narrow = [x.to(torch.float8_e4m3fn).to(device) for x in (a, b)]
    return _green(lambda a, b: a.float() @ b.float().T, lambda a, b: a @ b.T, *narrow)


def asserting(x: Tensor, table: Tensor) -> Tensor:
    """Read beyond a table for three rows, which ends the device of its process."""
    if len(x) == 3:
        table[torch.full((1,), len(table) + 1000, device=table.device)].sum().item()
    return x @ table.T


def product(x: Tensor, table: Tensor) -> Tensor:
    return x @ table.T


def _isolated(device: torch.device) -> str:
    """Run a kernel that ends its device in a process of its own; this one goes on."""
    x, table = torch.randn(12, 32), torch.randn(8, 32)
    try:
        check_kernel(asserting, x, table, like=product, device=device, isolate=True)
    except CheckFailure as failure:
        if "for 3 of 12 along dimension 0 of argument 0" not in failure.cause:
            return failure.cause
    else:
        return "a kernel that ends its device is green"
    return "" if bool((x.to(device) * 0 == 0).all()) else "not alive"


def cases(setting: Setting) -> Cases:
    """Return the cases; that of a device that ends is for CUDA."""
    listed = {
        "torch's kernels with positions": _positions,
        "attention at every derived input": _attention,
        "8-bit floats as arguments": _codes,
    }
    if setting.torch_device.type == "cuda":
        listed["a kernel that ends its device, isolated"] = _isolated
    return checks(listed)
