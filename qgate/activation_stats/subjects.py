"""The model and the samples whose activations are measured, from a name or an object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from qgate.activation_stats.settings import ActivationSettings
from qgate.errors import QgateError, unknown
from qgate.models import Model, Sampling, huggingface, load, names
from qgate.models.huggingface import FolderTokenizer
from qgate.models.huggingface_inputs import TEXT, fed_names
from qgate.models.loading import checkpoint_folder, model_of_signals
from qgate.models.mamba.checkpoint import load_checkpoint
from qgate.models.naming import split_name
from qgate.models.samples import (
    ByteTokenizer,
    DataRequest,
    Samples,
    Tokenizer,
    check_ids,
    read_samples,
)
from qgate.models.samples.request import SOURCES
from qgate.models.tiny import TINY


@dataclass(eq=False)
class Sample:
    """One pass: the arguments of the module, and the ids of its tokens where it has any."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    ids: Tensor | None = None

    def run(self, module: nn.Module, device: torch.device) -> Any:
        args, kwargs = _mapped((self.args, self.kwargs), lambda x: x.to(device))
        return module(*args, **kwargs)

    def with_ids(self, ids: Tensor) -> Sample:
        """Return the same call with other tokens."""
        own = ids if self.ids is None else self.ids

        def replaced(value: Any) -> Any:
            same = isinstance(value, Tensor) and value.numel() == len(ids) == len(own)
            if not same or not torch.equal(value.reshape(-1).cpu(), own.cpu()):
                return value
            return ids.reshape(value.shape).to(value.device)

        kwargs = {name: replaced(value) for name, value in self.kwargs.items()}
        return Sample(tuple(map(replaced, self.args)), kwargs, ids)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the tensors in mappings, lists and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, change) for item in value)
    return value


# The model ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class MeasuredNetwork:
    """A network; `tokenizer` makes its samples when they are text, and `reload` loads it in another
    process, unless it is a module `from_caller`."""

    module: nn.Module
    name: str
    part: str = ""
    tokenizer: Callable[[], Tokenizer | None] = lambda: None
    inputs: Sequence[Any] | None = None
    reload: Callable[[], nn.Module] | None = None

    @property
    def from_caller(self) -> bool:
        return self.reload is None


def subject_of(
    model: nn.Module | Model | MeasuredNetwork | str, tokenizer: Any = None
) -> MeasuredNetwork:
    """Return the network of a module, of a qgate.Model or of a name."""
    if isinstance(model, MeasuredNetwork):
        return model
    own_tokenizer = _as_tokenizer(tokenizer)
    if isinstance(model, Model):
        return MeasuredNetwork(
            model.module, model.name, model.part, lambda: own_tokenizer, model.inputs
        )
    if isinstance(model, nn.Module):
        part = huggingface.language_part(model) if hasattr(model, "config") else ""
        return MeasuredNetwork(model, type(model).__name__, part, lambda: own_tokenizer)
    if not isinstance(model, str):
        raise QgateError(
            f"a model is a torch.nn.Module, a qgate.Model or a name, not {type(model).__name__}."
        )
    located, name = split_name(model)
    name = model if name is None else name
    scheme, colon, location = located.strip().partition(":")
    if not colon:
        if model.strip().lower().replace("-", "_") not in TINY.names():
            raise unknown("model", model, names())
        tiny = TINY.get(model)
        tokens = lambda: own_tokenizer or ByteTokenizer()  # noqa: E731
        return MeasuredNetwork(tiny.load(), tiny.title, "", tokens, reload=tiny.load)
    if scheme.lower() == "hf":
        return _of_hugging_face(name, checkpoint_folder(location, model), own_tokenizer)
    if scheme.lower() == "mamba":
        folder = checkpoint_folder(location, model)
        read = partial(load_checkpoint, folder.absolute())
        tokens = lambda: own_tokenizer or huggingface.tokenizer(folder)  # noqa: E731
        return MeasuredNetwork(read(), name, "", tokens, reload=read)
    loaded = load(model)
    file, _, function = model.strip().rpartition(":")
    reload = partial(_module_of, f"{Path(file).expanduser().absolute()}:{function}")
    return MeasuredNetwork(
        loaded.module, loaded.name, loaded.part, lambda: own_tokenizer, loaded.inputs, reload
    )


def _module_of(name: str) -> nn.Module:
    return load(name).module


def trusted_subject(name: str) -> MeasuredNetwork:
    """Load a folder of Hugging Face whose own Python files may run."""
    located, own_name = split_name(name)
    scheme, _, location = located.partition(":")
    if scheme.lower() != "hf":
        raise QgateError(f"--trust-remote-code is for hf:PATH; the model is {name!r}.")
    folder = checkpoint_folder(location, name).absolute()
    return _of_hugging_face(own_name or name, folder, trust_remote_code=True)


def _of_hugging_face(
    name: str, folder: Path, own_tokenizer: Tokenizer | None = None, **options: bool
) -> MeasuredNetwork:
    reload = partial(huggingface.load_network, folder.absolute(), **options)
    tokens = lambda: own_tokenizer or huggingface.tokenizer(folder, **options)  # noqa: E731
    network = reload()
    fed = fed_names(network)
    if fed != (TEXT,):
        inputs = model_of_signals(name, folder, network, fed, Sampling()).inputs
        return MeasuredNetwork(network, name, "", lambda: own_tokenizer, inputs, reload)
    return MeasuredNetwork(network, name, huggingface.language_part(network), tokens, reload=reload)


def _as_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return one of qgate's as it is, and wrap one of transformers."""
    if tokenizer is None:
        return None
    if hasattr(tokenizer, "bos") and hasattr(tokenizer, "decode"):
        return cast(Tokenizer, tokenizer)
    if callable(tokenizer) and hasattr(tokenizer, "convert_ids_to_tokens"):
        return FolderTokenizer(tokenizer, Path(str(getattr(tokenizer, "name_or_path", "") or "")))
    raise QgateError(
        "a tokenizer is one of transformers or has encode, decode and bos; "
        f"{type(tokenizer).__name__} is neither."
    )


# The samples -------------------------------------------------------------------------------------


@dataclass(eq=False)
class SampleSet:
    """All samples, their source, and notes on how they were read."""

    calls: list[Sample]
    source: str
    notes: list[str] = field(default_factory=list)
    decode: Callable[[Sequence[int]], list[str]] | None = None

    @property
    def tokens(self) -> int:
        return sum(s.ids.numel() for s in self.calls if s.ids is not None)


def sample_set_of(subject: MeasuredNetwork, data: Any, settings: ActivationSettings) -> SampleSet:
    """Read the samples: text of a source, token ids, or any arguments of the module."""
    if data is None and subject.inputs is not None and settings.data.source == "builtin":
        data = subject.inputs
    if data is None:
        read = _read(subject, settings)
        calls = [Sample((ids,), ids=ids.reshape(-1)) for ids in read.ids]
        samples = SampleSet(calls, read.source, list(read.notes), read.decode)
    else:
        samples = _from_caller(data, settings.data.num_samples)
        has_tokenizer = not subject.from_caller or subject.inputs is None
        tokenizer = subject.tokenizer() if has_tokenizer else None
        samples.decode = None if tokenizer is None else tokenizer.decode
    count, view = len(samples.calls), settings.visualization
    if not count:
        raise QgateError("there are no samples to run the model on.")
    _check(subject, samples)
    if view.enabled.heatmap_3d and view.heatmap_3d.sample_idx >= count:
        raise QgateError(
            f"visualization.heatmap_3d.sample_idx {view.heatmap_3d.sample_idx} is not there: of "
            f"{count} samples it is a whole number from 0 to {count - 1}."
        )
    if not view.outlier.decode_tokens:
        samples.decode = None
    return samples


def data_request(settings: ActivationSettings) -> DataRequest:
    """Return the section `data` as a request of `qgate.models.samples.read_samples`."""
    values = {**vars(settings.data), **vars(settings.data.custom)}
    del values["custom"]
    return DataRequest(**values)


def _read(subject: MeasuredNetwork, settings: ActivationSettings) -> Samples:
    source = settings.data.source
    is_text = not source.strip().lower().startswith("tokens:")
    tokenizer = subject.tokenizer() if is_text else None
    if is_text and tokenizer is None:
        raise QgateError(
            f"{subject.name} comes without a tokenizer, and data.source {source!r} is text: give "
            "tokenizer=…, or token ids as data (a list of tensors, or tokens:FILE.npy). Sources "
            f"are {', '.join(SOURCES)}."
        )
    request = data_request(settings)
    limits = [m.num_embeddings for m in _position_tables(subject.module).values()]
    limits += [n for n in [_configured_positions(subject.module)] if n is not None]
    most = min(limits, default=None)
    if request.seq_len is not None or most is None or most >= request.length:
        return read_samples(request, tokenizer)
    read = read_samples(replace(request, most=most), tokenizer)
    note = f"samples are of at most {most} tokens: the model has no more positions (data.seq_len)."
    return replace(read, notes=(*read.notes, note))


def _from_caller(data: Any, most: int) -> SampleSet:
    if not isinstance(data, Iterable):
        raise QgateError(f"data is a list of samples or a source of text, not {data!r}.")
    items = [data] if isinstance(data, Tensor | Mapping) else list(data)
    calls = [sample for item in items for sample in _rows(item)]
    notes = []
    if len(calls) > most:
        notes.append(f"{len(calls)} samples were given; data.num_samples is {most}.")
    samples = SampleSet(calls[:most], "", notes)
    size = f", {samples.tokens} tokens" if samples.tokens else ""
    samples.source = f"given by the caller; {len(samples.calls)} samples{size}"
    return samples


def _rows(item: Any) -> Iterator[Sample]:
    """Split a batch into its rows, each a sample without the padding that its mask marks."""
    if isinstance(item, Mapping):
        yield from _rows_of_mapping(dict(item))
    elif isinstance(item, tuple):
        yield Sample(item)
    elif isinstance(item, Tensor) and not item.is_floating_point() and item.dim() <= 2:
        for row in item[None] if item.dim() == 1 else item:
            if not row.numel():
                raise QgateError("a sample without a single token was given.")
            ids = row.long().clone()
            yield Sample((ids[None],), ids=ids)
    elif isinstance(item, Tensor):
        yield Sample((item,))
    elif isinstance(item, list) and all(isinstance(k, int) for k in item) and item:
        yield from _rows(torch.tensor(item))
    else:
        raise QgateError(
            f"a sample is a tensor, a tuple or a dict of what the model takes, not "
            f"{type(item).__name__}."
        )


def _rows_of_mapping(item: dict[str, Any]) -> Iterator[Sample]:
    ids, mask = item.get("input_ids"), item.pop("attention_mask", None)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        if mask is not None:
            raise QgateError("an attention mask means nothing without input_ids of rows.")
        yield Sample(kwargs=item)
        return
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise QgateError(
            f"the attention mask is {shape} and input_ids {tuple(ids.shape)}: with masks of "
            "another form, give rows without padding."
        )
    for at in range(len(ids)):
        unmasked = slice(None) if mask is None else mask[at].bool()
        kwargs = dict(item)
        for name, value in item.items():
            if isinstance(value, Tensor) and value.shape[:2] == ids.shape:
                kwargs[name] = value[at][unmasked][None].clone()
            elif isinstance(value, Tensor) and value.dim() and len(value) == len(ids):
                kwargs[name] = value[at : at + 1].clone()
        row = kwargs["input_ids"].reshape(-1)
        if not row.numel():
            raise QgateError(f"row {at} of a batch is nothing but padding.")
        yield Sample(kwargs=kwargs, ids=row)


# Checks ------------------------------------------------------------------------------------------


def _position_tables(module: nn.Module) -> dict[str, nn.Embedding]:
    inside = re.compile(huggingface.language_part(module))
    named = ((n, m) for n, m in module.named_modules() if inside.search(n))
    tables = {n: m for n, m in named if isinstance(m, nn.Embedding)}
    return {n: m for n, m in tables.items() if "position" in n or n.endswith(("wpe", "pos_emb"))}


def _configured_positions(module: nn.Module) -> int | None:
    """Return the number of positions that the configuration of a model names."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def _word_table(module: nn.Module) -> nn.Embedding | None:
    own = getattr(module, "get_input_embeddings", None)
    try:
        table = own() if callable(own) else None
    except (NotImplementedError, AttributeError):
        table = None
    if isinstance(table, nn.Embedding):
        return table
    position_tables = _position_tables(module)
    tables = ((n, m) for n, m in module.named_modules() if isinstance(m, nn.Embedding))
    return next((m for n, m in tables if n not in position_tables and "token_type" not in n), None)


def _check(subject: MeasuredNetwork, samples: SampleSet) -> None:
    """Refuse ids beyond the embedding and rows beyond the positions: later errors are obscure."""
    rows = [s.ids[None] for s in samples.calls if s.ids is not None]
    if not rows:
        return
    if (table := _word_table(subject.module)) is not None:
        check_ids(Samples(rows, samples.source), table.num_embeddings, subject.name)
    longest = max(r.shape[-1] for r in rows)
    learned = _position_tables(subject.module)
    limits = [(m.num_embeddings, f" ({name})") for name, m in learned.items()]
    most = _configured_positions(subject.module)
    if most is not None and learned:
        limits.append((most, ""))
    for positions, where in limits:
        if longest > positions:
            raise QgateError(
                f"{subject.name} has {positions} positions{where}, fewer than the {longest} tokens "
                f"of a sample: data.seq_len {positions} at most."
            )
    if most is not None and longest > most:
        samples.notes.append(
            f"samples of {longest} tokens are longer than the {most} positions that the model says "
            "it was made for (max_position_embeddings)."
        )
