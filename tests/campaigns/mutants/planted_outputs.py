"""Defects outside the blocks, of modules that a mode leaves as they are, of one token or sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, llama, mamba


def _changed_weight(name: str, change: Callable[[Tensor], Tensor]) -> Sow:
    """Another weight in the quantized model alone."""

    def sow(bed: Bed) -> None:
        module = bed.module(name)
        weight = module.get_parameter("weight").detach().clone()
        module.weight = nn.Parameter(change(weight), requires_grad=False)

    return sow


def _returns(name: str, change: Callable[[Tensor], Tensor]) -> Sow:
    return lambda bed: bed.after(name, change)


def _last_token_repeated(y: Tensor) -> Tensor:
    """A kernel that ends one token too early, and leaves what was in the buffer."""
    return torch.cat([y[:, :-1], y[:, -2:-1]], 1)


def _last_sample_zeros(y: Tensor) -> Tensor:
    """A batch that is one sample too short."""
    return torch.cat([y[:-1], 0 * y[-1:]]) if len(y) > 1 else y


def _first_token_lost(bed: Bed) -> None:
    """The embedding of one token of the text was not loaded."""
    token = int(bed.session.bench.model.inputs[0][0, 0])

    def lost(weight: Tensor) -> Tensor:
        weight[token] = 0
        return weight

    _changed_weight("backbone.embeddings", lost)(bed)


def _outputs(mutant: Mutant) -> Mutant:
    return Mutant(**{**vars(mutant), "suite": "outputs"})


NORM, GATE = "model.layers.3.input_layernorm", "backbone.layers.2.norm"
MUTANTS: tuple[Mutant, ...] = (
    _outputs(llama("head-of-zeros", "int8", _changed_weight("lm_head", torch.zeros_like), "lm_head:output")),
    _outputs(llama("final-norm-a-thousandth-off", "mxfp4", _changed_weight("model.norm", lambda w: 1.001 * w), r"model\.norm:output")),
    _outputs(llama("head-in-half-precision", "mxfp8", _returns("lm_head", lambda y: y.half().float()), "lm_head:output")),
    _outputs(mamba("logits-one-token-late", "2-1", _returns("lm_head", lambda y: y.roll(1, 1)), "lm_head:output")),
    _outputs(mamba("embedding-row-lost", "mxfp4", _first_token_lost, r"backbone\.embeddings:output")),
    llama("norm-a-thousandth-off", "mxfp4", _changed_weight(NORM, lambda w: 1.001 * w), r"model\.layers\.3\.input_layernorm:output"),
    mamba("norm-in-bfloat16", "mxfp4", _returns(GATE, lambda y: y.bfloat16().float()), r"backbone\.layers\.2\.norm:output"),
    llama("last-token-repeated", "mxfp4", _returns("model.layers.2", _last_token_repeated), r"model\.layers\.2:output"),
    mamba("last-token-of-a-block-repeated", "2-1", _returns("backbone.layers.2", _last_token_repeated), r"backbone\.layers\.2:output"),
    llama("last-sample-lost", "int8", _returns("model.layers.2", _last_sample_zeros), r"model\.layers\.2:output"),
)  # fmt: skip
