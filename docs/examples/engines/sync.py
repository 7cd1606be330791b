"""Compare the weights of an engine with those of its trainer."""

import torch

from qgate import probe
from qgate.engines.sync import compare_sync
from qgate.engines.sync_texts import headline

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 8)).bfloat16()
with torch.no_grad():
    for step in (41, 42):
        model[0].weight.add_(1e-3 * torch.randn(96, 64))
        model[1].weight.add_(1e-3 * torch.randn(8, 96))
        probe.snapshot(model, f"trainer/step-{step}", step)
        if step == 41:
            stale = model[1].weight.clone()
    model[1].weight.copy_(stale)
probe.snapshot(model, "engine")

record = compare_sync("trainer", "engine")
assert headline(record).startswith("weights of step 41 in 1.weight: they are not those of step 42")
