"""Judge the weights of a checkpoint batch by batch, by any engine, and continue after a kill.

A batch is some weights of one shard. The journal has the judgements of finished batches under the
stamps of the files that these were read from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from qgate._version import __version__
from qgate.checkpoints.methods.surroundings import FilesByLayer
from qgate.checkpoints.opening import check_unchanged
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.record import CheckpointFinding, WeightRecord
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.checkpoints.weights import Judgement
from qgate.engine import Failure, PackedValue, Workers, map_items
from qgate.engine.journal import Journal
from qgate.errors import QgateError

BATCH = 16 << 20
"""Bytes of the child's weights that make a batch, unless one weight alone has more."""
Step = Callable[[int, int], None]


class WeightPairs(Protocol):
    """A checkpoint beside its parent, which judges its weights one by one.

    Another process gets it pickled, and opens the files itself.
    """

    @property
    def child(self) -> Checkpoint: ...
    @property
    def parent(self) -> Checkpoint | None: ...
    @property
    def recipe(self) -> object: ...
    @property
    def weights(self) -> list[StoredWeight]: ...
    @property
    def matches(self) -> dict[str, ParentMatch]: ...
    def judge(self, weight: StoredWeight) -> Judgement: ...


@dataclass(frozen=True)
class WeightBatch:
    """Consecutive weights of one shard, by their numbers."""

    start: int
    stop: int


def judgements(
    pair: WeightPairs, workers: Workers, unfinished: Path | None = None, step: Step | None = None
) -> Iterator[Judgement]:
    """Yield the judgement of each weight, in their order.

    unfinished   the folder of the journal, without which a killed run begins anew
    step         called with the number of weights done, and of all
    """
    if unfinished is None:
        yield from _judged(pair, list(batches(pair.weights)), workers, step)
        check_unchanged(pair.child, pair.parent)
        return
    identity = [__version__, pair.child.label, pair.parent and pair.parent.label, pair.recipe]
    try:
        journal = Journal(unfinished, identity)
    except OSError as error:
        raise QgateError(
            f"results cannot be written to {str(unfinished)!r}: "
            f"{error.strerror or error}. Name another folder with --output-dir."
        ) from None
    with journal:
        yield from _continued(pair, workers, journal, step)
        check_unchanged(pair.child, pair.parent)
        journal.finish()


def batches(weights: Sequence[StoredWeight]) -> Iterator[WeightBatch]:
    """Split weights into batches of one shard each."""
    start, size = 0, 0
    for number, weight in enumerate(weights):
        is_other = number > start and _shard(weight) != _shard(weights[start])
        if number > start and (is_other or size + weight.size > BATCH):
            yield WeightBatch(start, number)
            start, size = number, 0
        size += weight.size
    if weights:
        yield WeightBatch(start, len(weights))


def _shard(weight: StoredWeight) -> str:
    return next(iter(weight.parts.values())).file


def _continued(
    pair: WeightPairs, workers: Workers, journal: Journal, step: Step | None
) -> Iterator[Judgement]:
    """Take finished batches from the journal, and judge and record the others."""
    listed = list(batches(pair.weights))
    own = FilesByLayer(pair.child)
    parents = None if pair.parent is None else FilesByLayer(pair.parent)
    keys = {batch: _key(pair, batch, own, parents) for batch in listed}
    finished = {batch: journal.result(keys[batch]) for batch in listed if keys[batch] in journal}
    remaining = _judged(pair, [batch for batch in listed if batch not in finished], workers, step)
    for batch in listed:
        if batch in finished:
            yield from [_from_plain(entry) for entry in finished[batch]]
            continue
        judged = [next(remaining) for _ in range(batch.start, batch.stop)]
        journal.record(keys[batch], [_to_plain(judgement) for judgement in judged])
        yield from judged


def _judged(
    pair: WeightPairs, listed: Sequence[WeightBatch], workers: Workers, step: Step | None
) -> Iterator[Judgement]:
    """Judge the weights of batches: here one by one, or batches by other processes."""
    count = len(pair.weights)
    step = step or (lambda _done, _of: None)
    if workers.is_here:
        for batch in listed:
            for number in range(batch.start, batch.stop):
                step(number, count)
                yield pair.judge(pair.weights[number])
        return
    results = map_items(judge_batch, listed, workers, shared=PackedValue(pair))
    for batch, judged in zip(listed, results, strict=True):
        if isinstance(judged, Failure):
            names = [pair.weights[number].name for number in (batch.start, batch.stop - 1)]
            raise QgateError(
                f"weights {' to '.join(map(repr, dict.fromkeys(names)))} are not compared: "
                f"{judged.reason}. Use fewer --jobs, or run the command again."
            )
        step(batch.stop, count)
        yield from judged


def judge_batch(batch: WeightBatch, packed: PackedValue[WeightPairs]) -> list[Judgement]:
    """Judge the weights of one batch."""
    pair = packed.value()
    return [pair.judge(pair.weights[number]) for number in range(batch.start, batch.stop)]


def _key(
    pair: WeightPairs, batch: WeightBatch, own: FilesByLayer, parents: FilesByLayer | None
) -> str:
    """Return what tells a batch: its weights, and the stamps of the files they are judged by."""
    files: dict[str, object] = {}
    names = []
    for side, checkpoint in (("child", pair.child), ("parent", pair.parent)):
        if checkpoint is not None and checkpoint.has_graph:
            # The graph tells what is in the other files.
            files |= {f"{side} {file}": stamp for file, stamp in checkpoint.stamps.items()}
    for weight in pair.weights[batch.start : batch.stop]:
        names.append((weight.name, pair.matches.get(weight.name)))
        listed = {entry.file for entry in weight.parts.values()}
        if pair.parent is not None:
            listed |= own.around(weight.name)
        files |= {f"child {file}": pair.child.stamps.get(file) for file in listed}
        match = pair.matches.get(weight.name)
        if match is None or pair.parent is None or parents is None:
            continue
        listed = {pair.parent.entries[name].file for name in match.names}
        listed |= parents.around(match.names[0])
        files |= {f"parent {file}": pair.parent.stamps.get(file) for file in listed}
    return repr((names, sorted(files.items(), key=lambda item: item[0])))


def _to_plain(judgement: Judgement) -> list[Any]:
    weight, findings = judgement
    return [asdict(weight), [asdict(finding) for finding in findings]]


def _from_plain(entry: list[Any]) -> Judgement:
    weight, findings = entry
    return msgspec.convert(weight, WeightRecord), msgspec.convert(findings, list[CheckpointFinding])
