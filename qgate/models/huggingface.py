"""Folders that transformers loads, quietly; no other file imports it.

Nothing is downloaded, no code of a folder runs, and no weight is left to chance.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.experts import slice_experts
from qgate.models.huggingface_checks import (
    LoadingReport,
    cause,
    check_one_part,
    check_shards,
    check_sizes,
    loading_error,
    needs_code,
    read_settings,
)
from qgate.models.huggingface_inputs import check_inputs
from qgate.models.optional_libraries import load_quietly
from qgate.storage.foreign import check_foreign_files
from qgate.text import listed

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_TRUSTED = {"local_files_only": True, "trust_remote_code": True}


def _transformers(purpose: str, otherwise: str = "") -> AbstractContextManager[Any]:
    """Import transformers without warnings and progress bars; this file raises errors instead."""
    advice = f"pip install 'pytest-qgate[hf]'{otherwise}."
    bars = "transformers.utils.logging", "disable_progress_bar", "enable_progress_bar"
    needs = f"{purpose} needs transformers"
    return load_quietly("transformers", bars, needs, advice, logging.WARNING)


def load_network(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """Load the model in float32 as the class that its config names, without caches.

    Attention and experts are computed by plain matrix products (`eager`): one arithmetic on
    every device, the same bits each time. `trust_remote_code` lets Python files of the folder run.
    """
    where = _TRUSTED if trust_remote_code else _LOCAL
    check_foreign_files(folder, "checkpoints")
    with _transformers("hf:PATH") as transformers:
        try:
            config = transformers.AutoConfig.from_pretrained(str(folder), **where)
        except Exception as error:
            raise loading_error(folder, error) from None
        _check_folder(folder, config)
        kind = _network_class(transformers, config, folder, trust_remote_code)
        check_one_part(kind, config, folder)
        check_shards(folder)
        check_sizes(kind, config, folder)
        read = functools.partial(_read, kind, config, folder, where)
        try:
            network, report = read()
        except Exception as error:
            raise loading_error(folder, error, read) from None
    _check_report(network, report, folder)
    check_inputs(network, folder)
    slice_experts(network)
    configs: list[Any] = [getattr(module, "config", None) for module in network.modules()]
    for config in configs:
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return network.eval()


def check_length(network: nn.Module, tokens: int, name: str) -> None:
    """Refuse rows that are longer than a table of learned positions."""
    most = positions(network)
    if most is not None and tokens > most:
        raise QgateError(
            f"{name} has {most} positions, fewer than the {tokens} tokens of a sample. Ask for "
            f"shorter samples: seqlen and calib_seqlen of {most} at most."
        )


def positions(network: nn.Module) -> int | None:
    """Return the rows of a table of learned positions; None without one.

    The positions of RoBERTa begin behind the row of its padding.
    """
    inside = re.compile(language_part(network))
    config: Any = network.config
    most: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    tables = [
        module
        for where, module in network.named_modules()
        if isinstance(module, nn.Embedding)
        and inside.search(where)
        and ("position" in where or where.endswith("wpe"))
    ]
    if most is None or not tables:
        return None
    padded = (t.num_embeddings - t.padding_idx - 1 for t in tables if t.padding_idx is not None)
    return min([most, *padded])


def language_part(network: nn.Module) -> str:
    """Return a pattern of the modules that read and write text, "" if all modules do."""
    config: Any = getattr(network, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is config:
        return ""
    parts = [
        name
        for name, module in network.named_modules()
        if name and hasattr(module, "from_pretrained") and getattr(module, "config", None) is text
    ]
    top = [name for name in parts if not any(name.startswith(f"{other}.") for other in parts)]
    output: Any = getattr(network, "get_output_embeddings", None)
    head = output() if callable(output) else None
    top += [name for name, module in network.named_modules() if name and module is head]
    return rf"^({'|'.join(map(re.escape, top))})(\.|$)" if top else ""


class FolderTokenizer:
    """The tokenizer of a folder; a call returns ids without special tokens."""

    def __init__(self, loaded: Any, folder: Path) -> None:
        self._tokenizer = loaded
        # Transformers ignores add_bos_token if there is a tokenizer.json.
        settings = read_settings(folder / "tokenizer_config.json")
        self._no_bos = settings.get("add_bos_token") is False

    def __call__(self, text: str) -> Tensor:
        return self.encode(text)

    @property
    def bos(self) -> int | None:
        """Return the id that begins a text; the [CLS] of encoders counts as such."""
        first = self._tokenizer.bos_token_id
        first = self._tokenizer.cls_token_id if first is None else first
        return None if first is None else int(first)

    def frame(self, ids: Tensor) -> Tensor:
        """Put the tokens that begin and end a text in place of the first and the last id."""
        end = self._tokenizer.eos_token_id
        end = self._tokenizer.sep_token_id if end is None else end
        framed = ids.clone()
        for at, token in ((0, self.bos), (-1, end)):
            if token is not None:
                framed[..., at] = int(token)
        return framed

    def encode(self, text: str, *, special: bool = False) -> Tensor:
        """Return one row of ids, with the expected special tokens around it if `special`.

        A BOS is there once, whether the tokenizer, the text or nobody else puts one, unless the
        files of the tokenizer say that there is none (add_bos_token).
        """
        with _transformers("a tokenizer"):
            ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        if special and self.bos is not None:
            own = next((k for k, token in enumerate(ids) if token != self.bos), len(ids))
            if own or (self._tokenizer.bos_token_id is not None and not self._no_bos):
                ids = [self.bos, *ids[own:]]
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, or its vocabulary name for a part of a character."""
        with _transformers("a tokenizer"):
            names = self._tokenizer.convert_ids_to_tokens([int(k) for k in ids])
            texts = [self._tokenizer.decode([int(k)]) for k in ids]
        return [
            _token_text(str(k if name is None else name), text)
            for k, name, text in zip(ids, names, texts, strict=True)
        ]


def _token_text(name: str, text: str) -> str:
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return name
    lost = name.startswith("\N{LOWER ONE EIGHTH BLOCK}") and not text.startswith(" ")
    return f" {text}" if lost else text


_IDS = "--tokens FILE.npy; of qgate activations, --data.source tokens:FILE.npy"


def tokenizer(folder: Path, *, trust_remote_code: bool = False) -> FolderTokenizer:
    """Load the tokenizer of a folder."""
    ways_out = (
        f"Copy {_TOKENIZERS[0]} and tokenizer_config.json of the model into the folder, or give "
        f"token ids in place of text ({_IDS})."
    )
    check_foreign_files(folder, "checkpoints")
    with _transformers("a tokenizer", f", or give token ids in place of text ({_IDS})") as module:
        try:
            where = _TRUSTED if trust_remote_code else _LOCAL
            loaded = module.AutoTokenizer.from_pretrained(str(folder), **where)
        except Exception as error:
            raise QgateError(
                f"{str(folder)!r} has no tokenizer that can be loaded ({cause(error)}). {ways_out}"
            ) from None
    # Several classes make an empty vocabulary where they find no file.
    files = {*loaded.vocab_files_names.values(), *_TOKENIZERS}
    if loaded.vocab_files_names and not any((folder / file).is_file() for file in files):
        raise QgateError(f"{str(folder)!r} has no tokenizer files. {ways_out}")

    return FolderTokenizer(loaded, folder)


def _check_folder(folder: Path, config: Any) -> None:
    """Refuse folders whose weights transformers would turn into another model."""
    if getattr(config, "quantization_config", None):
        raise QgateError(
            f"the config.json in {str(folder)!r} is of a quantized checkpoint "
            "(quantization_config); a reference is not quantized. Give the original weights."
        )
    if (folder / "adapter_config.json").exists():
        raise QgateError(
            f"{str(folder)!r} has an adapter (adapter_config.json), which is loaded or not as "
            "other packages are installed. Merge it into the weights and save those."
        )


def _network_class(
    transformers: Any, config: Any, folder: Path, trust_remote_code: bool = False
) -> Any:
    """Return the class that the config names, else the best one for its model_type."""
    named = getattr(config, "architectures", None)
    named = named if isinstance(named, list | tuple) else ()
    own_classes = _modeling_module(config)
    for name in named:
        kind: Any = getattr(transformers, str(name), getattr(own_classes, str(name), None))
        if (
            inspect.isclass(kind)
            and issubclass(kind, transformers.PreTrainedModel)
            and isinstance(config, getattr(kind, "config_class", None) or ())
        ):
            return kind
    brought = getattr(config, "auto_map", None) or {}
    if named and brought:
        if not trust_remote_code:
            raise needs_code(folder)
        causal = "AutoModelForCausalLM" in brought
        return transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModel


def _modeling_module(config: Any) -> ModuleType | None:
    """Return the module of a config's classes, which has those that transformers hides too."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    if not module.startswith("transformers.models."):
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _read(
    kind: Any, config: Any, folder: Path, where: dict[str, bool], **more: Any
) -> tuple[nn.Module, LoadingReport]:
    network, report = kind.from_pretrained(
        str(folder),
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        weights_only=True,
        output_loading_info=True,
        **where,
        **more,
    )
    return network, report


def _check_report(network: nn.Module, report: LoadingReport, folder: Path) -> None:
    """Refuse missing and unexpected weights: transformers invents or drops them."""
    if report["missing_keys"]:
        raise QgateError(
            f"the weights in {str(folder)!r} lack {listed(sorted(report['missing_keys']), 6)}; "
            "transformers would make them up at random. Copy config.json and weights of one and "
            "the same model."
        )
    lists = {n: len(m) for n, m in network.named_modules() if isinstance(m, nn.ModuleList)}
    for name in sorted(report["unexpected_keys"]):
        for number in re.finditer(r"\.(\d+)\.", name):
            if int(number[1]) >= lists.get(name[: number.start()], float("inf")):
                layers = name[: number.start()]
                raise QgateError(
                    f"the config.json in {str(folder)!r} describes {lists[layers]} {layers}, but "
                    f"the weights have {name}. Copy the config.json that belongs to them."
                )
