"""Sweep the scale of a tensor in several formats."""

import torch

import qgate

x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
x[:, 7] *= 30

swept = qgate.sweep(x, "fp8_e4m3")  # one scale 2**s for the tensor, over all useful s
print(swept.exponent, *swept.reasons, sep="\n")
frame = swept.to_frame()  # pandas: SQNR, MSE, cosine, overflow and flushes of every level
assert swept.recommended["overflow"] == 0

blocks = qgate.sweep(x, "mxfp4", granularity="block")  # an offset to every block's own exponent
assert blocks.record["parameters"]["production"] == 0

counted = qgate.stats.counts(x)  # exact, mergeable; sweep it in any number of formats
for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1"):
    level = qgate.sweep(counted, name).recommended
    print(f"{name}: 2^{level['exponent']:g}, SQNR {level['metrics']['sqnr_db']:.1f} dB")
