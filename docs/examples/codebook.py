"""Train a codebook on numbers, and quantize with it."""

import torch

import qgate
from qgate.formats.codebook import Codebook, CodebookFormat

weights = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)) ** 3
scaled = weights / weights.abs().amax(1, keepdim=True)
book = Codebook.trained("levels of my weights", scaled.numpy(), bits=4)
fmt = CodebookFormat("mine", book, size=64)  # scaled_by="rms" for the other scale

mine, nf4 = (qgate.stats.errors(qgate.quantize(weights, name), weights) for name in (fmt, "nf4"))
assert mine.metric("sqnr_db") > nf4.metric("sqnr_db") + 1
