"""Read what `qgate.probe` wrote, and the weights of a trainer at the same rows and columns."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NotRequired, TypedDict

import torch
from safetensors import SafetensorError
from torch import Tensor

from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.stacked_experts import list_experts
from qgate.errors import QgateError
from qgate.probe import COLUMNS, EXPERT_PARTS, ROWS, VERSION, row_digests, sampled_places
from qgate.records import validate
from qgate.storage.access import folder_of
from qgate.storage.folders import Folder
from qgate.storage.locations import user_location
from qgate.storage.tensor_reading import open_safetensors

_LISTED = tuple(f"experts.0.{part}.weight" for part in EXPERT_PARTS)
_FILE = re.compile(r"(probe|outputs)-rank([0-9]{5,})\.safetensors")
_KEY = re.compile(r"(.+)@([0-9]+),([0-9]+)")


@dataclass(frozen=True)
class ProbeShard:
    """The sampled part of a weight on one rank.

    start, size    first row and column in the whole weight, and how many there are on the rank
    shape          of the whole weight
    rows, columns  that were sampled, in the whole weight
    values         of these, or codes of a format with their scales
    digests        of each row on the rank; None for codes
    """

    name: str
    rank: int
    start: tuple[int, int]
    size: tuple[int, int]
    shape: tuple[int, int]
    rows: Tensor
    columns: Tensor
    values: Tensor
    scales: Tensor | None = None
    format: str = ""
    digests: Tensor | None = None

    @property
    def decoded(self) -> Tensor:
        """Return the values that the codes stand for, in float64."""
        values = self.values.double()
        return values if self.scales is None else values * self.scales.double()


@dataclass
class Probe:
    """A folder of `qgate.probe`: weights and KV scales of all ranks, and outputs of the first one.

    modules  with outputs, in the order of execution
    step     of the trainer, where the writer knew it
    unread   weights that the probe could not read, with the reasons
    """

    label: str
    shards: list[ProbeShard] = field(default_factory=list)
    kv_scales: dict[str, list[float]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    step: int | None = None
    seed: int = 0


def is_probe(folder: Folder) -> bool:
    """Tell if a folder holds files of `qgate.probe`."""
    return folder.kind() == "folder" and any(map(_FILE.fullmatch, folder.names()))


def read_probe(spec: str) -> Probe:
    """Read the files of all ranks in a folder."""
    home = folder_of(user_location(spec))
    probe = Probe(spec)
    steps: dict[int | None, str] = {}
    for name in sorted(home.names()):
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        try:
            with open_safetensors(home.at(name)) as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            about = _about(tensors.pop("about"))
            if match[1] == "outputs":
                if not probe.outputs:
                    probe.outputs, probe.modules = tensors, about["modules"]
                continue
            probe.shards += _shards(about, tensors)
            probe.unread |= about["unread"]
            for key in tensors:
                if key.startswith("kv/"):
                    probe.kv_scales.setdefault(key[3:], []).extend(tensors[key].tolist())
            steps[about["step"]] = name
            probe.seed = about["seed"]
        except (KeyError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise QgateError(
                f"{str(home.at(name))!r} is no file of qgate.probe ({error}): write it again."
            ) from None
    if len(steps) > 1:
        listed = " and ".join(f"{step} in {name!r}" for step, name in steps.items())
        raise QgateError(f"{spec!r} holds ranks of several steps, {listed}: probe all ranks again.")
    probe.step = next(iter(steps), None)
    return probe


class _About(TypedDict):
    """Description of a file of a probe; one of outputs has no step and no weights."""

    qgate: Literal["probe"]
    version: int
    rank: int
    seed: int
    step: NotRequired[int | None]
    modules: NotRequired[list[str]]
    shapes: NotRequired[dict[str, tuple[int, int, int, int]]]
    unread: NotRequired[dict[str, str]]


def _about(note: Tensor) -> _About:
    about: _About = json.loads(bytes(note.tolist()))
    validate(about, _About)
    if about["version"] != VERSION:
        raise ValueError(f"it is of version {about['version']}, not {VERSION}")
    return about


def _shards(about: _About, tensors: Mapping[str, Tensor]) -> Iterator[ProbeShard]:
    for key, (height, width, rows, columns) in about["shapes"].items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"{key!r} names no weight")
        parts = {
            part: tensors.get(f"{key}/{part}")
            for part in ("rows", "columns", "values", "codes", "scales", "format", "digests")
        }
        values = parts["codes"] if parts["values"] is None else parts["values"]
        row_numbers, column_numbers = parts["rows"], parts["columns"]
        if values is None or row_numbers is None or column_numbers is None:
            raise ValueError(f"{key!r} has no values")
        if values.shape != (len(row_numbers), len(column_numbers)):
            raise ValueError(f"values of {key!r} do not fit its rows and columns")
        scales, digests = parts["scales"], parts["digests"]
        if scales is not None and scales.shape != values.shape:
            raise ValueError(f"scales of {key!r} do not fit its codes")
        if digests is not None and len(digests) != rows:
            raise ValueError(f"digests of {key!r} do not fit its rows")
        for numbers, size in ((row_numbers, height), (column_numbers, width)):
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < size:
                raise ValueError(f"{key!r} was sampled outside of its shape")
        kind = parts["format"]
        yield ProbeShard(
            match[1], about["rank"], (int(match[2]), int(match[3])), (rows, columns),
            (height, width), row_numbers, column_numbers, values, scales,
            "" if kind is None else bytes(kind.tolist()).decode(), digests,
        )  # fmt: skip


# The trainer -------------------------------------------------------------------------------------


class WeightSource(ABC):
    """Weights of a trainer at one step, sampled as a probe samples them with a seed.

    shapes  of all weights by name, with a column for vectors
    """

    label: str
    seed: int
    step: int | None = None

    def __init__(self) -> None:
        self._grids: dict[str, Tensor] = {}

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, int]]: ...

    @abstractmethod
    def _sample(self, name: str, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the values at these rows and columns of a weight."""

    @abstractmethod
    def digests(self, name: str) -> Tensor | None:
        """Return the digest of each row of a weight; None where not all of it is known."""

    def values(self, name: str, rows: Tensor, columns: Tensor) -> Tensor:
        """Return some of the sampled values of a weight."""
        height, width = self.shapes[name]
        all_rows = sampled_places(height, ROWS, self.seed)
        all_columns = sampled_places(width, COLUMNS, self.seed)
        if name not in self._grids:
            self._grids[name] = self._sample(name, all_rows, all_columns)
        is_row, is_column = torch.isin(all_rows, rows), torch.isin(all_columns, columns)
        values = self._grids[name][is_row][:, is_column]
        if values.shape != (len(rows), len(columns)) or values.isnan().any():
            raise QgateError(
                f"{self.label!r} lacks rows or columns of {name} that were sampled in the engine: "
                "probe all ranks of the trainer, and both programs with the same seed."
            )
        return values


class CheckpointSource(WeightSource):
    """Weights of a checkpoint on disk, one of them in memory at a time."""

    def __init__(self, spec: str, seed: int) -> None:
        super().__init__()
        self.label, self.seed = spec, seed
        # Stacked experts are listed as an engine's probe has them.
        self._checkpoint = list_experts(open_checkpoint(spec), _LISTED)
        self._last: tuple[str, Tensor] = ("", torch.zeros(0))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        entries = self._checkpoint.entries.items()
        sizes = {
            name: (*(n for at, n in enumerate(entry.shape) if (at, n) != (1, 1)), 1)
            for name, entry in entries
            if len(entry.shape) in (1, 2) or (len(entry.shape) == 3 and entry.shape[1] == 1)
        }
        return {name: (size[0], size[1]) for name, size in sizes.items()}

    def _whole(self, name: str) -> Tensor:
        if self._last[0] != name:
            self._last = name, self._checkpoint.read(name).reshape(self.shapes[name])
        return self._last[1]

    def _sample(self, name: str, rows: Tensor, columns: Tensor) -> Tensor:
        return self._whole(name)[rows[:, None], columns]

    def digests(self, name: str) -> Tensor | None:
        return row_digests(self._whole(name))


class ProbeSource(WeightSource):
    """Weights that a probe sampled in a trainer, put together from its ranks."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.label, self.seed, self.step = probe.label, probe.seed, probe.step
        self.probe = probe
        self._shards: dict[str, dict[tuple[int, int], ProbeShard]] = {}
        for shard in probe.shards:
            self._shards.setdefault(shard.name, {}).setdefault(shard.start, shard)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        return {shard.name: shard.shape for shard in self.probe.shards}

    def _sample(self, name: str, rows: Tensor, columns: Tensor) -> Tensor:
        grid = torch.full((len(rows), len(columns)), torch.nan, dtype=torch.float64)
        dtypes = set()
        for shard in self._shards[name].values():
            at = torch.searchsorted(rows, shard.rows), torch.searchsorted(columns, shard.columns)
            grid[at[0][:, None], at[1]] = shard.decoded
            dtypes.add(torch.float64 if shard.scales is not None else shard.values.dtype)
        return grid.to(dtypes.pop())

    def digests(self, name: str) -> Tensor | None:
        height, width = self.shapes[name]
        total, covered = torch.zeros(height, dtype=torch.int64), torch.zeros(height)
        for shard in self._shards[name].values():
            if shard.digests is None:
                return None
            rows = slice(shard.start[0], shard.start[0] + len(shard.digests))
            total[rows] += shard.digests
            covered[rows] += shard.size[1]
        return total if bool((covered == width).all()) else None


def open_source(spec: str, seed: int) -> WeightSource:
    """Open a trainer's weights: a folder of `qgate.probe`, or a checkpoint, which it samples."""
    home = folder_of(user_location(spec))
    return ProbeSource(read_probe(spec)) if is_probe(home) else CheckpointSource(spec, seed)
