"""Statistics of samples in shards: one forward pass per sample, on any engine.

Statistics of shards add up exactly, whatever their size and whoever computes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.activation_stats.layer_stats import LayerRequest, LayerStats, TensorReading
from qgate.activation_stats.networks import LoadedNetwork, NetworkSource, network_of
from qgate.activation_stats.sensitivity import Progress
from qgate.activation_stats.subjects import Sample
from qgate.devices import exact_math
from qgate.engine import PackedValue, Workers, merged
from qgate.errors import QgateError
from qgate.hooks.observing import WEIGHT, ObservedCalls, observe_calls
from qgate.hooks.tensor_cache import TensorCache
from qgate.models.refusals import refusal
from qgate.models.sites import kind_of

SAMPLES = 8
Key = tuple[str, str]
Requests = Mapping[Key, LayerRequest]
Samples = Sequence[Sample]


@dataclass(frozen=True, eq=False)
class ShardStatistics:
    """Statistics by module and role, with the devices and notes of the processes that ran them."""

    layers: dict[Key, LayerStats]
    flowed: ObservedCalls
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: ShardStatistics) -> ShardStatistics:
        mine, theirs = self.flowed, other.flowed
        return ShardStatistics(
            {key: stats + other.layers[key] for key, stats in self.layers.items()},
            replace(mine, calls=mine.calls + theirs.calls, empty=mine.empty + theirs.empty),
            tuple(dict.fromkeys(self.devices + other.devices)),
            tuple(dict.fromkeys(self.notes + other.notes)),
        )


def shard_statistics(
    shard: tuple[int, Samples | PackedValue[Samples]], shared: tuple[NetworkSource, Requests]
) -> ShardStatistics:
    """Run consecutive samples, the first of which has this number, one forward pass each."""
    (start, packed), (source, requests) = shard, shared
    network = network_of(source)
    reader = _SampleReader(network, requests)
    roles: defaultdict[str, list[str]] = defaultdict(list)
    for module, role in requests:
        roles[module].append(role)
    with observe_calls(network.root, roles, reader.read) as flowed:
        for at, sample in enumerate(
            packed.value() if isinstance(packed, PackedValue) else packed, start
        ):
            network.step(at)
            reader.start(at, sample)
            try:
                with torch.no_grad(), exact_math():
                    sample.run(network.root, network.device)
            except QgateError:
                raise
            except Exception as error:
                arguments = (*sample.args, dict(sample.kwargs))
                raise refusal(network.name, f"sample {at}", arguments, error) from error
    for stats in reader.layers.values():
        stats.finish()
    return ShardStatistics(reader.layers, flowed, (str(network.device),), tuple(network.notes))


class _SampleReader:
    """Reads a tensor that several modules get once, and updates the statistics of each."""

    def __init__(self, network: LoadedNetwork, requests: Requests) -> None:
        self.layers = {key: LayerStats(*key, request) for key, request in requests.items()}
        kinds = {name: kind_of(network.root.get_submodule(name)) for name, _ in requests}
        self._axes = {name: 1 if kind == "conv" else -1 for name, kind in kinds.items()}

    def start(self, at: int, sample: Sample) -> None:
        self._at = at
        self._ids = None if sample.ids is None else sample.ids.cpu().numpy()
        self._readings: TensorCache[dict[object, TensorReading]] = TensorCache(size=4)

    def read(self, module: str, role: str, tensor: Tensor) -> None:
        stats, axis = self.layers[module, role], self._axes[module]
        readings, _ = self._readings.get(tensor, lambda _: {})
        key = (axis, stats.counted_as)
        reading = readings.get(key) or readings.get((axis, None))
        if reading is None or stats.counted_as not in (None, reading.counted_as):
            reading = readings[key] = TensorReading.of(tensor, stats.counted_as, axis)
            readings[axis, reading.counted_as] = reading
        whole = self._ids is not None and len(self._ids) == len(reading.table)
        stats.update(reading, self._at, self._ids if whole else None)


def gather_statistics(
    samples: Samples,
    requests: Requests,
    source: NetworkSource,
    workers: Workers,
    progress: Progress | None = None,
) -> ShardStatistics:
    """Gather statistics of all samples; a shard that is lost for good fails the run, because
    statistics of the others would be another result."""
    flowing_requests = {key: request for key, request in requests.items() if key[1] != WEIGHT}
    count = len(samples)
    size = count if workers.is_here else SAMPLES
    step = progress or (lambda _what, _done, _of: None)
    if isinstance(source, LoadedNetwork):
        source.step = lambda at: step("samples", at, count)
    shards = _shards(samples if flowing_requests else (), size)
    outcome = merged(
        shard_statistics,
        ShardStatistics.__add__,
        shards
        if isinstance(source, LoadedNetwork)
        else ((at, PackedValue(few)) for at, few in shards),
        workers,
        shared=(source, flowing_requests),
        step=lambda done: step("samples", min(done * size, count), count),
    )
    for at, failure in outcome.failed.items():
        raise QgateError(
            f"samples {at * size} to {min((at + 1) * size, count) - 1} are missing: "
            f"{failure.reason}. Statistics of the others would be another result."
        )
    if outcome.result is None:
        device = (str(source.device),) if isinstance(source, LoadedNetwork) else ()
        return ShardStatistics({}, ObservedCalls(()), device)
    outcome.result.flowed.check()
    return outcome.result


def _shards(samples: Samples, size: int) -> Iterator[tuple[int, Samples]]:
    for start in range(0, len(samples), size):
        yield start, samples[start : start + size]
