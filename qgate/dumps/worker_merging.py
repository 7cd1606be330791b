"""Dumps put together by as many workers as there are, a rank at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from qgate.dumps import MergedDump, merge_dumps
from qgate.dumps.merging import RankPart
from qgate.engine import Workers, merged
from qgate.errors import QgateError
from qgate.storage import places


def merge_on(
    workers: Workers | int,
    folders: Sequence[places.Place | str],
    output: places.Place | str,
    step: Callable[[int, int], None] = lambda _done, _total: None,
) -> MergedDump:
    """`step` is told how many ranks are done, of how many. A rank that is lost is an error."""

    def each(function: Callable[[RankPart], MergedDump], parts: Sequence[RankPart]) -> MergedDump:
        found = merged(
            function, operator.add, parts, workers, step=lambda done: step(done, len(parts))
        )
        if found.failed:
            place, failure = next(iter(found.failed.items()))
            more = f", nor were {len(found.failed) - 1} others" if len(found.failed) > 1 else ""
            raise QgateError(
                f"rank {parts[place].rank} was not put together: {failure.reason}{more}. Nothing "
                f"was written to {str(output)!r}."
            )
        return found.result or MergedDump()

    return merge_dumps(folders, output, each)
