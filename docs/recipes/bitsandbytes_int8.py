"""Gate the linear layers of bitsandbytes in a language model, on a CPU.

    pytest suites --model docs/recipes/bitsandbytes_int8.py:build --mode 'bnb_*'

The INT8 layers have one scale per output channel of a weight and one per token of an input, as in
qgate's mode `int8`. But bitsandbytes rounds inputs to float16 before it quantizes them, so some
codes are others than `int8` has: `convention="mse"` holds them by the size of their error alone.
No mode of qgate has the code book of NF4, so only accepted errors limit `bnb_nf4`.
"""

import copy
from collections.abc import Callable

import bitsandbytes as bnb
from torch import nn

import qgate
from qgate import models
from qgate.modes import Kernel


def int8_layer(layer: nn.Linear) -> nn.Module:
    """Return the layer with INT8 weights, one scale per output channel."""
    made = bnb.nn.Linear8bitLt(
        layer.in_features, layer.out_features, layer.bias is not None,
        has_fp16_weights=False, threshold=0.0,
    )  # fmt: skip
    made.weight = bnb.nn.Int8Params(
        layer.weight.detach().clone(), requires_grad=False, has_fp16_weights=False
    )
    made.bias = layer.bias
    return made.to(layer.weight.device)  # here the weight is quantized


def nf4_layer(layer: nn.Linear) -> nn.Module:
    """Return the layer with NF4 weights, one scale per 64 of them."""
    made = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None,
        compute_dtype=layer.weight.dtype, quant_type="nf4",
    )  # fmt: skip
    made.weight = bnb.nn.Params4bit(
        layer.weight.detach().clone(), requires_grad=False, quant_type="nf4"
    )
    made.bias = layer.bias
    return made.to(layer.weight.device)


def replacing(make: Callable[[nn.Linear], nn.Module]) -> Callable[[qgate.Model], nn.Module]:
    """Return a mode that replaces all linear layers except the head."""

    def quantize(model: qgate.Model) -> nn.Module:
        module = copy.deepcopy(model.module)  # the reference stays as it is
        for name, layer in model.module.named_modules():
            if isinstance(layer, nn.Linear) and name not in model.head:
                module.set_submodule(name, make(layer))
        return module

    return quantize


def build(samples: int = 4, seqlen: int = 128, seed: int = 0) -> qgate.Model:
    """Return a small trained model; load your checkpoint in its place."""
    sampling = models.Sampling(samples=samples, seqlen=seqlen, seed=seed)
    llama = models.load("tiny-llama", sampling=sampling)
    return qgate.Model(
        llama.module,
        llama.inputs,
        name="bnb-llama",
        modes={
            "bnb_int8": Kernel(replacing(int8_layer), stands_for="int8", convention="mse"),
            "bnb_nf4": replacing(nf4_layer),
        },
    )
