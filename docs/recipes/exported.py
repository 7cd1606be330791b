"""Gate a torchao-quantized network that torch.export made a graph, by its outputs alone.

    pytest suites --model docs/recipes/exported.py:build --mode exported

The graph calls no modules, so nothing inside it can be compared: its outputs are held against
accepted errors. To tell a wrong kernel from a wrong export, add the quantized module that is
exported as a second mode.
"""

import copy

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from torchao.utils import unwrap_tensor_subclass

import qgate


def exported(model: qgate.Model) -> nn.Module:
    """Quantize the network and export it as a graph."""
    module = copy.deepcopy(model.module)
    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    return torch.export.export(unwrap_tensor_subclass(module), (model.inputs[0],)).module()


def build(samples: int = 4, seed: int = 0) -> qgate.Model:
    """Return a network of linear layers; load yours in its place."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    module, inputs = nn.Sequential(*blocks, nn.Linear(64, 10)), torch.randn(samples, 2, 16, 64)
    return qgate.Model(module, list(inputs), name="exported", modes={"exported": exported})
