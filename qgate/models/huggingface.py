"""Folders that transformers loads; the only file that imports it, and quietly.

Nothing is downloaded, no code of a folder runs, and no weight is left to chance.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.huggingface_errors import OWN_CALLABLE, cause, refused, wants_code
from qgate.models.huggingface_sizes import check_shards, check_sizes

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_TRUSTED = {"local_files_only": True, "trust_remote_code": True}


def load_network(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """The model in float32, the class that its config names, without caches.

    Attention and experts are computed by plain matrix products (`eager`): one arithmetic on
    every device, the same bits each time. `trust_remote_code` lets Python files of the folder run.
    """
    where = _TRUSTED if trust_remote_code else _LOCAL
    with _quietly("hf:PATH") as transformers:
        config = _config(transformers, folder, where)
        _check_folder(folder, config)
        kind = _network_class(transformers, config, folder, trust_remote_code)
        check_shards(folder)
        check_sizes(kind, config, folder)
        read = functools.partial(_read, kind, config, folder, where)
        try:
            network, report = read()
        except Exception as error:
            raise refused(folder, error, read) from None
    _check_report(network, report, folder)
    first = next(iter(inspect.signature(network.forward).parameters), "nothing")
    if first != "input_ids":
        raise QgateError(
            f"{type(network).__name__} in {str(folder)!r} is given {first} first, and not token "
            f"ids; to gate it, {OWN_CALLABLE}."
        )
    configs: list[Any] = [getattr(module, "config", None) for module in network.modules()]
    for config in configs:
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return network.eval()


def check_length(network: nn.Module, tokens: int, name: str) -> None:
    """Refuse rows that are longer than a table of learned positions."""
    inside = re.compile(language_part(network))
    tables = (
        where
        for where, module in network.named_modules()
        if isinstance(module, nn.Embedding) and inside.search(where)
    )
    config: Any = network.config
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    learned = any("position" in where or where.endswith("wpe") for where in tables)
    if learned and most is not None and tokens > most:
        raise QgateError(
            f"{name} has {most} positions, fewer than the {tokens} tokens of a sample. Ask for "
            f"shorter samples: --seqlen {most} and --calib-seqlen {most} at most."
        )


def language_part(network: nn.Module) -> str:
    """A regular expression for the modules that read and write text, "" if those are all."""
    config: Any = getattr(network, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is config:
        return ""
    found = [
        name for name, module in network.named_modules() if name and _config_of(module) is text
    ]
    top = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    output: Any = getattr(network, "get_output_embeddings", None)
    head = output() if callable(output) else None
    top += [name for name, module in network.named_modules() if name and module is head]
    return rf"^({'|'.join(map(re.escape, top))})(\.|$)" if top else ""


class FolderTokenizer:
    """A tokenizer of a folder; called, it turns text into ids without any put around them."""

    def __init__(self, made: Any, folder: Path) -> None:
        self._made = made
        self._no_bos = _refuses_bos(folder)

    def __call__(self, text: str) -> Tensor:
        return self.encode(text)

    @property
    def bos(self) -> int | None:
        """The id that begins a text; the [CLS] of encoders counts as such."""
        first = self._made.bos_token_id
        first = self._made.cls_token_id if first is None else first
        return None if first is None else int(first)

    def encode(self, text: str, *, special: bool = False) -> Tensor:
        """One row of ids; with `special` those around it that the model expects.

        A BOS is there once, whether the tokenizer, the text or nobody else puts one, unless the
        files of the tokenizer say that there is none (add_bos_token).
        """
        with _quietly("a tokenizer"):
            ids = self._made(text, add_special_tokens=special, verbose=False)["input_ids"]
        if special and self.bos is not None:
            own = next((k for k, token in enumerate(ids) if token != self.bos), len(ids))
            if own or (self._made.bos_token_id is not None and not self._no_bos):
                ids = [self.bos, *ids[own:]]
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; the name in the vocabulary where it is a part of a character."""
        with _quietly("a tokenizer"):
            names = self._made.convert_ids_to_tokens([int(k) for k in ids])
            texts = [self._made.decode([int(k)]) for k in ids]
        return [
            _token_text(str(k if name is None else name), text)
            for k, name, text in zip(ids, names, texts, strict=True)
        ]


def _refuses_bos(folder: Path) -> bool:
    """Whether the files say so; transformers forgets it where there is a tokenizer.json."""
    try:
        read = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(read, dict) and read.get("add_bos_token") is False


def _token_text(name: str, text: str) -> str:
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return name
    lost = name.startswith("\N{LOWER ONE EIGHTH BLOCK}") and not text.startswith(" ")
    return f" {text}" if lost else text


_IDS = "--tokens FILE.npy; of qgate activations, --data.source tokens:FILE.npy"


def tokenizer(folder: Path, *, trust_remote_code: bool = False) -> FolderTokenizer:
    """What turns text into token ids, and ids into text."""
    ways_out = (
        f"Copy {_TOKENIZERS[0]} and tokenizer_config.json of the model into the folder, or give "
        f"token ids in place of text ({_IDS})."
    )
    with _quietly("a tokenizer", f"or give token ids in place of text ({_IDS})") as module:
        try:
            where = _TRUSTED if trust_remote_code else _LOCAL
            made = module.AutoTokenizer.from_pretrained(str(folder), **where)
        except Exception as error:
            raise QgateError(
                f"{str(folder)!r} has no tokenizer that can be loaded ({cause(error)}). {ways_out}"
            ) from None
    # Several classes make an empty vocabulary where they find no file.
    files = {*made.vocab_files_names.values(), *_TOKENIZERS}
    if made.vocab_files_names and not any((folder / file).is_file() for file in files):
        raise QgateError(f"{str(folder)!r} has no tokenizer files. {ways_out}")

    return FolderTokenizer(made, folder)


@contextlib.contextmanager
def _quietly(what: str, otherwise: str = "") -> Iterator[Any]:
    """transformers without warnings and progress bars; what matters becomes an error here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                transformers = importlib.import_module("transformers")
                logs = importlib.import_module("transformers.utils.logging")
            except ImportError as error:
                raise QgateError(
                    f"{what} needs transformers ({error}): pip install 'pytest-qgate[hf]'"
                    f"{', ' * bool(otherwise)}{otherwise}."
                ) from None
            bars = logs.is_progress_bar_enabled()
            logs.disable_progress_bar()
            try:
                yield transformers
            finally:
                if bars:
                    logs.enable_progress_bar()
    finally:
        logging.disable(disabled)


def _config(transformers: Any, folder: Path, where: dict[str, bool]) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(str(folder), **where)
    except Exception as error:
        raise refused(folder, error) from None


def _check_folder(folder: Path, config: Any) -> None:
    """Refuse what would make another model of the weights than the one that is stored."""
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
    if getattr(config, "is_encoder_decoder", False):
        raise QgateError(
            f"the model in {str(folder)!r} ({config.model_type}) has an encoder and a decoder, and "
            f"one row of token ids is not enough for it; to gate it, {OWN_CALLABLE}."
        )


def _network_class(
    transformers: Any, config: Any, folder: Path, trust_remote_code: bool = False
) -> Any:
    """The class that the config names, else the one of its model_type that fits best."""
    named = getattr(config, "architectures", None)
    named = named if isinstance(named, list | tuple) else ()
    for name in named:
        kind: Any = getattr(transformers, str(name), None)
        if (
            inspect.isclass(kind)
            and issubclass(kind, transformers.PreTrainedModel)
            and isinstance(config, getattr(kind, "config_class", None) or ())
        ):
            return kind
    brought = getattr(config, "auto_map", None) or {}
    if named and brought:
        if not trust_remote_code:
            raise wants_code(folder)
        causal = "AutoModelForCausalLM" in brought
        return transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModel


def _read(
    kind: Any, config: Any, folder: Path, where: dict[str, bool], **more: Any
) -> tuple[nn.Module, dict[str, Any]]:
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


def _check_report(network: nn.Module, report: dict[str, Any], folder: Path) -> None:
    """transformers makes up what is missing, and drops what it has no place for."""
    if report["missing_keys"]:
        raise QgateError(
            f"the weights in {str(folder)!r} lack {_first(report['missing_keys'])}; transformers "
            "would make them up at random. Copy config.json and weights of one and the same model."
        )
    lists = {n: len(m) for n, m in network.named_modules() if isinstance(m, nn.ModuleList)}
    for name in sorted(report["unexpected_keys"]):
        for place in re.finditer(r"\.(\d+)\.", name):
            if int(place[1]) >= lists.get(name[: place.start()], float("inf")):
                layers = name[: place.start()]
                raise QgateError(
                    f"the config.json in {str(folder)!r} describes {lists[layers]} {layers}, but "
                    f"the weights have {name}. Copy the config.json that belongs to them."
                )


def _config_of(module: nn.Module) -> Any:
    return getattr(module, "config", None) if hasattr(module, "from_pretrained") else None


def _first(names: set[str], most: int = 6) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
