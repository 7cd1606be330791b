"""Gate a torchao-quantized network that torch.compile compiled, by its outputs alone.

    pytest suites --model docs/recipes/compiled.py:build --mode compiled

The backend "inductor" needs a C++ compiler; without one, the network is only traced and runs
uncompiled. Compiled code calls no modules, so nothing inside it can be compared: its outputs are
held against accepted errors.
"""

import copy
import shutil

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

import qgate

BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


def compiled(model: qgate.Model) -> nn.Module:
    """Quantize and compile; `fullgraph` refuses code that would run uncompiled between graphs."""
    module = copy.deepcopy(model.module)
    quantize_(module, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    return torch.compile(module, backend=BACKEND, fullgraph=True)


def build(samples: int = 4, seed: int = 0) -> qgate.Model:
    """Return a network of linear layers; load yours in its place."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    module, inputs = nn.Sequential(*blocks, nn.Linear(64, 10)), torch.randn(samples, 2, 16, 64)
    return qgate.Model(module, list(inputs), name="compiled", modes={"compiled": compiled})
