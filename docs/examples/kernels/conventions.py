"""Name the convention that values follow."""

import torch

from qgate.testing import CheckFailure, check

x = torch.randn(16, 64)
scale = x.abs().amax(1, keepdim=True) / 127.5
values = (x / scale).round().clamp(-128, 127) * scale
report = check(values, x, format="int8", granularity="channel", axis=0)
assert report.conventions["values"].startswith("scale amax/127.5, ")

try:
    check(values * 1.03, x, format="int8", granularity="channel", axis=0)
except CheckFailure as failure:
    assert "times the definition's in 16 of 16 groups" in failure.cause
