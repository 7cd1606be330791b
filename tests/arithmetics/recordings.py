"""Files of what a device returned on stated inputs: written by `recorder`, replayed by the tests.

Tensors of a call share a prefix: `scaled_mm/K256/fast/f32/{a,b,scale_a,scale_b,y}`. Equal tensors
are kept once: `same` in the metadata says which name has them. Beside it the metadata has the
device, versions and `notes`, a JSON object that describes each call.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "recorded"
Calls = dict[str, dict[str, Tensor]]


def bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that NaN and the sign of zero count."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def share_of_equal(x: Tensor, y: Tensor) -> float:
    """Return the share of elements with equal bits."""
    assert x.shape == y.shape
    assert x.dtype == y.dtype
    unequal = (bits(x) != bits(y)).view(x.numel(), -1).any(-1)
    return 1 - float(unequal.double().mean())


def write_calls(path: Path, calls: Calls, metadata: dict[str, str]) -> None:
    """Write calls, equal tensors once."""
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for call, members in calls.items():
        for key, value in members.items():
            name = f"{call}/{key}"
            content = (value.dtype, value.shape, bits(value).numpy().tobytes())
            first = names.setdefault(content, name)
            if first == name:
                tensors[name] = value.detach().cpu().contiguous().clone()
            else:
                same[name] = first
    save_file(tensors, path, metadata | {"same": json.dumps(same)})


@cache
def calls_of(path: Path | str) -> Calls:
    """Read the calls of a file; a name without a folder is one beside the tests."""
    path = FOLDER / f"{path}.safetensors" if isinstance(path, str) else path
    calls: Calls = {}
    with safe_open(path, "pt") as file:
        same = json.loads(file.metadata()["same"])
        for name in sorted({*file.keys(), *same}):
            call, _, key = name.rpartition("/")
            calls.setdefault(call, {})[key] = file.get_tensor(same.get(name, name))
    return calls


def scaled(
    sums: Tensor, scale_a: Tensor | float, scale_b: Tensor | float, out_dtype: torch.dtype
) -> Tensor:
    """Multiply sums by both scales and round, as cuBLAS does.

    The product of the scales is rounded to float32, so is the result before its last rounding.
    Scales of rows are [M, 1] and [1, N].
    """
    wide_a, wide_b = (
        torch.as_tensor(scale, dtype=torch.float64, device=sums.device)
        for scale in (scale_a, scale_b)
    )
    factor = (wide_a * wide_b).float()
    return (sums.double() * factor.double() + 0.0).float().to(out_dtype)
