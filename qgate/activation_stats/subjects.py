"""The model and the samples whose activations are looked at, from whatever names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qgate.activation_stats._sending import received, to_send
from qgate.activation_stats.settings import ActivationSettings
from qgate.errors import QgateError, unknown
from qgate.models import Model, huggingface, load, names
from qgate.models.huggingface import FolderTokenizer
from qgate.models.loading import existing_folder
from qgate.models.mamba.checkpoint import load_checkpoint
from qgate.models.samples import ByteTokenizer, Samples, Tokenizer, check_ids, read_samples
from qgate.models.samples.request import SOURCES
from qgate.models.tiny import TINY


@dataclass(eq=False)
class Sample:
    """One pass: what the module is called with, and the ids of its tokens where it has any."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    ids: Tensor | None = None

    def run(self, module: nn.Module, device: torch.device) -> Any:
        args = tuple(_moved(value, device) for value in self.args)
        return module(*args, **{k: _moved(v, device) for k, v in self.kwargs.items()})

    def __getstate__(self) -> dict[str, Any]:
        """Tensors go to other processes as plain bits."""
        return {name: to_send(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: received(value) for name, value in state.items()})

    def with_ids(self, ids: Tensor) -> Sample:
        """The same call with other tokens."""

        def turned(value: Any) -> Any:
            here = isinstance(value, Tensor) and value.numel() == len(ids) and self.ids is not None
            if not here or not torch.equal(value.reshape(-1).cpu(), self.ids.cpu()):  # type: ignore[union-attr]
                return value
            return ids.reshape(value.shape).to(value.device)

        args = tuple(turned(value) for value in self.args)
        return Sample(args, {k: turned(v) for k, v in self.kwargs.items()}, ids)


@dataclass(eq=False)
class MeasuredNetwork:
    """A network; `tokenizer` makes its samples when they are text, and `again` loads it in another
    process, where it was not `given` as it is."""

    module: nn.Module
    name: str
    part: str = ""
    tokenizer: Callable[[], Tokenizer | None] = lambda: None
    own: Sequence[Any] | None = None
    again: Callable[[], nn.Module] | None = None

    @property
    def given(self) -> bool:
        return self.again is None


@dataclass(eq=False)
class Passes:
    """All samples, with what they are."""

    samples: list[Sample]
    source: str
    notes: list[str] = field(default_factory=list)
    decode: Callable[[Sequence[int]], list[str]] | None = None

    @property
    def tokens(self) -> int:
        return sum(s.ids.numel() for s in self.samples if s.ids is not None)


def subject_of(
    model: nn.Module | Model | MeasuredNetwork | str, tokenizer: Any = None
) -> MeasuredNetwork:
    """A module, a qgate.Model, or the name of one."""
    if isinstance(model, MeasuredNetwork):
        return model
    if isinstance(model, Model):
        made = _as_tokenizer(tokenizer)
        return MeasuredNetwork(model.module, model.name, model.part, lambda: made, model.inputs)
    if isinstance(model, nn.Module):
        made = _as_tokenizer(tokenizer)
        return MeasuredNetwork(model, type(model).__name__, _part(model), lambda: made)
    if not isinstance(model, str):
        raise QgateError(
            f"a model is a torch.nn.Module, a qgate.Model or a name, not {type(model).__name__}."
        )
    return _named(model, tokenizer)


def _part(module: nn.Module) -> str:
    return huggingface.language_part(module) if hasattr(module, "config") else ""


def _named(name: str, tokenizer: Any) -> MeasuredNetwork:
    scheme, colon, rest = name.strip().partition(":")
    given = _as_tokenizer(tokenizer)
    if not colon:
        if name.strip().lower().replace("-", "_") not in TINY.names():
            raise unknown("model", name, names())
        tiny = TINY.get(name)
        tokens = lambda: given or ByteTokenizer()  # noqa: E731
        return MeasuredNetwork(tiny.load(), tiny.title, "", tokens, again=tiny.load)
    if scheme.lower() not in ("hf", "mamba"):
        made = load(name)
        file, _, function = name.strip().rpartition(":")
        again = partial(_loaded, f"{Path(file).expanduser().absolute()}:{function}")
        return MeasuredNetwork(made.module, made.name, made.part, lambda: given, made.inputs, again)

    folder = existing_folder(rest, name)

    def own() -> Tokenizer:
        return given or huggingface.tokenizer(folder)

    if scheme.lower() == "mamba":
        read = partial(load_checkpoint, folder.absolute())
        return MeasuredNetwork(read(), name, "", own, again=read)
    again = partial(huggingface.load_network, folder.absolute())
    network = again()
    return MeasuredNetwork(network, name, huggingface.language_part(network), own, again=again)


def _loaded(name: str) -> nn.Module:
    return load(name).module


def trusted_subject(name: str) -> MeasuredNetwork:
    """A folder of Hugging Face whose own Python files may run."""
    scheme, _, rest = name.partition(":")
    if scheme.lower() != "hf":
        raise QgateError(f"--trust-remote-code is for hf:PATH; the model is {name!r}.")
    folder = existing_folder(rest, name).absolute()
    again = partial(huggingface.load_network, folder, trust_remote_code=True)
    network = again()
    tokens = partial(huggingface.tokenizer, folder, trust_remote_code=True)
    return MeasuredNetwork(network, name, huggingface.language_part(network), tokens, again=again)


def _as_tokenizer(given: Any) -> Tokenizer | None:
    """One of qgate's, or one of transformers in its coat."""
    if given is None or (hasattr(given, "bos") and hasattr(given, "decode")):
        made: Tokenizer | None = given
        return made
    if callable(given) and hasattr(given, "convert_ids_to_tokens"):
        return FolderTokenizer(given, Path(str(getattr(given, "name_or_path", "") or "")))
    raise QgateError(
        f"a tokenizer is one of transformers or has encode, decode and bos; {type(given).__name__} "
        "is neither."
    )


def passes_of(subject: MeasuredNetwork, data: Any, settings: ActivationSettings) -> Passes:
    """The samples: text of a source, rows of token ids, or whatever the module is called with."""
    if data is None and subject.own is not None and settings.data.source == "builtin":
        data = subject.own
    if data is None:
        samples = _read(subject, settings)
        found = Passes(
            [Sample((ids,), ids=ids.reshape(-1)) for ids in samples.ids],
            samples.source,
            list(samples.notes),
            samples.decode,
        )
    else:
        found = _given(data, settings.data.num_samples)
        tokenizer = subject.tokenizer() if not subject.given or subject.own is None else None
        found.decode = None if tokenizer is None else tokenizer.decode
    if not found.samples:
        raise QgateError("there are no samples to run the model on.")
    _check(subject, found)
    _check_drawn(settings, len(found.samples))
    if found.decode is not None and not settings.visualization.outlier.decode_tokens:
        found.decode = None
    return found


def _read(subject: MeasuredNetwork, settings: ActivationSettings) -> Samples:
    source = settings.data.source
    known = subject.tokenizer() if not source.strip().lower().startswith("tokens:") else None
    if known is None and not source.strip().lower().startswith("tokens:"):
        raise QgateError(
            f"{subject.name} comes without a tokenizer, and data.source {source!r} is text: give "
            "tokenizer=…, or token ids as data (a list of tensors, or tokens:FILE.npy). Sources "
            f"are {', '.join(SOURCES)}."
        )
    request = settings.data.request()
    most = _positions(subject.module)
    if request.seq_len is not None or most is None or most >= request.length:
        return read_samples(request, known)
    read = read_samples(replace(request, most=most), known)
    note = f"samples are of at most {most} tokens: the model has no more positions (data.seq_len)."
    return replace(read, notes=(*read.notes, note))


def _given(data: Any, most: int) -> Passes:
    if not isinstance(data, Iterable):
        raise QgateError(f"data is a list of samples or a source of text, not {data!r}.")
    items = [data] if isinstance(data, Tensor | Mapping) else list(data)
    samples = [sample for item in items for sample in _rows(item)]
    notes = []
    if len(samples) > most:
        notes.append(f"{len(samples)} samples were given; data.num_samples is {most}.")
        samples = samples[:most]
    tokens = sum(s.ids.numel() for s in samples if s.ids is not None)
    size = f"{len(samples)} samples" + (f", {tokens} tokens" if tokens else "")
    return Passes(samples, f"given by the caller; {size}", notes)


def _rows(item: Any) -> Iterator[Sample]:
    """The rows of a batch, each a sample; what an attention mask leaves out is no part of it."""
    if isinstance(item, Mapping):
        yield from _of_mapping(dict(item))
    elif isinstance(item, tuple):
        yield Sample(item)
    elif isinstance(item, Tensor) and not item.is_floating_point() and item.dim() <= 2:
        for row in item[None] if item.dim() == 1 else item:
            if not row.numel():
                raise QgateError("a sample without a single token was given.")
            yield Sample((row.long()[None],), ids=row.long())
    elif isinstance(item, Tensor):
        yield Sample((item,))
    elif isinstance(item, list) and all(isinstance(k, int) for k in item) and item:
        yield from _rows(torch.tensor(item))
    else:
        raise QgateError(
            f"a sample is a tensor, a tuple or a dict of what the model takes, not "
            f"{type(item).__name__}."
        )


def _of_mapping(item: dict[str, Any]) -> Iterator[Sample]:
    ids, mask = item.get("input_ids"), item.get("attention_mask")
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
    rest = {k: v for k, v in item.items() if k != "attention_mask"}
    for at in range(len(ids)):
        kept = slice(None) if mask is None else mask[at].bool()
        kwargs: dict[str, Any] = {}
        for name, value in rest.items():
            if isinstance(value, Tensor) and value.shape[:2] == ids.shape:
                kwargs[name] = value[at][kept][None]
            elif isinstance(value, Tensor) and value.dim() and len(value) == len(ids):
                kwargs[name] = value[at : at + 1]
            else:
                kwargs[name] = value
        row = kwargs["input_ids"].reshape(-1)
        if not row.numel():
            raise QgateError(f"row {at} of a batch is nothing but padding.")
        yield Sample(kwargs=kwargs, ids=row)


def _check_drawn(settings: ActivationSettings, count: int) -> None:
    view = settings.visualization
    if view.enabled.heatmap_3d and view.heatmap_3d.sample_idx >= count:
        raise QgateError(
            f"visualization.heatmap_3d.sample_idx {view.heatmap_3d.sample_idx} is not there: of "
            f"{count} samples it is a whole number from 0 to {count - 1}."
        )


def _learned(module: nn.Module) -> dict[str, nn.Embedding]:
    """Tables of positions."""
    tables = {n: m for n, m in module.named_modules() if isinstance(m, nn.Embedding)}
    return {n: m for n, m in tables.items() if "position" in n or n.endswith(("wpe", "pos_emb"))}


def _said_positions(module: nn.Module) -> int | None:
    """What the configuration of a model says that it was made for."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def _positions(module: nn.Module) -> int | None:
    """The longest sample that a model can be given, where it says so."""
    told = [m.num_embeddings for m in _learned(module).values()]
    said = _said_positions(module)
    return min([*told, *([] if said is None else [said])], default=None)


def _check(subject: MeasuredNetwork, passes: Passes) -> None:
    """Ids beyond the embedding and rows beyond the positions are obscure errors later."""
    rows = [s.ids[None] for s in passes.samples if s.ids is not None]
    if not rows:
        return
    longest = max(r.shape[-1] for r in rows)
    tables = {n: m for n, m in subject.module.named_modules() if isinstance(m, nn.Embedding)}
    learned = _learned(subject.module)
    words = [m for n, m in tables.items() if n not in learned and "token_type" not in n]
    own = getattr(subject.module, "get_input_embeddings", None)
    try:
        table = own() if callable(own) else None
    except (NotImplementedError, AttributeError):
        table = None
    table = table if isinstance(table, nn.Embedding) else next(iter(words), None)
    if table is not None:
        check_ids(Samples(rows, passes.source), table.num_embeddings, subject.name)
    for name, positions in learned.items():
        if longest > positions.num_embeddings:
            raise QgateError(
                f"{subject.name} has {positions.num_embeddings} positions ({name}), fewer than the "
                f"{longest} tokens of a sample: data.seq_len {positions.num_embeddings} at most."
            )
    most = _said_positions(subject.module)
    if most is not None and longest > most:
        if learned:
            raise QgateError(
                f"{subject.name} has {most} positions, fewer than the {longest} tokens of a "
                f"sample: data.seq_len {most} at most."
            )
        passes.notes.append(
            f"samples of {longest} tokens are longer than the {most} positions that the model says "
            "it was made for (max_position_embeddings)."
        )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_moved(item, device) for item in value)
    return value
