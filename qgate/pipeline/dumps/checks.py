"""Every tensor of a dump proved by its hash, by as many workers as there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qgate import urls
from qgate.dumps.verifying import damage, damage_in, each_once
from qgate.engine import Failure, Workers, outcomes
from qgate.pipeline.dumps.looks import opened

_RECORDS = 256


@dataclass(frozen=True)
class _Part:
    """Neighboring records of a rank."""

    folder: urls.Place
    rank: int
    start: int
    stop: int


def dump_problems(
    folder: urls.Place,
    workers: Workers | int = 1,
    step: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[str]:
    """What is damaged, each once, in the order of ranks and records; `step` counts records.

    A part whose process ended is a problem too: nothing was proved of it.
    """
    opened.cache_clear()  # what was opened before may have been written anew
    dump = opened(folder)
    counts = {rank: sum(1 for _ in dump.records(rank=rank)) for rank in dump.ranks}
    parts = [
        _Part(folder, rank, start, min(start + _RECORDS, count))
        for rank, count in counts.items()
        for start in range(0, count, _RECORDS)
    ]

    def found() -> Iterator[str]:
        yield from damage(dump)
        done = 0
        for part, told in zip(parts, outcomes(_problems, parts, workers), strict=True):
            if isinstance(told, Failure):
                which = f"records {part.start} to {part.stop - 1} of rank {part.rank}"
                yield f"{folder}: {which} were not proved: {told.reason}"
            else:
                yield from told
            done += part.stop - part.start
            step(done, sum(counts.values()))

    return each_once(found())


def _problems(part: _Part) -> list[str]:
    return list(damage_in(opened(part.folder), part.rank, part.start, part.stop))
