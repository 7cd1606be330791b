"""What is read of containers that somebody else made: nothing runs, and what is small stays small.

Torch files are read weights-only, numpy files without objects. A part that unpacks to much more
than it takes in its file is refused, as is a tensor that is laid out over memory it does not have.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from qgate.errors import QgateError

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 32 << 20
MOST_TIMES = 100
"""What a part may unpack to: so many bytes, or so many times what it takes, whichever is more."""
_MOST_NAMES, _DEEPEST = 200_000, 100
_FIRST_BYTES = 64 << 20
_PLAIN = (int, float, bool, str)


def most_unpacked(packed: int) -> int:
    """How many bytes may come out of a compressed part."""
    return max(MOST_BYTES, MOST_TIMES * packed)


def check_archive(file: Path | IO[bytes], shown: str) -> None:
    """Refuse a zip archive with a part that unpacks to too much; anything else is not judged."""
    is_archive = zipfile.is_zipfile(file)
    if hasattr(file, "seek"):
        file.seek(0)
    if not is_archive:
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.file_size > most_unpacked(entry.compress_size):
                raise QgateError(
                    f"{shown}: {entry.filename[:80]!r} would unpack from {entry.compress_size} to "
                    f"{entry.file_size} bytes, which is refused above {MOST_BYTES >> 20} MB and "
                    f"{MOST_TIMES} times. If that is what it is, save it without compression."
                )
    if hasattr(file, "seek"):
        file.seek(0)


def load_torch(path: Path, *, dense: bool = False) -> Any:
    """What a torch file holds, memory-mapped where its container allows it.

    With `dense` tensors of other kinds are refused here and not where they are used.
    """
    import torch

    check_archive(path, repr(str(path)))
    with path.open("rb") as file:
        _check_pickle(file, repr(str(path)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    _check_tensors(loaded, path.stat().st_size, repr(str(path)), dense)
    return loaded


def _check_pickle(file: IO[bytes], shown: str) -> None:
    """Weights-only pickles may make arrays of bytes of any length, of which no tensor has need."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            pickles = [archive.read(name) for name in names]
    else:
        file.seek(0)
        pickles = [file.read(_FIRST_BYTES)]
    if any(b"\nbytearray\n" in each for each in pickles):
        raise QgateError(f"{shown} makes arrays of bytes, which no tensor needs: it is refused.")


def load_torch_bytes(data: bytes, shown: str) -> Any:
    """The same of a file in memory."""
    import torch

    file = io.BytesIO(data)
    check_archive(file, shown)
    _check_pickle(file, shown)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    _check_tensors(loaded, len(data), shown, False)
    return loaded


def flat(loaded: Any, shown: str) -> Iterator[tuple[str, Any]]:
    """What is in dictionaries and lists inside one another, names joined by dots.

    A list that is in itself, or in another one many times over, would have no end.
    """
    count = 0
    known: dict[int, bool] = {}

    def is_plain(value: Any) -> bool:
        """A list of numbers or texts is one thing, however long."""
        if id(value) not in known:
            known[id(value)] = all(type(each) in _PLAIN for each in value)
        return known[id(value)]

    def walk(holder: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
        nonlocal count
        if depth > _DEEPEST:
            raise QgateError(f"{shown} holds lists or tables more than {_DEEPEST} deep.")
        for name, value in holder.items() if isinstance(holder, Mapping) else enumerate(holder):
            count += 1
            if count > _MOST_NAMES:
                raise QgateError(f"{shown} holds more than {_MOST_NAMES} things: save fewer.")
            if isinstance(value, Mapping) or (
                isinstance(value, list | tuple) and not is_plain(value)
            ):
                yield from walk(value, f"{prefix}{name}.", depth + 1)
            else:
                yield f"{prefix}{name}", value

    whole = isinstance(loaded, Mapping) or (
        isinstance(loaded, list | tuple) and not is_plain(loaded)
    )
    yield from walk(loaded if whole else [loaded], "", 0)


def _check_tensors(loaded: Any, size: int, shown: str, dense: bool) -> None:
    from torch import Tensor

    for name, value in flat(loaded, shown):
        if isinstance(value, Tensor):
            what = f"{shown}: the tensor {name[:80]!r}"
            if is_dense(value):
                _check_tensor(value, size, what)
            elif dense:
                raise not_dense(value, what)


def is_dense(tensor: Tensor) -> bool:
    """Whether its values lie in memory, one after the other."""
    return str(tensor.layout) == "torch.strided" and not (tensor.is_meta or tensor.is_quantized)


def not_dense(tensor: Tensor, what: str) -> QgateError:
    kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
    return QgateError(f"{what} is {kind}; save it dense, with its values.")


def _check_tensor(tensor: Tensor, size: int, what: str) -> None:
    held, laid_out = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
    if held > size:
        raise QgateError(f"{what} has {held} bytes, and the file {size}: it is damaged.")
    if laid_out > most_unpacked(held):
        raise QgateError(
            f"{what} repeats {held} bytes to {laid_out}, which is refused above "
            f"{MOST_BYTES >> 20} MB and {MOST_TIMES} times. Save it with .contiguous()."
        )
