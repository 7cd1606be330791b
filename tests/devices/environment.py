"""Facts of a machine that explain its results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess

from tests.devices.cases import Cases, Setting, noted
from tests.devices.record import Row

PACKAGES = (
    "numpy", "pandas", "pytest", "pytest-xdist", "transformers", "torchao", "liger-kernel",
    "conch-triton-kernels", "sageattention", "flash-attn",
)  # fmt: skip


def _device(setting: Setting) -> Row:
    import torch

    device = setting.torch_device
    if device.type != "cuda":
        return noted("device", f"{device.type} of {platform.processor() or platform.machine()}")
    properties = torch.cuda.get_device_properties(device)
    capability = f"sm_{properties.major}{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    text = f"{properties.name}, {capability}, {memory}, {torch.cuda.device_count()} here"
    return noted("device", text, name=properties.name, capability=capability)


def _versions(_: Setting) -> Row:
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {"cuda": torch.version.cuda or "none", "processors": str(os.cpu_count())}
    for name in ("triton", *PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return noted("versions", ", ".join(f"{k} {v}" for k, v in versions.items()), **versions)


def _driver(_: Setting) -> Row:
    if not (program := shutil.which("nvidia-smi")):
        return noted("driver", "there is no nvidia-smi")
    query = [program, "--query-gpu=driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return noted("driver", (done.stdout or done.stderr).strip())


def _arithmetic(setting: Setting) -> Row:
    from qgate.devices import arithmetic_of

    return noted("arithmetic", arithmetic_of(setting.torch_device))


def _computes(setting: Setting) -> str:
    """A first product, exact on every device: without it nothing that follows means anything."""
    import torch

    x = torch.arange(4096.0).remainder(7).view(64, 64)
    product = (x.to(setting.torch_device) @ x.to(setting.torch_device)).cpu()
    return "" if torch.equal(product, x @ x) else "a product of small integers is not exact"


def cases(_: Setting) -> Cases:
    return {
        "device": _device,
        "versions": _versions,
        "driver": _driver,
        "computes": _computes,
        "arithmetic": _arithmetic,
    }
