"""What a drawing left out, and why: tensors, formats, pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qgate.drawing.page import SECTIONS
from qgate.summaries.reading import format_label
from qgate.summaries.record import DumpAnalysis
from qgate.text import counted, one_line

if TYPE_CHECKING:
    from qgate.storage.places import Place


def skipped(analysis: DumpAnalysis, written: Sequence[Place], *, plots: bool) -> Iterator[str]:
    """One line each: what the analysis noted, formats that tensors have no figures of, and topics
    without pictures."""
    for note in analysis["notes"]:
        if "left out" in note or "were looked at" in note or "a share of the elements" in note:
            yield f"tensors   {one_line(note)}"
    yield from _formats(analysis)
    if not plots:
        yield "pictures  all: --no-plots"
        return
    drawn = {path.parent.name for path in written if path.suffix == ".png"}
    for topic, (_, why) in SECTIONS.items():
        if topic not in drawn:
            yield f"pictures  {topic}: {why}"


def _formats(analysis: DumpAnalysis) -> Iterator[str]:
    """Formats that say nothing of some tensors: blocks need values, shares need counts."""
    known = dict.fromkeys(analysis["formats"], 0)
    total = without = 0
    for tensor in analysis["tensors"]:
        total += 1
        without += tensor["source"] != "values"
        for name in tensor.get("formats") or {}:
            known[name] = known.get(name, 0) + 1
    for name, count in known.items():
        if count < total:
            why = "" if not without else f": {counted(without, 'tensor')} kept without values"
            yield (
                f"formats   {format_label(analysis, name)} in {total - count} of "
                f"{counted(total, 'tensor')}{why}"
            )
