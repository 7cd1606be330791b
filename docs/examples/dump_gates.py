"""Hold tensors of a run to accepted statistics, without pytest."""

from pathlib import Path
from tempfile import mkdtemp

import torch

import qgate
from qgate.dumps.gate import DumpGates, DumpSubject
from qgate.gate import Policy

folder = Path(mkdtemp())
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def collected(name, factor=1.0):
    torch.manual_seed(0)
    with qgate.collect(model, folder / name, phases=("forward",)):
        model(factor * torch.randn(64, 64))
    return DumpSubject(folder / name, "dump-mine")


accepting = DumpGates(collected("first"), folder / "baselines", Policy(), updating="all")
assert accepting.distributions("mine", "layers.0").passed
accepting.commit()

drifted = DumpGates(collected("doubled", 2.0), folder / "baselines", Policy())
print(drifted.distributions("mine", "layers.0").text)
