"""Samples in shards: what flows while one of them goes through the model, and all of them together.

Statistics of shards add up exactly, so it makes no difference how large they are or who has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.activation_stats.layer_stats import Ask, LayerStats, TensorReading
from qgate.activation_stats.network_hosts import Host, Where, host_of
from qgate.activation_stats.sensitivity import Progress
from qgate.activation_stats.subjects import Sample
from qgate.capture.flowing import WEIGHT, Flowed, Once, flowing
from qgate.devices import exact_math
from qgate.engine import Workers, merged
from qgate.errors import QgateError
from qgate.models.sites import kind_of

SAMPLES = 8
Key = tuple[str, str]


@dataclass(frozen=True, eq=False)
class SampleShard:
    """Consecutive samples; `start` is the number of the first."""

    start: int
    samples: Sequence[Sample]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of what flowed, by module and role; the devices and notes of those who had the model."""

    layers: dict[Key, LayerStats]
    flowed: Flowed
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Statistics) -> Statistics:
        mine, theirs = self.flowed, other.flowed
        return Statistics(
            {key: stats + other.layers[key] for key, stats in self.layers.items()},
            replace(mine, calls=mine.calls + theirs.calls, empty=mine.empty + theirs.empty),
            tuple(dict.fromkeys(self.devices + other.devices)),
            tuple(dict.fromkeys(self.notes + other.notes)),
        )


@dataclass(frozen=True, eq=False)
class WatchedNetwork:
    """The network, and what is asked of what flows in it."""

    where: Where
    asks: Mapping[Key, Ask]

    def roles(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for module, role in self.asks:
            found.setdefault(module, []).append(role)
        return found


def statistics_of(shard: SampleShard, watch: WatchedNetwork) -> Statistics:
    """One forward pass per sample."""
    host = host_of(watch.where)
    seen = _Seen(host, watch.asks)
    with flowing(host.root, watch.roles(), seen.see) as flowed:
        for at, sample in enumerate(shard.samples, shard.start):
            host.step(at)
            seen.take(at, sample)
            with torch.no_grad(), exact_math():
                _pass(host, sample, at)
            seen.forget()
    for stats in seen.layers.values():
        stats.finish()
    return Statistics(seen.layers, flowed, (str(host.device),), tuple(host.notes))


def together(one: Statistics, other: Statistics) -> Statistics:
    """Both stay as they are, as the engine wants it."""
    return one + other


def _pass(host: Host, sample: Sample, at: int) -> None:
    try:
        sample.run(host.root, host.device)
    except QgateError:
        raise
    except Exception as error:
        raise QgateError(
            f"{host.name} cannot run sample {at}: {type(error).__name__}: {error}"
        ) from error


class _Seen:
    """A tensor that several modules get is read once."""

    def __init__(self, host: Host, asks: Mapping[Key, Ask]) -> None:
        self.layers = {key: LayerStats(*key, ask) for key, ask in asks.items()}
        kinds = {name: kind_of(host.root.get_submodule(name)) for name, _ in asks}
        self._axes = {name: 1 if kind == "conv" else -1 for name, kind in kinds.items()}
        self._once: Once[dict[object, TensorReading]] = Once(lambda _: {})

    def take(self, at: int, sample: Sample) -> None:
        self._at = at
        self._ids = None if sample.ids is None else sample.ids.cpu().numpy()

    def forget(self) -> None:
        self._once.forget()

    def see(self, module: str, role: str, tensor: Tensor) -> None:
        stats, axis = self.layers[module, role], self._axes[module]
        ways = self._once(tensor)
        way = (axis, stats.counted_as)
        reading = ways.get(way) or ways.get((axis, None))
        if reading is None or stats.counted_as not in (None, reading.counted_as):
            reading = ways[way] = TensorReading.of(tensor, stats.counted_as, axis)
            ways[axis, reading.counted_as] = reading
        whole = self._ids is not None and len(self._ids) == len(reading.table)
        stats.update(reading, self._at, None, self._ids if whole else None)


def gathered(
    samples: Sequence[Sample],
    asks: Mapping[Key, Ask],
    where: Where,
    workers: Workers,
    progress: Progress | None = None,
) -> Statistics:
    """Of all samples; a shard whose worker is lost for good fails the run, because statistics of
    the others would be another result."""
    flowing_asks = {key: ask for key, ask in asks.items() if key[1] != WEIGHT}
    watch = WatchedNetwork(where, flowing_asks)
    count = len(samples)
    size = count if workers.is_here else SAMPLES
    told = progress or (lambda _what, _done, _of: None)
    if isinstance(where, Host):
        where.step = lambda at: told("samples", at, count)
    shards = list(_cut(samples if flowing_asks else (), size))
    found = merged(
        statistics_of,
        together,
        shards,
        workers,
        shared=watch,
        step=lambda done: told("samples", min(done * size, count), count),
    )
    for at, failure in found.failed.items():
        first = shards[at].start
        last = first + len(shards[at].samples) - 1
        raise QgateError(
            f"samples {first} to {last} are missing: {failure.reason}. Statistics of the others "
            "would be another result."
        )
    if found.result is None:
        device = (str(where.device),) if isinstance(where, Host) else ()
        return Statistics({}, Flowed(()), device)
    found.result.flowed.check()
    return found.result


def _cut(samples: Sequence[Sample], size: int) -> Iterator[SampleShard]:
    for start in range(0, len(samples), size):
        yield SampleShard(start, samples[start : start + size])
