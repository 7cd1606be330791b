"""Gate a checkpoint in the layout of compressed-tensors as a mode of its unquantized model.

    pytest suites --model docs/recipes/packed_checkpoint.py:build --mode packed_int8

Its linear layers have `weight_packed` and no `weight`, so their outputs are compared. INT8 with a
scale per channel is what qgate's mode `w8` computes, so each layer has the budget of that mode. If
qgate has no mode for your scheme (groups of INT4 with zero points), pass the function without a
`Kernel`, `modes={"packed_int8": packed_int8}`: its layers are held against accepted errors.
"""

import copy
import tempfile

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import qgate
from qgate.modes import Kernel

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
SCHEME = {"targets": ["Linear"], "weights": WEIGHTS}


def write_checkpoint(parent: nn.Module, folder: str) -> None:
    """Write a packed checkpoint; you have one already, from llm-compressor or another tool."""
    module = copy.deepcopy(parent)
    config = QuantizationConfig(config_groups={"weights": SCHEME}, ignore=["lm_head"])
    apply_quantization_config(module, config)
    for layer in module.modules():
        if hasattr(layer, "weight_scale"):
            low, high = layer.weight.detach().aminmax(dim=1, keepdim=True)
            args = layer.quantization_scheme.weights
            layer.weight_scale.data, _ = calculate_qparams(low, high, args)
    compressor = ModelCompressor.from_pretrained_model(module, "pack-quantized")
    compressor.compress_model(module)
    module.save_pretrained(folder)
    compressor.update_config(folder)


def packed_int8(model: qgate.Model) -> nn.Module:
    """Load the checkpoint and leave its weights packed."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(model.module, folder)
        return AutoModelForCausalLM.from_pretrained(folder)


def build(samples: int = 4, seqlen: int = 64, seed: int = 0) -> qgate.Model:
    """Return the unquantized model; `AutoModelForCausalLM.from_pretrained` loads yours."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    parent = AutoModelForCausalLM.from_config(config)
    inputs = list(torch.randint(0, 256, (samples, 1, seqlen)))
    modes = {"packed_int8": Kernel(packed_int8, stands_for="w8")}
    return qgate.Model(parent, inputs, name="packed-checkpoint", modes=modes)
