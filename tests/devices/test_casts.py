"""Casts of torch that differ from one device to the next: a simulated one, and a recorded H200."""

from __future__ import annotations

import torch

from qgate.kernel_checks.torch_casts import hard_numbers, named_cast, torch_casts
from tests.arithmetics.recordings import calls_of
from tests.devices import simulated

E4M3 = torch.float8_e4m3fn
EVERY = hard_numbers(torch.bfloat16)


def test_two_devices_differ_beyond_448_and_both_are_named() -> None:
    """The simulated device casts to float8_e4m3fn as CUDA does with torch 2.11."""
    y = EVERY.to(simulated.NAME).to(E4M3).cpu()
    assert named_cast(EVERY, y).convention == "the definition, overflow to NaN"
    recorded = calls_of("casts")["cast/bf16_e4m3"]["y"]
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    assert named_cast(bits.view(torch.bfloat16), recorded.view(E4M3)) == named_cast(EVERY, y)
    e5m2 = calls_of("casts")["cast/bf16_e5m2"]["y"].view(torch.float8_e5m2)
    words = named_cast(bits.view(torch.bfloat16), e5m2).convention
    assert words == "the definition, overflow to Inf"
    named = {cast.convention for cast in torch_casts(simulated.NAME) if cast.target == E4M3}
    assert named == {"the definition, overflow to NaN"}
