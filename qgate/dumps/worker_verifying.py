"""Every tensor of a dump proved by its hash, by as many workers as there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from qgate.dumps.choosing import opened
from qgate.dumps.verifying import RankLook, damage_in, each_once, look_at
from qgate.engine import Failure, Workers, outcomes
from qgate.storage import places

Step = Callable[[int, int], None]


@dataclass(frozen=True)
class _Rank:
    folder: places.Place
    rank: int


@dataclass(frozen=True)
class _Part:
    """Neighboring records of a rank."""

    folder: places.Place
    rank: int
    start: int
    stop: int


@dataclass
class Proof:
    """What was proved of a dump. Records stay with the workers; this holds a few lines per rank.

    hashed   tensors and counts that have a hash
    """

    folder: places.Place
    workers: Workers | int = 1
    looks: list[RankLook] = field(default_factory=list)

    @property
    def records(self) -> int:
        return sum(look.state.records for look in self.looks)

    @property
    def hashed(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for look in self.looks:
            found.update(look.hashed)
        return {what: found[what] for what in ("tensors", "counts")}

    def problems(self, step: Step = lambda _done, _total: None) -> Iterator[str]:
        """What is damaged, each once, in the order of ranks and records; `step` counts records.

        A part whose process ended is a problem too: nothing was proved of it.
        """
        return each_once(self._problems(step))

    def notes(self) -> list[str]:
        """What a reader should know of a dump that was proved, beside its problems."""
        dump = opened(self.folder)
        said = dump.notes([look.state for look in self.looks])
        bad = [*dump.damaged, *(text for look in self.looks for text in look.state.damaged)]
        left = [name for look in self.looks for name in look.unnamed]
        known = [note for note in said if not any(text in note for text in bad)]
        return [*known, *(f"{name}: no record names it" for name in left)]

    def _problems(self, step: Step) -> Iterator[str]:
        opened.cache_clear()  # what was opened before may have been written anew
        self.looks.clear()
        dump = opened(self.folder)
        yield from (f"{self.folder}: {text}" for text in dump.damaged)
        ranks = [_Rank(self.folder, rank) for rank in dump.folders]
        for each, look in zip(ranks, outcomes(_look, ranks, self.workers), strict=True):
            if isinstance(look, Failure):
                yield f"{self.folder}: rank {each.rank} was not proved: {look.reason}"
            elif look is not None:
                self.looks.append(look)
                yield from look.damaged
        parts = [
            _Part(self.folder, look.state.rank, stop - count, stop)
            for look in self.looks
            for count, stop in zip(look.parts, accumulate(look.parts), strict=True)
        ]
        done, total = 0, self.records
        for part, told in zip(parts, outcomes(_prove, parts, self.workers), strict=True):
            if isinstance(told, Failure):
                which = f"records {part.start} to {part.stop - 1} of rank {part.rank}"
                yield f"{self.folder}: {which} were not proved: {told.reason}"
            else:
                yield from told
            done += part.stop - part.start
            step(done, total)


def _look(part: _Rank) -> RankLook | None:
    """None of a rank that an earlier run has left."""
    dump = opened(part.folder)
    return look_at(dump, part.rank) if dump.has(part.rank) else None


def _prove(part: _Part) -> list[str]:
    return list(damage_in(opened(part.folder), part.rank, part.start, part.stop))
