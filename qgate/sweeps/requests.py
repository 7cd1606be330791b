"""Every tensor of a file through the sweeps that were asked for, as records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.dumps import StoredTensor, floats_in, read_tensors
from qgate.errors import QgateError
from qgate.formats import get
from qgate.stats import BlockCounts, Counts, Values, all_bf16, block_counts, counts
from qgate.sweeps.compute import has_mx, sweep

# What one worker sweeps at once of a file: its results wait to be written.
_PART_BYTES, _PART_TENSORS = 2**28, 16
_CAST = "--cast bf16 sweeps integers, rounded to bf16 first."


@dataclass(frozen=True)
class Request:
    """What to sweep; the fields are the options of `qgate sweep`."""

    formats: tuple[str, ...] = ("fp8_e4m3",)
    levels: int = 21
    max_exp: float | None = None
    min_exp: float | None = None
    max_offset: int | None = None
    min_offset: int | None = None
    granularity: tuple[str, ...] = ("tensor", "block")
    alignment: str = "exact"
    scale_bits: int = 8
    block: int = 32
    axis: int = -1
    via: str | None = None


@dataclass(frozen=True)
class Swept:
    """The records of one tensor, or why there are none."""

    name: str
    source: str
    records: tuple[dict[str, Any], ...] = ()
    error: str | None = None

    @property
    def failed(self) -> str | None:
        """The reason this tensor does not pass, if it does not."""
        return self.error or next((r["failed"] for r in self.records if r["failed"]), None)


@dataclass(frozen=True)
class FilePart:
    """Some tensors of a file, by name; none named are all."""

    spec: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = f": {self.names[0]} … {self.names[-1]}" if len(self.names) > 1 else ""
        return f"{self.spec}:{self.names[0]}" if len(self.names) == 1 else f"{self.spec}{named}"


def parts_of(spec: str) -> list[FilePart]:
    """Neighboring tensors of a file that are worth a worker's while; their results stay small."""
    parts: list[list[str]] = []
    room = 0
    for name, size in floats_in(spec).items():
        if not parts or size > room or len(parts[-1]) == _PART_TENSORS:
            parts.append([])
            room = _PART_BYTES
        parts[-1].append(name)
        room -= size
    return [FilePart(spec, tuple(names)) for names in parts] if len(parts) > 1 else [FilePart(spec)]


def sweep_part(part: FilePart, request: Request) -> Iterator[Swept]:
    for spec in [f"{part.spec}:{name}" for name in part.names] or [part.spec]:
        yield from sweep_file(spec, request)


def sweep_file(spec: str, request: Request) -> Iterator[Swept]:
    """One `Swept` per tensor of the file; a bad file or tensor is one with an error.

    Integers among other tensors, such as positions or step counts, are no business of a sweep; a
    file of nothing else is swept where a cast was asked for.
    """
    swept = 0
    passed_over: list[str] = []
    try:
        for stored in read_tensors(spec):
            among_others = stored.key is not None and not spec.endswith(f":{stored.key}")
            if among_others and not stored.tensor.is_floating_point():
                passed_over.append(f"{stored.key}: {stored.tensor.dtype}")
                continue
            swept += 1
            yield _sweep_stored(stored, request)
        if not swept and request.via:
            for stored in read_tensors(spec):
                swept += 1
                yield _sweep_stored(stored, request)
    except (QgateError, OSError) as error:
        yield Swept(spec, spec, error=str(error))
    else:
        if not swept:
            there = f"; it has {', '.join(passed_over)}" if passed_over else ""
            yield Swept(
                spec, spec, error=f"{spec!r} holds no floating point tensor{there}. {_CAST}"
            )


def _sweep_stored(stored: StoredTensor, request: Request) -> Swept:
    source = str(stored.path) if stored.key is None else f"{stored.path}:{stored.key}"
    records: list[dict[str, Any]] = []
    try:
        for record in _records(stored, request):
            records.append(record)
    except QgateError as error:
        return Swept(stored.name, source, tuple(records), error=str(error))
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Swept(stored.name, source, tuple(records), error=f"{stored.name}: {text}")
    return Swept(stored.name, source, tuple(records))


def _records(stored: StoredTensor, request: Request) -> Iterator[dict[str, Any]]:
    tensor = stored.tensor.detach()
    if tensor.layout != torch.strided or tensor.is_complex():
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise QgateError(f"{stored.name} is a {kind} tensor; a sweep needs floating point numbers.")
    if not tensor.is_floating_point() and not request.via:
        raise QgateError(
            f"{stored.name} is a {tensor.dtype} tensor; a sweep needs floating point numbers. "
            f"{_CAST}"
        )
    about = {
        "path": str(stored.path),
        "shape": list(tensor.shape),
        "sha256": stored.sha256(),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    # Integers of up to 53 bits are float64 numbers: the cast alone rounds them.
    numbers = tensor if tensor.is_floating_point() else tensor.to(torch.float64)
    seen = _Seen(numbers, request)
    if seen.rounded is not None:
        made = _infinite(seen.values())
        if made > _infinite(counts(numbers)):
            raise QgateError(
                f"rounding {stored.name} to {seen.rounded} makes {made} Inf of finite numbers; "
                "sweep it as it is, without --cast."
            )
    for name in request.formats:
        for granularity in request.granularity:
            block = granularity == "block"
            if block and len(request.granularity) > 1 and not has_mx(name):
                continue
            found = sweep(
                seen.blocks() if block else seen.values(),
                name,
                levels=request.levels,
                max_exp=request.max_offset if block else request.max_exp,
                min_exp=request.min_offset if block else request.min_exp,
                granularity="block" if block else "tensor",
                alignment="documented" if request.alignment == "documented" else "exact",
                scale_bits=request.scale_bits,
                block=request.block,
                axis=request.axis,
                name=stored.name,
            ).to_dict()
            found["tensor"] |= about | {"rounded_to": seen.rounded}
            found["format"]["asked"] = get(name).name
            yield found


class _Seen:
    """Counts made once, when first asked for, whatever the number of formats."""

    def __init__(self, tensor: Tensor, request: Request) -> None:
        self.tensor, self.request = tensor, request
        self._blocks: BlockCounts | Tensor | None = None
        self._values: Counts | Values | None = None
        wide = tensor.dtype in (torch.float32, torch.float64)
        self.rounded: Any = request.via if wide else None
        self._via: Any = self.rounded
        if self._via is None and tensor.dtype not in (torch.bfloat16, torch.float16):
            # Exact: every float8 number is a bf16 number, and so are those of many float32 files.
            self._via = "bf16" if not wide or all_bf16(tensor) else None

    def values(self) -> Counts | Values:
        if self._values is None:
            small = self.tensor.dtype.itemsize == 1
            self._values = counts(self.tensor, via=None if small else self._via)
        return self._values

    def blocks(self) -> BlockCounts | Tensor:
        if self._blocks is None:
            tensor, request = self.tensor, self.request
            self._blocks = tensor
            if self._via is not None or tensor.dtype in (torch.bfloat16, torch.float16):
                self._blocks = block_counts(
                    tensor, block=request.block, axis=request.axis, via=self._via
                )
        return self._blocks


def _infinite(summary: Counts | Values) -> int:
    return summary.posinf + summary.neginf
