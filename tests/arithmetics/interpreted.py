"""Record attention of float16 by packages in Triton, whose sums are in float16.

`TRITON_INTERPRET=1 python -m tests.arithmetics.interpreted FILE` records Triton's interpreter on a
CPU; without the variable, the first GPU. sageattention's queries and keys hold integers in a scale
of a power of two, so that its int8 codes are exact.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import triton
from torch import Tensor

from tests.arithmetics.recorder import normal
from tests.arithmetics.recordings import Calls, write_calls
from tests.kernel_checks.real.interpreter import IS_ACTIVE, prepare

SHAPES = {"64x64": (1, 2, 64, 64), "192x64": (1, 1, 192, 64)}
PAGES = {"32x64": (3, 32, 4, 64), "96x32": (2, 96, 2, 32)}
PAGE = 16


def sage(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from sageattention import attn_qk_int8_per_block
    from sageattention.quant_per_block import per_block_int8

    prepare("sageattention")
    codes_q, scale_q, codes_k, scale_k = per_block_int8(q, k)
    return attn_qk_int8_per_block.forward(
        codes_q, codes_k, v, scale_q, scale_k, output_dtype=q.dtype
    )


def conch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to pages in order, [B, H, D] to [B, L, H, D]."""
    from conch.ops.attention.paged_attention import paged_attention

    prepare("conch")
    pages = k.shape[1] // PAGE
    cache = [t.reshape(len(t) * pages, PAGE, *t.shape[2:]).contiguous() for t in (k, v)]
    table = torch.arange(len(k) * pages, dtype=torch.int32, device=k.device).view(len(k), pages)
    lengths = torch.full((len(k),), k.shape[1], dtype=torch.int32, device=k.device)
    return paged_attention(q, *cache, table, lengths, scale=q.shape[-1] ** -0.5)


def integers(name: str, *shape: int) -> Tensor:
    """Draw int8 codes in a scale of 1/32, the largest of each tile 127."""
    codes = (normal(name, *shape, dtype=torch.float32) * 30).round().clamp(-126, 126)
    codes[..., ::64, 0] = 127
    return (codes / 32).half()


def record(path: Path) -> None:
    device = "cpu" if IS_ACTIVE else "cuda"
    calls: Calls = {}
    for size, shape in SHAPES.items():
        call = {side: integers(f"sage {side} {size}", *shape) for side in "qk"}
        call["v"] = normal(f"sage v {size}", *shape, dtype=torch.float16)
        calls[f"sage/fp16/{size}"] = call | {"y": sage(*(x.to(device) for x in call.values()))}
    for size, (sequences, length, heads, width) in PAGES.items():
        sides = {"q": (sequences, heads, width)} | dict.fromkeys(
            "kv", (sequences, length, heads, width)
        )
        call = {
            side: normal(f"conch {side} {size}", *shape, dtype=torch.float16)
            for side, shape in sides.items()
        }
        calls[f"conch/fp16/{size}"] = call | {"y": conch(*(x.to(device) for x in call.values()))}
    name = "Triton's interpreter on a CPU" if IS_ACTIVE else torch.cuda.get_device_name()
    notes = dict.fromkeys(calls, "scale 1 / sqrt(width); tiles of 64 keys, pages of 16")
    about = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    write_calls(path, calls, about | {"notes": json.dumps(notes)})


if __name__ == "__main__":
    record(Path(sys.argv[1]))
