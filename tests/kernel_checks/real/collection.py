"""The collection: which file has the kernels of which package, and which need an interpreter."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from tests.kernel_checks.real.kernel import RealKernel


@dataclass(frozen=True)
class Room:
    """A file of kernels.

    module        its name in this folder
    requires      the package that it imports
    distribution  the name under which that package is installed
    interpreted   True if its kernels run in Triton's interpreter
    """

    module: str
    requires: str
    distribution: str
    interpreted: bool = False

    def load(self) -> list[RealKernel]:
        path = f"tests.kernel_checks.real.{self.module}"
        kernels: list[RealKernel] = importlib.import_module(path).KERNELS
        return kernels


ROOMS = [
    Room("torch_attention", "torch", "torch"),
    Room("torch_products", "torch", "torch"),
    Room("torch_others", "torch", "torch"),
    Room("torch_compiled", "torch", "torch"),
    Room("torchao_linears", "torchao", "torchao"),
    Room("transformers_parts", "transformers", "transformers"),
    Room("bitsandbytes_linears", "bitsandbytes", "bitsandbytes"),
    Room("conch_kernels", "conch", "conch-triton-kernels", interpreted=True),
    Room("liger_kernels", "liger_kernel", "liger-kernel", interpreted=True),
    Room("sage_kernels", "sageattention", "sageattention", interpreted=True),
]
