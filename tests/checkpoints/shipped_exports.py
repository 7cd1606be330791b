"""Folders as they are shipped: an FP8 export with tokenizer, templates, card and an index."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from tests.checkpoints.exports import parent_tensors

Settings = dict[str, Any]
INDEX = "model.safetensors.index.json"
TEMPLATE = """{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- endif %}
"""
NETWORK: Settings = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "max_position_embeddings": 8192, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 96, "bos_token_id": 0,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3", "original_max_position_embeddings": 1024},
    "eos_token_id": 1, "torch_dtype": "bfloat16", "transformers_version": "4.57.0",
}  # fmt: skip
GENERATION: Settings = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 50, "bos_token_id": 0,
    "eos_token_id": [1, 30], "transformers_version": "4.57.0",
}  # fmt: skip
TOKENIZER: Settings = {
    "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "model_max_length": 8192,
    "eos_token": {"content": "<|im_end|>", "special": True}, "unk_token": "<unk>",
    "add_bos_token": True, "add_prefix_space": False, "padding_side": "left",
    "clean_up_tokenization_spaces": False,
}  # fmt: skip
CARD = """---
base_model: maker/tiny
tags:
- fp8
---
# tiny FP8

Weights are FP8 with a scale per row. Compared with the INT4 version, it is larger.
"""


def tokenizer_json() -> Settings:
    """Return a small tokenizer as the library writes it."""
    letters = ["<s>", "</s>", "<unk>", *map(chr, range(97, 123)), "ab", "cd"]
    model = models.BPE(
        {token: number for number, token in enumerate(letters)},
        [("a", "b"), ("c", "d")],
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    document: Settings = json.loads(tokenizer.to_str())
    return document


@dataclass
class Shipment:
    """The files of one checkpoint, which a fault may change before they are written."""

    tensors: dict[str, Tensor]
    config: Settings
    files: dict[str, Any] = field(default_factory=dict)
    """Contents by name: documents of JSON, texts or bytes; None of one that is left out."""
    shards: int = 2

    def write(self, folder: Path) -> Path:
        """Write all files, the tensors in shards with an index."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        names = list(self.tensors)
        weight_map: dict[str, str] = {}
        for number in range(self.shards):
            file = f"model-{number + 1:05}-of-{self.shards:05}.safetensors"
            own = names[number :: self.shards]
            save_file({name: self.tensors[name].contiguous() for name in own}, folder / file)
            weight_map |= dict.fromkeys(own, file)
        total = sum(x.numel() * x.element_size() for x in self.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for name, content in {"config.json": self.config, INDEX: index, **self.files}.items():
            if callable(content):
                content = content(index)
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            elif content is not None:
                text = content if isinstance(content, str) else json.dumps(content, indent=2)
                (folder / name).write_text(text, encoding="utf-8")
        return folder


def parent_shipment() -> Shipment:
    """Return a small llama in bfloat16, with all that belongs to it."""
    tensors = parent_tensors()
    tensors["model.layers.0.mlp.bias_correction"] = torch.linspace(0.1, 0.7, 8)
    files = {
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": TOKENIZER,
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "<|im_end|>"},
        "generation_config.json": GENERATION,
        "chat_template.jinja": TEMPLATE,
        "preprocessor_config.json": {"size": 224},
        "modeling_tiny.py": "# code of its own\n",
        "README.md": "# tiny\n",
    }
    config = {**NETWORK, "auto_map": {"AutoModel": "modeling_tiny.Tiny"}}
    return Shipment(tensors, config, files)


def child_shipment() -> Shipment:
    """Return its right FP8 export with scales per row, as another version of libraries writes it."""
    parent = parent_shipment()
    tensors: dict[str, Tensor] = {}
    for name, x in parent.tensors.items():
        if "_proj" not in name:
            tensors[name] = x
            continue
        scale = x.float().abs().amax(1, keepdim=True) / 448
        tensors[name] = (x.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    rope = {**NETWORK["rope_scaling"], "rope_theta": 500000}
    config = {
        **{key: x for key, x in parent.config.items() if not key.startswith(("rope", "torch"))},
        "rope_parameters": rope, "dtype": "bfloat16", "quantization_config": recipe,
    }  # fmt: skip
    tokenizer = tokenizer_json()
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m for m in merges]
    files = {
        **parent.files,
        "README.md": CARD,
        "tokenizer.json": tokenizer,
        # The template has moved, special tokens too, and the class has another name.
        "chat_template.jinja": None,
        "special_tokens_map.json": None,
        "tokenizer_config.json": {
            **TOKENIZER, "eos_token": "<|im_end|>", "tokenizer_class": "TokenizersBackend",
            "chat_template": TEMPLATE, "pad_token": "<|im_end|>", "backend": "tokenizers",
        },
        # Defaults are left out.
        "generation_config.json": {
            **{key: x for key, x in GENERATION.items() if key != "top_k"}, "pad_token_id": 30,
        },
    }  # fmt: skip
    return Shipment(tensors, config, files)
