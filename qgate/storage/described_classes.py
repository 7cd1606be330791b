"""Objects of a library's classes in torch files, read without the library: none of it runs.

torch's weights-only reader makes objects of those classes alone that are allowed by name. Classes
of the library are stood in for by empty ones of the same names, which keep what was stored.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

_SHOWN = 3


class DescribedTensor(Tensor):
    """A tensor of a class of the library: no values of its own, but the tensors it is made of."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, operator: object, _types: object, _args: object = (), _named: object = None
    ) -> object:
        raise NotImplementedError(f"{operator} of {cls.__name__}, which is described alone")

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors it is made of by name; those of a described one after its name."""
        for name, value in vars(self).items():
            if isinstance(value, DescribedTensor):
                yield from ((f"{name}_{inner}", part) for inner, part in value.parts())
            elif isinstance(value, Tensor):
                yield name, value


class DescribedObject:
    """An object of a class of the library, such as a choice among kernels."""

    def __init__(self, *stored: object, **named: object) -> None:
        del stored, named


@contextlib.contextmanager
def described(source: Path | bytes, library: str, label: str) -> Iterator[None]:
    """Let torch's weights-only reader make stand-ins for the classes of a library in a file.

    Classes that were allowed before, such as the library's own once it is imported, are not.
    """
    before = get_safe_globals()
    clear_safe_globals()
    try:
        names = _classes(source)
        foreign = [name for name in names if not name.startswith(f"{library}.")]
        if foreign:
            more = ", …" if len(foreign) > _SHOWN else ""
            raise ValueError(
                f"{label} would have to run {', '.join(foreign[:_SHOWN])}{more} to be read, which "
                f"is refused: tensors and classes of {library} are read"
            )
        with safe_globals(list(_stand_ins(names))):
            yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _classes(source: Path | bytes) -> list[str]:
    """List what a file needs beyond tensors; files of old versions of torch can have none."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))
    except ValueError:
        return []


def _stand_ins(names: Iterable[str]) -> Iterator[type]:
    for name in names:
        module, _, last = name.rpartition(".")
        kind = DescribedTensor if last.endswith("Tensor") else DescribedObject
        yield type(last, (kind,), {"__module__": module})
