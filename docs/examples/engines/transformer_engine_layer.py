"""Gate a layer of TransformerEngine in MXFP8 as a mode, with a stand-in for it."""

import copy

import torch
from torch import nn

import qgate
from qgate import models, modes
from qgate.modes import Kernel

# import transformer_engine.pytorch as te
# from transformer_engine.common.recipe import MXFP8BlockScaling


class TeLinear(nn.Module):
    """A linear layer of TransformerEngine with the parameters of a layer of torch."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        # self.layer = te.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        # self.layer.weight.data.copy_(layer.weight)

    def forward(self, x):
        # with te.fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()):
        #     return self.layer(x)
        x, weight = qgate.quantize(x, "mxfp8"), qgate.quantize(self.weight, "mxfp8")  # stand-in
        return nn.functional.linear(x, weight, self.bias)


def te_mxfp8(model):
    module = copy.deepcopy(model.module)  # the reference stays as it is
    for name, layer in model.module.named_modules():
        if isinstance(layer, nn.Linear) and name not in model.head:
            module.set_submodule(name, TeLinear(layer))
    return module


def build(samples=2, seqlen=32):
    llama = models.load("tiny-llama", sampling=models.Sampling(samples=samples, seqlen=seqlen))
    kernel = Kernel(te_mxfp8, stands_for="mxfp8")
    return qgate.Model(llama.module, llama.inputs, name="te-llama", modes={"te_mxfp8": kernel})


model = build()
quantized = modes.apply(modes.modes_of(model, "te_mxfp8")[0], model)
standing_for = modes.apply(modes.modes_of(model, "mxfp8")[0], model)
with torch.no_grad():
    outputs = [mode.model.module(model.inputs[0]) for mode in (quantized, standing_for)]
difference = (outputs[0] - outputs[1]).abs().max()
assert difference < 1e-3 * outputs[1].abs().max()
