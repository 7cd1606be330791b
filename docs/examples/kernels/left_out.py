"""Read in the report which derived inputs were left out, and why."""

import torch

import qgate
from qgate.testing import check_kernel


def even_rows(x):
    if len(x) % 2:
        raise ValueError("an even number of rows is needed")
    return qgate.quantize(x, "int8", granularity="channel", axis=0)


report = check_kernel(
    even_rows,
    torch.randn(8, 64),
    like=lambda x: x,
    output=qgate.Quantizer("int8", granularity="channel", axis=0),
    relations=["one", "nan"],
)
print(report)
assert "int8 has no NaN" in report.left_out.values()
assert any("an even number of rows" in reason for reason in report.left_out.values())
assert report.smallest_defect["a factor on all values"] < 1e-3
