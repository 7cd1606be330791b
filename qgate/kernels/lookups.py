"""Results of 16-bit numbers, looked up in a table that a block has in shared memory."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.kernels import compiling, proving
from qgate.kernels.launching import flat_bits

_TABLE = 2**17  # bytes
_PER_THREAD, _THREADS = 8, 1024


def look_up(x: Tensor, table: Tensor, out: Tensor) -> bool:
    """Write the result of each 16-bit number of x to `out`; False without a kernel.

    `table` has a 16-bit result for every pattern in the order of signed integers, from 0x8000 on.
    `out` is contiguous. All three are on one device; nothing waits for it.
    """
    sizes = {each.dtype.itemsize for each in (x, table, out)}
    if sizes != {2} or not proving.serves(x.device) or not compiling.serves(x.device):
        return False
    if compiling.shared_memory(x.device) < _TABLE:
        return False
    work, device = "results of 16-bit numbers from a table", x.device
    if not proving.prove_once("look up", device, work, lambda: _wrong(device)):
        return False
    look_up_by_kernel(x, table, out)
    return True


def look_up_by_kernel(x: Tensor, table: Tensor, out: Tensor) -> None:
    flat, n = flat_bits(x), x.numel()
    if not n:
        return
    if table.data_ptr() % 16:
        table = table.clone()
    blocks = min(compiling.processors(x.device), -(-n // (_THREADS * _PER_THREAD)))
    kernel = compiling.kernel("tables.cu", "look_up_16_bits", x.device)
    kernel(blocks, _THREADS, flat, table, out, n, shared=_TABLE)


def look_up_by_torch(x: Tensor, table: Tensor, out: Tensor) -> None:
    """Look up by the definition."""
    index = x.reshape(-1).view(torch.int16).to(torch.int32) + 2**15
    out.view(-1).copy_(table.index_select(0, index))


def _wrong(device: torch.device) -> str:
    """Describe the first wrong result of a table in which no two patterns agree."""
    mixing = torch.Generator("cpu").manual_seed(0)
    table, x = (
        (torch.randperm(2**16, generator=mixing, device="cpu") - 2**15).to(torch.int16)
        for _ in range(2)
    )
    for first, last, begin in ((0, 2**16, 0), (0, 2**16, 1), (3, -2, 3), (5, 40_000, 0), (1, 4, 2)):
        part = x[first:last]
        expected = torch.zeros(2**16 + 16, dtype=torch.int16, device="cpu")
        found = torch.zeros(2**16 + 16, dtype=torch.int16, device=device)
        look_up_by_torch(part, table, expected[begin : begin + len(part)])
        look_up_by_kernel(
            x.to(device)[first:last], table.to(device), found[begin : begin + len(part)]
        )
        if problem := proving.first_difference(found, expected):
            return problem
    return ""
