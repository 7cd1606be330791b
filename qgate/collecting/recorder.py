"""From a tensor that flows to a record of the dump, through the thread that writes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from qgate.collecting.account import Account
from qgate.collecting.blocks import blocks_of
from qgate.collecting.calls import Again, Calls, CollectedPlace, ModuleCall
from qgate.collecting.copies import Snapshot, Snapshots
from qgate.collecting.figures import figures_of
from qgate.collecting.graph import executing_node, in_backward
from qgate.collecting.pages import Pages
from qgate.collecting.progress import Progress
from qgate.collecting.queue import WriterThread
from qgate.collecting.settings import Wanted
from qgate.collecting.shares import shares_of
from qgate.dumps.records import Operation, Phase, Record
from qgate.dumps.writing import DumpWriter
from qgate.errors import QgateError


class Recorder:
    """Makes records of one rank. It never raises into the model: what fails is accounted for."""

    def __init__(
        self,
        wanted: Wanted,
        account: Account,
        progress: Progress,
        open_writer: Callable[[], DumpWriter | None],
    ) -> None:
        self.wanted, self.account, self.progress = wanted, account, progress
        self.calls = Calls()
        self.sample = wanted.sample
        self.listening = True
        self._open_writer = open_writer
        self.writer: DumpWriter | None = None
        self._order = itertools.count()
        self._pages = Pages()
        self.thread = WriterThread(wanted.memory, self._lost)
        self.snapshots = Snapshots(
            self.thread.reserve,
            self.thread.release,
            values=wanted.level == "tensors",
            dtype=wanted.kept_dtype,
            most=wanted.most,
            seed=wanted.seed,
            room=wanted.memory,
        )

    def open(self) -> None:
        """Begin the dump, as soon as the rank is known; without a writer nothing is recorded."""
        if self.writer is None and self.listening:
            self.writer = self._open_writer()
            self.listening = self.writer is not None
            if self.writer is not None:
                self._order = itertools.count(self.writer.next_order)

    def begin(self, spot: CollectedPlace) -> ModuleCall | Again | None:
        """A place is called; None where nothing of this call is wanted."""
        if not self.listening:
            return None
        if in_backward():
            return self.calls.again(spot, executing_node()) if self.wanted.backward else None
        progress, most = self.progress, self.wanted.samples
        if most is not None and progress.micro_batch >= most:
            return None
        sample = max(progress.samples, 0) if self.sample is None else self.sample
        progress.records += 1
        return self.calls.begin(spot, progress.iteration, progress.micro_batch, sample)

    def keep(
        self,
        call: ModuleCall,
        operation: Operation,
        phase: Phase,
        name: str,
        tensor: Tensor,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Copy what is kept of a tensor and have it written."""
        self.open()
        writer = self.writer
        if not self.listening or writer is None:
            return
        local = getattr(tensor, "to_local", None)
        more = {**self.wanted.extra, **(extra or {})}
        if local is not None:
            more["whole_shape"] = list(tensor.shape)
            tensor = local()
        snapshot, new = self.snapshots.of(tensor)
        record = Record(
            order=next(self._order),
            layer_type=call.spot.layer_type,
            operation=operation,
            phase=phase,
            component=call.spot.component,
            name=name,
            module=call.spot.module,
            layer=call.spot.layer,
            quant_type=self.wanted.quant_type,
            rank=writer.rank,
            world_size=writer.world_size,
            iteration=call.iteration,
            sample=call.sample,
            micro_batch=call.micro_batch,
            call=call.index,
            shape=snapshot.shape,
            dtype=snapshot.dtype,
            extra=more,
        )
        self.account.kept(operation, name)
        work = functools.partial(self._write_or_tell, writer, record, snapshot)
        self.thread.put(work, snapshot.size if new else 0)

    def next_iteration(self) -> None:
        self.calls = Calls()
        self.snapshots.forget()
        if self.writer is not None:
            self.thread.put(self.writer.flush, 0)

    def close(self, missing: Callable[[int], list[str]], closed: Callable[[], None]) -> None:
        """Have the rest written and the dump closed; `missing` is told how much was not written."""
        self.listening = False

        def last() -> None:
            try:
                if self.writer is not None:
                    self.writer.close(missing(self.thread.undone))
            finally:
                closed()

        self.thread.end(last)

    def _lost(self, _error: BaseException) -> None:
        self.listening = False

    def _write_or_tell(self, writer: DumpWriter, record: Record, snapshot: Snapshot) -> None:
        """One tensor that cannot be stored does not end it all; a disk that is full does."""
        try:
            self._write(writer, record, snapshot)
            self._pages.give_back(writer)
        except QgateError as error:
            if writer.failed is not None:
                raise
            self.account.lost(record.title, error)

    def _write(self, writer: DumpWriter, record: Record, snapshot: Snapshot) -> None:
        known = snapshot.stored
        if known is not None:
            of_values = {k: known.extra[k] for k in _OF_VALUES if k in known.extra}
            writer.add(
                replace(
                    record,
                    shape=known.shape,
                    dtype=known.dtype,
                    stats=known.stats,
                    nonfinite=known.nonfinite,
                    sampled=known.sampled,
                    tensor=known.tensor,
                    counts=known.counts,
                    extra={**of_values, **record.extra},
                )
            )
            return
        snapshot.wait()
        counts = None
        if snapshot.reading is not None:
            found, blocks = figures_of(snapshot.reading), blocks_of(snapshot.reading)
            counts = found.counts
            told = {"counted_as": found.counted_as} if found.counted_as else {}
            record = replace(
                record,
                stats=found.stats
                | ({} if blocks is None else blocks.stats)
                | shares_of(record.quant_type, found, blocks),
                nonfinite=found.nonfinite,
                sampled=found.sampled,
                extra={**record.extra, **told},
            )
        if snapshot.values is not None and snapshot.dtype != str(snapshot.values.dtype)[6:]:
            record = replace(record, extra={**record.extra, "flowed_as": snapshot.dtype})
        snapshot.stored = writer.add(record, snapshot.values, counts)
        snapshot.reading = snapshot.values = None
        if snapshot.buffer is not None:
            self.snapshots.buffers.give(snapshot.buffer)
            snapshot.buffer = None


_OF_VALUES = ("counted_as", "flowed_as")
