"""Read foreign containers safely: no code runs, and a small file stays small in memory.

Torch files are read weights-only, numpy files without objects. A part that unpacks to much more
than its size in the file is refused, as is a tensor with strides beyond its memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.storage.foreign import MOST_NAMES, open_foreign

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.storage import described_classes
else:
    described_classes = LateModule("qgate.storage.described_classes")

MOST_BYTES = 32 << 20
MOST_TIMES = 100
"""Limits of unpacking: bytes, or multiples of the packed size, whichever is more."""
_DEEPEST = 100
MOST_DIMENSIONS = 64
"""Dimensions of an array of numpy; work on a tensor grows with the square of their number."""
_FIRST_BYTES = 64 << 20
_PLAIN = (int, float, bool, str)


def unpacked_limit(packed: int) -> int:
    """Return the number of bytes that a compressed part may unpack to."""
    return max(MOST_BYTES, MOST_TIMES * packed)


def check_archive(file: IO[bytes], label: str) -> None:
    """Refuse a zip archive with a part that unpacks to too much; ignore other files."""
    is_archive = zipfile.is_zipfile(file)
    file.seek(0)
    if not is_archive:
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.file_size > unpacked_limit(entry.compress_size):
                raise QgateError(
                    f"{label}: {entry.filename[:80]!r} would unpack from {entry.compress_size} to "
                    f"{entry.file_size} bytes, which is refused above {MOST_BYTES >> 20} MB and "
                    f"{MOST_TIMES} times. If that is what it is, save it without compression."
                )
    file.seek(0)


def load_torch(
    source: Path | bytes, label: str = "", *, dense: bool = False, library: str = ""
) -> Any:
    """Load a torch file or the bytes of one, weights-only; a file is mapped where possible.

    With `dense`, sparse, meta and quantized tensors are refused. Tensors of the classes of a
    `library` are returned as `DescribedTensor`, with what they are made of.
    """
    import torch

    label = label or repr(str(source))
    file: IO[bytes]
    with (
        io.BytesIO(source)
        if isinstance(source, bytes)
        else open_foreign(source, "tensors", None) as file
    ):
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        check_archive(file, label)
        _check_pickle(file, label)
    load = functools.partial(torch.load, map_location="cpu", weights_only=True)
    with contextlib.ExitStack() as entered:
        entered.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)
        if library:
            entered.enter_context(described_classes.described(source, library, label))
        if isinstance(source, bytes):
            loaded = load(io.BytesIO(source))
        else:
            try:
                loaded = load(source, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                loaded = load(source)
    _check_tensors(loaded, size, label, dense)
    return loaded


def _check_pickle(file: IO[bytes], label: str) -> None:
    """Refuse pickles that make byte arrays, which no tensor needs and weights-only allows."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            pickles = [archive.read(name) for name in names]
    else:
        file.seek(0)
        pickles = [file.read(_FIRST_BYTES)]
    if any(b"\nbytearray\n" in data for data in pickles):
        raise QgateError(f"{label} makes arrays of bytes, which no tensor needs: it is refused.")


def flatten(loaded: Any, label: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dictionaries and lists, with names joined by dots.

    Limits on depth and number stop at a list that contains itself.
    """
    count = 0
    plain_by_id: dict[int, bool] = {}

    def is_plain(value: Any) -> bool:
        """Tell whether a list has only numbers and texts, and counts as one value."""
        if id(value) not in plain_by_id:
            plain_by_id[id(value)] = all(type(item) in _PLAIN for item in value)
        return plain_by_id[id(value)]

    def walk(holder: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
        nonlocal count
        if depth > _DEEPEST:
            raise QgateError(f"{label} holds lists or tables more than {_DEEPEST} deep.")
        for name, value in holder.items() if isinstance(holder, Mapping) else enumerate(holder):
            count += 1
            if count > MOST_NAMES:
                raise QgateError(f"{label} holds more than {MOST_NAMES} things: save fewer.")
            if isinstance(value, Mapping) or (
                isinstance(value, list | tuple) and not is_plain(value)
            ):
                yield from walk(value, f"{prefix}{name}.", depth + 1)
            else:
                yield f"{prefix}{name}", value

    is_container = isinstance(loaded, Mapping) or (
        isinstance(loaded, list | tuple) and not is_plain(loaded)
    )
    yield from walk(loaded if is_container else [loaded], "", 0)


def _check_tensors(loaded: Any, size: int, label: str, dense: bool) -> None:
    from torch import Tensor

    for name, value in flatten(loaded, label):
        subject = f"{label}: the tensor {name[:80]!r}"
        parts = getattr(value, "parts", None) if isinstance(value, Tensor) else None
        for tensor in [value] if parts is None else [part for _, part in parts()]:
            if isinstance(tensor, Tensor) and is_dense(tensor):
                _check_tensor(tensor, size, subject)
            elif isinstance(tensor, Tensor) and dense:
                raise not_dense(tensor, subject)


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the values of a tensor lie in memory, one after the other."""
    is_other = tensor.is_meta or tensor.is_quantized or tensor.is_nested
    return str(tensor.layout) == "torch.strided" and not is_other


def not_dense(tensor: Tensor, label: str) -> QgateError:
    if tensor.is_nested:
        return QgateError(f"{label} is nested; save its parts, those of .unbind().")
    kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
    return QgateError(f"{label} is {kind}; save it dense, with its values.")


def check_dimensions(count: int, label: str) -> None:
    """Refuse a tensor of more dimensions than any has."""
    if count > MOST_DIMENSIONS:
        raise QgateError(
            f"{label} has {count} dimensions, and {MOST_DIMENSIONS} are read: save it with fewer."
        )


def _check_tensor(tensor: Tensor, size: int, label: str) -> None:
    check_dimensions(tensor.dim(), label)
    stored, laid_out = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
    if stored > size:
        raise QgateError(f"{label} has {stored} bytes, and the file {size}: it is damaged.")
    if laid_out > unpacked_limit(stored):
        raise QgateError(
            f"{label} repeats {stored} bytes to {laid_out}, which is refused above "
            f"{MOST_BYTES >> 20} MB and {MOST_TIMES} times. Save it with .contiguous()."
        )
