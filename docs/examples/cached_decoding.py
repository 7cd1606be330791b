"""Decode with the quantized cache of a mode."""

import torch

from qgate import models, modes

model = models.load("tiny-llama", sampling=models.Sampling(samples=1, seqlen=64))
network = modes.apply(modes.find_mode("kv-int8", "other"), model).model.module
with torch.no_grad():
    cache = network.new_cache()
    prompt = network(model.inputs[0][:, :60], cache)
    after = [network(model.inputs[0][:, t : t + 1], cache) for t in range(60, 64)]
