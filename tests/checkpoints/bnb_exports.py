"""Checkpoints of the small llama as transformers stores them with bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional
from torch import Tensor

from tests.checkpoints.exports import with_stored, write

RIGHT = ("nf4", "nf4-double", "fp4", "fp4-double", "nf4-large", "int8")


def stored(weight: Tensor, scheme: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return what is stored of a weight by ending, and the values that the library reads."""
    if scheme == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        values = functional.int8_vectorwise_dequant(codes, scales)
        form = torch.tensor(0, dtype=torch.uint8)
        return {"weight": codes, "SCB": scales, "weight_format": form}, values
    kind, _, more = scheme.partition("-")
    codes, state = functional.quantize_4bit(
        weight.float(),
        blocksize=128 if more == "large" else 64,
        compress_statistics=more == "double",
        quant_type=kind,
    )
    parts = {f"weight.{ending}": x for ending, x in state.as_dict(packed=True).items()}
    # As one row: its kernel for CPUs takes rows for whole blocks.
    state.shape = torch.Size([1, weight.numel()])
    with torch.compiler.set_stance("force_eager"):  # an odd number of codes has no kernel
        values = functional.dequantize_4bit(codes, state)
    return {"weight": codes, **parts}, values.reshape(weight.shape)


def configuration(scheme: str) -> dict[str, Any]:
    kind, _, more = scheme.partition("-")
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_8bit": kind == "int8",
        "load_in_4bit": kind != "int8",
    }
    if kind != "int8":
        settings |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": more == "double"}
    if more == "large":
        settings["bnb_4bit_blocksize"] = 128
    return {"quantization_config": settings}


def tensors_of(scheme: str) -> dict[str, Tensor]:
    return with_stored(lambda weight: stored(weight, scheme)[0])


def export(folder: Path, scheme: str) -> Path:
    return write(folder, tensors_of(scheme), configuration(scheme))
