"""Read what formats would do to the tensors of a dump."""

from pathlib import Path
from tempfile import mkdtemp

import torch

import qgate
from qgate.drawing.compute import DrawingRequest, analyze_dump

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
folder = Path(mkdtemp()) / "dump"
with qgate.collect(model, folder):
    model(torch.randn(32, 64)).square().mean().backward()

analysis = analyze_dump(folder, request=DrawingRequest(formats=("fp8_e4m3", "mxfp8_e4m3")))
for tensor in analysis["tensors"]:
    lost = tensor["formats"]["fp8_e4m3"]
    print(tensor["title"], tensor["amax"], lost["upper"] + lost["lower"], lost["flushed"])
