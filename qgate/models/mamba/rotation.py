"""Rotation of a Mamba: the same function, with its residual stream turned by H.

Norm weights are multiplied into the weights that follow, embedding and head rows are turned by H,
in_proj reads and out_proj writes the turned stream, and y is turned at run time before out_proj.
Quantized Mamba modes live here, because rotation spreads outliers over all channels; their FP32
reference is this network, since its block outputs are H times those of the plain one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.mamba.hadamard import Hadamard, matrix
from qgate.models.mamba.network import Mamba, MambaMixer

ROTATED = "rotated"


def rotate(network: nn.Module) -> Mamba:
    """Build the rotated network; products are made in float64 and rounded to float32 once."""
    if not isinstance(network, Mamba):
        raise QgateError(f"only a Mamba can be rotated, not {type(network).__name__}.")
    config = network.config
    stream, inner = _hadamard(config.d_model, network), _hadamard(config.d_inner, network)
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    final = state["backbone.norm_f.weight"].double()
    embeddings = state["backbone.embeddings.weight"].double()
    turned = {
        "lm_head.weight": state["lm_head.weight"].double() * final @ stream.T,
        "backbone.embeddings.weight": embeddings @ stream.T,
        "backbone.norm_f.weight": torch.ones_like(final),
    }
    for k in range(config.n_layer):
        block = f"backbone.layers.{k}"
        norm = state[f"{block}.norm.weight"].double()
        in_proj, out_proj = f"{block}.mixer.in_proj.weight", f"{block}.mixer.out_proj"
        turned[in_proj] = state[in_proj].double() * norm @ stream.T
        turned[f"{block}.norm.weight"] = torch.ones_like(norm)
        turned[f"{out_proj}.weight"] = stream @ state[f"{out_proj}.weight"].double() @ inner.T
        if config.bias:
            turned[f"{out_proj}.bias"] = stream @ state[f"{out_proj}.bias"].double()
    state |= {name: tensor.to(torch.float32) for name, tensor in turned.items()}
    with torch.device("meta"):
        rotated = Mamba(replace(config, tied=False))
    rotated.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
    for layer in rotated.backbone.layers:
        mixer = layer.mixer
        if isinstance(mixer, MambaMixer):
            mixer.hadamard = Hadamard(config.d_inner)
    return rotated.requires_grad_(True).eval()


def _hadamard(width: int, network: Mamba) -> Tensor:
    return matrix(width).to(network.lm_head.weight.device)
