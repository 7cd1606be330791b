"""Gate torchao's INT8 kernels in a language model, each with the budget of a mode of qgate.

    pytest suites --model docs/recipes/torchao_int8.py:build --mode 'torchao_*'

Weights have one symmetric scale per output channel, as in qgate's modes `int8` and `w8`, and the
inputs of `torchao_int8` have one symmetric scale per token, as in `int8`: so the kernels stand for
these modes.
"""

import copy
from collections.abc import Callable

from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import qgate
from qgate import models
from qgate.modes import Kernel


def torchao(config: object) -> Callable[[qgate.Model], nn.Module]:
    """Return a mode that quantizes all linear layers except the head."""

    def quantize(model: qgate.Model) -> nn.Module:
        module = copy.deepcopy(model.module)  # the reference stays as it is
        quantize_(
            module, config, lambda m, name: isinstance(m, nn.Linear) and name not in model.head
        )
        return module

    return quantize


def build(samples: int = 4, seqlen: int = 128, seed: int = 0) -> qgate.Model:
    """Return a small trained model; load your checkpoint in its place."""
    sampling = models.Sampling(samples=samples, seqlen=seqlen, seed=seed)
    llama = models.load("tiny-llama", sampling=sampling)
    int8, w8 = Int8DynamicActivationInt8WeightConfig(), Int8WeightOnlyConfig()
    return qgate.Model(
        llama.module,
        llama.inputs,
        name="torchao-llama",
        modes={
            "torchao_int8": Kernel(torchao(int8), stands_for="int8"),
            "torchao_w8": Kernel(torchao(w8), stands_for="w8"),
        },
    )
