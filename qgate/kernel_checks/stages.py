"""Stages of a reference: what a fused kernel quantizes inside, declared where it happens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qgate.causes.faults import Function
from qgate.errors import QgateError
from qgate.expected.conventions import MSE, Convention
from qgate.expected.narrow_floats import is_wide_float
from qgate.expected.stages import StagedFunction, quantize_stage, stage_slot
from qgate.formats import Encoded, Quantizer
from qgate.formats.options import Options
from qgate.kernel_checks.declared import Quantization, declare
from qgate.kernel_checks.subject import KernelSubject


@dataclass(frozen=True)
class StageDeclaration:
    """A declaration of a stage in a reference; equal words are the same one."""

    words: str
    declared: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.words


def quantized(name: str, x: Tensor, declared: Any, options: Options) -> Tensor:
    """Quantize a stage of a reference; ValueError for what cannot be used."""
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        kind = f"a tensor of shape {tuple(name.shape)}" if isinstance(name, Tensor) else repr(name)
        raise ValueError(
            f"the name of a stage is {kind}; give a word for reports first: "
            'quantized("p", p, "fp8_e4m3").'
        )
    if not is_wide_float(x):
        dtype = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"stage {name!r} gets {dtype}; give the floating-point tensor that the kernel "
            "quantizes."
        )
    declaration = _declaration(name, declared, options)

    def plain(x: Tensor) -> Tensor:
        if isinstance(declaration.declared, Quantizer):
            return declaration.declared(x)
        return declare(declaration.declared, f"stage {name}", x.dtype).ideal(x)

    return quantize_stage(name, x, declaration, plain)


def _declaration(name: str, declared: Any, options: Options) -> StageDeclaration:
    if isinstance(declared, str):
        try:
            declared = _quantizer(declared, options)
        except (QgateError, TypeError) as error:
            raise ValueError(f"stage {name!r}: format {declared!r}: {error}") from None
    elif options:
        raise ValueError(
            f"stage {name!r}: {', '.join(options)} came with {declared!r}; options go with a "
            "format's name only."
        )
    if isinstance(declared, Quantizer):
        return StageDeclaration(repr(declared), declared)
    if isinstance(declared, Convention):
        return StageDeclaration(declared.name, declared)
    if isinstance(declared, Encoded) or not callable(declared):
        raise ValueError(
            f"stage {name!r} is declared as {declared!r}; allowed are a format's name with its "
            "options, a qgate.Quantizer, a convention, or a function from a tensor to its "
            "quantized values."
        )
    words = getattr(declared, "__qualname__", type(declared).__name__)
    return StageDeclaration(str(words), declared)


def _quantizer(name: str, options: Options) -> Quantizer:
    """Return the quantizer of a name and options, made once: references call it for every tile."""
    try:
        return _made(name, tuple(sorted(options.items())))
    except TypeError:  # of options without a hash, such as a tensor of scales
        return Quantizer(name, **options)


@functools.lru_cache(64)
def _made(name: str, options: tuple[tuple[str, Any], ...]) -> Quantizer:
    return Quantizer(name, **dict(options))


def found_stages(
    declared: dict[str, StageDeclaration], example: Sequence[Any], convention: str | None
) -> dict[str, Quantization]:
    """Return the quantization of each stage that a reference went through, by name."""
    if declared and convention == MSE:
        raise ValueError(
            f"convention {MSE!r} is not allowed with stages ({', '.join(declared)}): the result of "
            "searched scales inside has no exact form. Give the quantizer that the kernel has."
        )
    dtypes = [argument.dtype for argument in example if is_wide_float(argument)]
    dtype = dtypes[0] if dtypes else torch.float32
    return {
        name: declare(declaration.declared, f"stage {name!r}", dtype, convention)
        for name, declaration in declared.items()
    }


def with_stages(
    subject: KernelSubject, like: Function, stages: dict[str, Quantization]
) -> KernelSubject:
    """Return a subject whose reference quantizes inside by the first convention of each stage."""
    if not stages:
        return replace(subject, like=like)
    staged = StagedFunction(like)
    return replace(subject, like=staged, stages=stages).under(
        {stage_slot(name): 0 for name in stages}
    )
