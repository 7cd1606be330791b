"""Measure the activations of a module, and write the report."""

import torch

import qgate
from qgate.activation_stats.files import write_report

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
result = qgate.activations(model, [torch.randn(32, 64) for _ in range(4)], outlier__threshold=16)

for row in result.tables()["layers"]:
    print(row["module"], row["role"], row["amax"], row["kurtosis"])
assert not result.failed  # every value is finite

for path in write_report(result.record, "figures"):  # or a URL
    print(path)
