"""Sweep every tensor of a file as a request says, and yield the records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qgate.dumps import StoredTensor, floats_in, read_tensors
from qgate.errors import QgateError
from qgate.formats import Format
from qgate.records.plain_data import plain
from qgate.stats import BlockCounts, Counts, Values, all_bf16, block_counts, counts
from qgate.stats.bits import VIA
from qgate.sweeps.choices import format_choices
from qgate.sweeps.compute import sweep
from qgate.sweeps.files import draw_pictures
from qgate.sweeps.formats import has_mx, with_shares
from qgate.sweeps.record import SweepRecord
from qgate.sweeps.settings import SweepSettings
from qgate.sweeps.shares import is_trained, trained_on

# Limits of the part of a file that one worker sweeps at once: its results wait to be written.
_PART_BYTES, _PART_TENSORS = 2**28, 16
_CAST = "--cast bf16 sweeps integers, rounded to bf16 first."


@dataclass(frozen=True)
class Swept:
    """Records of one tensor, or an error, and the pictures of each record by file name."""

    name: str
    source: str
    records: tuple[SweepRecord, ...] = ()
    error: str | None = None
    pictures: Sequence[dict[str, bytes]] = ()
    undrawn: str = ""
    """The reason why some pictures are missing."""
    lost: bool = False
    """True for a part of a file that was lost with its process."""

    @property
    def failed(self) -> str | None:
        """The reason this tensor does not pass, if it does not."""
        return self.error or next((r["failed"] for r in self.records if r["failed"]), None)


@dataclass(frozen=True)
class FilePart:
    """Some tensors of a file, by name; no names stand for all."""

    spec: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = f": {self.names[0]} … {self.names[-1]}" if len(self.names) > 1 else ""
        return f"{self.spec}:{self.names[0]}" if len(self.names) == 1 else f"{self.spec}{named}"


def parts_of(spec: str) -> list[FilePart]:
    """Group neighboring tensors of a file into parts that are worth a worker."""
    parts: list[list[str]] = []
    room = 0
    for name, size in floats_in(spec).items():
        if not parts or size > room or len(parts[-1]) == _PART_TENSORS:
            parts.append([])
            room = _PART_BYTES
        parts[-1].append(name)
        room -= size
    return [FilePart(spec, tuple(names)) for names in parts] if len(parts) > 1 else [FilePart(spec)]


def sweep_part(part: FilePart, request: SweepSettings) -> Iterator[Swept]:
    """Sweep and draw tensor by tensor, so that one process holds no more than one."""
    for spec in [f"{part.spec}:{name}" for name in part.names] or [part.spec]:
        for swept in sweep_file(spec, request):
            if request.plots:
                pictures, undrawn = draw_pictures(swept.records)
                swept = replace(swept, pictures=pictures, undrawn=undrawn)
            yield swept


def sweep_whole_part(part: FilePart, request: SweepSettings) -> list[Swept]:
    """Sweep a part in a worker, which sends all its results at once."""
    return list(sweep_part(part, request))


def sweep_file(spec: str, request: SweepSettings) -> Iterator[Swept]:
    """Yield one `Swept` per tensor of the file; a bad file or tensor is one with an error.

    Integers among other tensors, such as positions or step counts, are left out; a file of integers
    alone is swept if the request has a cast.
    """
    swept = 0
    passed_over: list[str] = []
    try:
        for with_integers in (False, True) if request.via else (False,):
            if swept:
                break
            for stored in read_tensors(spec):
                among_others = stored.key is not None and not spec.endswith(f":{stored.key}")
                if among_others and not with_integers and not stored.tensor.is_floating_point():
                    passed_over.append(f"{stored.key}: {stored.tensor.dtype}")
                    continue
                swept += 1
                yield _sweep_stored(stored, request)
    except (QgateError, OSError) as error:
        yield Swept(spec, spec, error=str(error))
        return
    if not swept:
        tensors = f"; it has {', '.join(passed_over)}" if passed_over else ""
        why = f"{spec!r} holds no floating point tensor{tensors}. {_CAST}"
        yield Swept(spec, spec, error=why)


def _sweep_stored(stored: StoredTensor, request: SweepSettings) -> Swept:
    source = str(stored.path) if stored.key is None else f"{stored.path}:{stored.key}"
    records: list[SweepRecord] = []
    text = None
    try:
        for record in _records(stored, source, request):
            records.append(record)
    except QgateError as error:
        text = str(error)
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        text = f"{stored.name}: {type(error).__name__}: {first}"
    return Swept(stored.name, source, tuple(records), error=text)


def _records(stored: StoredTensor, source: str, request: SweepSettings) -> Iterator[SweepRecord]:
    tensor = stored.tensor.detach()
    if tensor.layout != torch.strided or tensor.is_complex():
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise QgateError(f"{stored.name} is a {kind} tensor; a sweep needs floating point numbers.")
    if not tensor.is_floating_point() and not request.via:
        raise QgateError(
            f"{stored.name} is a {tensor.dtype} tensor; a sweep needs floating point numbers. "
            f"{_CAST}"
        )
    if not tensor.numel():
        raise QgateError(f"{stored.name} is empty: there is nothing to sweep.")
    # Integers of up to 53 bits are float64 numbers: the cast alone rounds them.
    numbers = tensor if tensor.is_floating_point() else tensor.to(torch.float64)
    swept_values = _SweptValues(numbers, request)
    about = {
        "path": str(stored.path),
        "shape": list(tensor.shape),
        "sha256": stored.sha256(),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "rounded_to": swept_values.rounded,
        "source": source,
    }
    if swept_values.rounded is not None:
        infinite = _infinite(swept_values.values)
        if infinite > _infinite(counts(numbers)):
            raise QgateError(
                f"rounding {stored.name} to {swept_values.rounded} makes {infinite} Inf of finite "
                "numbers; sweep it as it is, without --cast."
            )
    records: list[SweepRecord] = []
    for name, granularity in itertools.product(request.formats, request.granularities):
        block = granularity == "block"
        fmt: str | Format = name
        if is_trained(name):
            fmt = trained_on(swept_values.numbers, name, request.axis)
        is_shared = with_shares(fmt) is not None
        if is_shared and granularity != request.granularities[0]:
            continue  # a codebook has scales of blocks alone
        max_exp, min_exp = request.max_exp, request.min_exp
        if block and not is_shared and len(request.granularities) > 1:
            if not has_mx(fmt):
                continue
            # Exponents of a tensor are no offsets.
            max_exp = min_exp = None
        summary = swept_values.blocks if block and not is_shared else None
        swept = sweep(
            swept_values.numbers if is_shared else summary or swept_values.values,
            fmt,
            levels=request.levels,
            max_exp=max_exp,
            min_exp=min_exp,
            granularity="block" if block else "tensor",
            alignment="documented" if request.alignment == "documented" else "exact",
            scale_bits=request.scale_bits,
            block=request.block,
            axis=request.axis,
            name=stored.name,
        ).to_dict()
        swept["tensor"] |= about
        swept["format"]["asked"] = name
        records.append(swept)
        yield swept
    if request.compares and records and not records[0]["failed"]:
        records[0]["choices"] = plain(
            format_choices(
                numbers,
                swept_values.values,
                lambda: swept_values.blocks,
                records,
                scale_bits=request.scale_bits,
                block=request.block,
                axis=request.axis,
            )
        )


class _SweptValues:
    """Counts of a tensor, made once at the first use, for any number of formats."""

    def __init__(self, tensor: Tensor, request: SweepSettings) -> None:
        self.tensor, self.request = tensor, request
        is_wide = tensor.dtype in (torch.float32, torch.float64)
        self.rounded: Any = request.via if is_wide else None
        self._via: Any = self.rounded
        if self._via is None and tensor.dtype not in (torch.bfloat16, torch.float16):
            # Exact: every float8 number is a bf16 number, and so are those of many float32 files.
            self._via = "bf16" if not is_wide or all_bf16(tensor) else None

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers themselves, rounded as the request says."""
        return self.tensor if self.rounded is None else self.tensor.to(VIA[self.rounded])

    @cached_property
    def values(self) -> Counts | Values:
        is_small = self.tensor.dtype.itemsize == 1
        return counts(self.tensor, via=None if is_small else self._via)

    @cached_property
    def blocks(self) -> BlockCounts | Counts | Values:
        if self._via is None and self.tensor.dtype not in (torch.bfloat16, torch.float16):
            return self.values
        request = self.request
        return block_counts(self.tensor, block=request.block, axis=request.axis, via=self._via)


def _infinite(summary: Counts | Values) -> int:
    return summary.posinf + summary.neginf
