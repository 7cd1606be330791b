"""Rows of samples: the first axis counts them, and a mask says which tokens of them are padding.

A sample is a tensor, a tuple of positional or a mapping of keyword arguments; in all of them the
first tensor has one entry per row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qgate.hooks.nested import walk_tensors

MASK = "attention_mask"


def tensors_of(value: Any) -> list[tuple[str, Tensor]]:
    """List the tensors in nested tuples, mappings and dataclasses, each with its path."""
    return list(walk_tensors(value))


def map_tensors(
    value: Any, change: Callable[[Tensor], Tensor], of_objects: Callable[[Any], Any] | None = None
) -> Any:
    """Return a sample with every tensor changed; mappings become plain dicts.

    `of_objects` changes what is neither a tensor nor made of values.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change, of_objects) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change, of_objects) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    return value if of_objects is None else of_objects(value)


def row_count(sample: Any) -> int:
    """Count the rows of a sample: the first axis of its first tensor."""
    tensors = tensors_of(sample)
    return tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 1


def is_text(sample: Any) -> bool:
    """Tell if a sample is rows of token ids and nothing else."""
    is_whole = isinstance(sample, Tensor) and not sample.is_floating_point()
    return is_whole and sample.dtype != torch.bool and sample.dim() == 2


def token_ids(sample: Any) -> Tensor | None:
    """Return the rows of token ids of a sample: itself, its `input_ids`, or the first of a tuple.

    None for samples of another kind.
    """
    if isinstance(sample, Mapping):
        sample = sample.get("input_ids")
    elif isinstance(sample, tuple):
        sample = next(iter(sample), None)
    return sample if is_text(sample) else None


def with_companions(forward: Callable[..., Any], ids: Tensor, example: Any) -> Any:
    """Return token ids alone with what `forward` must have beside them, as an example has it.

    A mask says that every token is real, positions count from 0, and types of tokens are 0.
    """
    if not isinstance(example, Mapping | tuple):
        return ids
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ids
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = {p.name for p in parameters if p.default is p.empty and p.name in names}
    beside = dict(example if isinstance(example, Mapping) else zip(names, example, strict=False))
    first = next((name for name in beside if is_text(beside[name])), "")
    others = {name: beside[name] for name in beside if name in required and name != first}
    if not others or any(
        not isinstance(tensor, Tensor) or tensor.shape != beside[first].shape
        for tensor in others.values()
    ):
        return ids
    count = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    meant = {"mask": torch.ones_like(ids), "position": count, "type": torch.zeros_like(ids)}
    sample = {first: ids}
    for name, tensor in others.items():
        word = next((word for word in meant if word in name), None)
        if word is None:
            return ids
        sample[name] = meant[word].to(tensor.dtype)
    return sample


def real_tokens(sample: Any) -> Tensor | None:
    """Return which tokens of each row are real, as booleans; None where all are."""
    mask = sample.get(MASK) if isinstance(sample, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool((mask != 0).all()):
        return None
    return mask != 0


def without_padding(tensor: Tensor, real: Tensor | None) -> Tensor:
    """Return the rows of a tensor that belong to real tokens, one after the other."""
    if real is None or tensor.dim() < 3 or tensor.shape[:2] != real.shape:
        return tensor
    return tensor[real.to(tensor.device)]


def split_rows(tensor: Tensor, sample: Any) -> list[Tensor]:
    """Return the part of each row of a sample, without padding; whole where rows do not show."""
    rows, real = row_count(sample), real_tokens(sample)
    if not tensor.dim():
        return [tensor.reshape(1)]
    if tensor.shape[0] != rows:
        return [tensor]
    if real is not None and tensor.dim() > 2 and tensor.shape[:2] == real.shape:
        parts = [of[mask.to(of.device)] for of, mask in zip(tensor, real, strict=True)]
        return [of.unsqueeze(0) for of in parts if len(of)]
    return list(tensor.split(1))


def fullest_row(sample: Any) -> Any:
    """Return the row of a sample that has the fewest padding, without what pads it behind."""
    real, row = real_tokens(sample), 0
    if real is None or len(real) != row_count(sample):
        return cut_sample(sample, slice(0, 1))
    row = int(real.sum(1).argmax())
    count = int(real[row].sum())
    is_in_front = bool(real[row, :count].all())
    return cut_sample(sample, slice(row, row + 1), count if is_in_front else None)


def cut_sample(sample: Any, rows: slice, tokens: int | None = None) -> Any:
    """Return some rows of a sample, and of its token ids and what goes with them the first ones."""
    total, ids = row_count(sample), token_ids(sample)

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != total:
            return tensor
        part = tensor[rows]
        is_of_tokens = ids is not None and tensor.dim() > 1 and tensor.shape[1] == ids.shape[1]
        return part[:, :tokens] if is_of_tokens else part

    return map_tensors(sample, cut)


def join_rows(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
