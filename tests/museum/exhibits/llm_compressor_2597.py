"""A pattern that excludes layers from quantization matched no name, so these were quantized, too.

The list excludes `re:visual.*`, and patterns match at the beginning of a name. Transformers loads
the layers as `model.visual.…`, so the vision part of the model was quantized like the rest. The right
list holds a pattern for these names, too.
"""

from __future__ import annotations

import re

from torch import Generator, Tensor, randn
from torch.nn.functional import linear, silu

import qgate
from tests.museum.exhibit import Exhibit

FP8 = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)
LAYER, VISUAL = "model.language_model.layers.0.mlp.down_proj", "model.visual.merger.mlp.0"
IGNORE = ["re:.*lm_head", "re:visual.*"]


def model(x: Tensor, visual: Tensor, layer: Tensor) -> Tensor:
    return linear(silu(linear(x, visual)), layer)


def quantized(w: Tensor, name: str, ignore: list[str]) -> Tensor:
    """Return the weight of a layer, quantized if no pattern of the list matches its name."""
    patterns = [entry.removeprefix("re:") for entry in ignore]
    return w if any(re.match(pattern, name) for pattern in patterns) else FP8(w)


def loaded_names(x: Tensor, visual: Tensor, layer: Tensor) -> Tensor:
    ignore = [*IGNORE, "re:model.visual.*"]
    return model(x, quantized(visual, VISUAL, ignore), quantized(layer, LAYER, ignore))


def other_names(x: Tensor, visual: Tensor, layer: Tensor) -> Tensor:
    return model(x, quantized(visual, VISUAL, IGNORE), quantized(layer, LAYER, IGNORE))


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    visual, layer = (randn(64, 64, generator=generator) / 8 for _ in range(2))
    return randn(16, 64, generator=generator), visual, layer


EXHIBIT = Exhibit(
    "vllm-project/llm-compressor#2597", "checkpoints",
    "A pattern of layers to leave unquantized matched no name, so the layers were quantized.",
    "the file had scales for the visual layers of Qwen2-VL, which are to stay unquantized",
    "argument 1 is quantized, and not declared to be",
    arguments, loaded_names, other_names, model, {2: FP8}, options={"relations": ["one"]},
)  # fmt: skip
