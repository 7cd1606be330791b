"""Tiny random transformers, and model folders with a tokenizer of words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


def llama(**more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128, **more}
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, **fields
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


def bert(kind: str = "BertModel", vocab_size: int = 64) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    return getattr(transformers, kind)(config).eval()


def save(model: nn.Module, words: Iterable[str], folder: Path, **special: str) -> Path:
    """Write a model folder with a tokenizer that knows the `special` tokens and these words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = dict.fromkeys([*special.values(), *words])
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: k for k, word in enumerate(vocabulary)}, unk_token=special["unk_token"]
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder
