"""Patterns that exclude layers from quantization never matched, so these were quantized, too.

Entries that begin with `re:` are regular expressions. They were looked for as plain parts of a layer's
name, in which no name has them, and the head that the checkpoint keeps in BF16 was quantized like
the layers before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Generator, Tensor, randn
from torch.nn.functional import linear, silu

import qgate
from tests.museum.exhibit import Exhibit

INT4 = qgate.Quantizer("int4", granularity="block", block=32)
IGNORE = ["re:.*lm_head.*", "re:vision_tower.*"]


def model(x: Tensor, mlp: Tensor, head: Tensor) -> Tensor:
    return linear(silu(linear(x, mlp)), head)


def served(x: Tensor, is_ignored: Callable[[str, str], bool], **layers: Tensor) -> Tensor:
    """Run the model with every layer quantized that is not on the list."""
    weights = {
        name: w if any(is_ignored(entry, name) for entry in IGNORE) else INT4(w)
        for name, w in layers.items()
    }
    return model(x, weights["model_mlp"], weights["lm_head"])


def patterns(x: Tensor, mlp: Tensor, head: Tensor) -> Tensor:
    def is_ignored(entry: str, name: str) -> bool:
        return bool(re.match(entry.removeprefix("re:"), name))

    return served(x, is_ignored, model_mlp=mlp, lm_head=head)


def parts_of_names(x: Tensor, mlp: Tensor, head: Tensor) -> Tensor:
    return served(x, lambda entry, name: entry in name, model_mlp=mlp, lm_head=head)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    mlp, head = (randn(64, 64, generator=generator) / 8 for _ in range(2))
    return randn(16, 64, generator=generator), mlp, head


EXHIBIT = Exhibit(
    "vllm-project/vllm#48508", "checkpoints",
    "Patterns of layers to leave unquantized never matched, so the layers were quantized.",
    "476 layers differ between two ways to load one model",
    "argument 2 is quantized, and not declared to be",
    arguments, patterns, parts_of_names, model, {1: INT4}, options={"relations": ["one"]},
)  # fmt: skip
