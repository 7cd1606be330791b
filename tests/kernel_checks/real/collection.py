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
    sample        how many of its cases a run of the tests draws
    """

    module: str
    requires: str
    distribution: str
    interpreted: bool = False
    sample: int = 1

    def load(self) -> list[RealKernel]:
        path = f"tests.kernel_checks.real.{self.module}"
        kernels: list[RealKernel] = importlib.import_module(path).KERNELS
        return kernels


ROOMS = [
    Room("torch_attention", "torch", "torch"),
    Room("torch_products", "torch", "torch"),
    Room("torch_others", "torch", "torch"),
    Room("torch_compiled", "torch", "torch", sample=0),
    Room("torchao_linears", "torchao", "torchao"),
    Room("transformers_parts", "transformers", "transformers"),
    Room("bitsandbytes_linears", "bitsandbytes", "bitsandbytes"),
    Room("conch_kernels", "conch", "conch-triton-kernels", interpreted=True),
    Room("liger_kernels", "liger_kernel", "liger-kernel", interpreted=True),
    Room("sage_kernels", "sageattention", "sageattention", interpreted=True, sample=1),
]

LEFT_OUT = {
    "torch, flash and efficient attention of a GPU": "the CPU has a flash and a math kernel; both were checked",
    "torch, `_weight_int8pack_mm` where K is no multiple of 16": "the process ends with a segmentation fault (torch 2.13)",
    "torchao, FP8 activations, MX and NVFP4 products": "they ask for a GPU; their casts and weight-only layers were checked",
    "torchao, `Int4WeightOnlyConfig`": "its packings ask for a GPU or for the package mslk; int4 by `IntxWeightOnlyConfig` was checked",
    "conch, FP8 casts and caches": "Triton's interpreter casts FP8 wrongly",
    "conch, `scaled_gemm`": "it reads beyond its arguments in the interpreter, and the process ends",
    "conch, `gelu_tanh_and_mul` in fp16": "tanh of the device's library takes float32 alone",
    "liger, `liger_dyt`": "it asks Triton for a driver when it is called",
    "liger, losses that return one number": "a result needs a dimension; cross entropy was checked without a reduction",
    "sageattention, `sageattn` itself": "it asserts that its arguments are on a GPU; the two calls it makes were checked",
    "bf16 in kernels of conch, liger and sageattention": "Triton's interpreter has no bf16",
}
"""What could not be checked here, and why."""

REMARKS = [
    "conch's paged attention keeps its running maximum, sum and result in the dtype of its result, and sageattention rounds the product of each tile to float16. Both are named; the report says what that costs against exact sums.",
    "Triton's interpreter rounds such a product once. A GPU rounds its float16 accumulator more often, which was not recorded.",
    "bitsandbytes' FP4 takes either code where a value is halfway. Its layer declares the package's own codes.",
]
"""What to know of verdicts and declarations that need a reason."""
