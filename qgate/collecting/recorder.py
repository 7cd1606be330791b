"""Records of the dump from tensors of the model, through the writer thread."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from qgate.collecting.calls import Account, Calls, CollectedSite, ModuleCall, RepeatedCall
from qgate.collecting.figures import blocks_of, figures_of, shares_of
from qgate.collecting.graph import executing_node, in_backward
from qgate.collecting.progress import Progress
from qgate.collecting.settings import CollectSettings
from qgate.collecting.snapshots import Snapshot, Snapshots, WriterThread
from qgate.dumps.record import Operation, Phase, Record
from qgate.dumps.writing import DumpWriter
from qgate.errors import QgateError

_OF_VALUES = ("counted_as", "flowed_as")


class Recorder:
    """Makes records of one rank; errors go to the account and never into the model."""

    def __init__(
        self,
        settings: CollectSettings,
        account: Account,
        progress: Progress,
        open_writer: Callable[[], DumpWriter | None],
    ) -> None:
        self.settings, self.account, self.progress = settings, account, progress
        self.calls = Calls()
        self.sample, self.quant_type = settings.sample, settings.quant_type
        self.listening = True
        self.writer: DumpWriter | None = None
        self._open_writer = open_writer
        self._order = itertools.count()
        self.thread = WriterThread(settings.memory, self._stop_listening)
        self.snapshots = Snapshots(self.thread, settings)

    def open(self) -> None:
        """Open the dump once the rank is known; without a writer nothing is recorded."""
        if self.writer is None and self.listening:
            self.writer = self._open_writer()
            self.listening = self.writer is not None
            if self.writer is not None:
                self._order = itertools.count(self.writer.next_order)

    def begin(self, site: CollectedSite) -> ModuleCall | RepeatedCall | None:
        """Note a call of a site; None where the settings exclude it."""
        if not self.listening:
            return None
        if in_backward():
            return self.calls.repeat(site, executing_node()) if self.settings.backward else None
        progress, most = self.progress, self.settings.samples
        if progress.is_paused or progress.thread.is_ignored():
            return None
        if most is not None and progress.micro_batch >= most:
            return None
        sample = max(progress.samples, 0) if self.sample is None else self.sample
        progress.records += 1
        return self.calls.begin(
            site, progress.iteration, progress.micro_batch, sample, self.quant_type
        )

    def keep(
        self,
        call: ModuleCall,
        operation: Operation,
        phase: Phase,
        name: str,
        tensor: Tensor,
        extra: dict[str, object] | None = None,
    ) -> None:
        """Take a snapshot of a tensor, to be written as a record."""
        self.open()
        writer = self.writer
        if not self.listening or writer is None:
            return
        to_local = getattr(tensor, "to_local", None)
        record_extra = {**(self.settings.extra or {}), **(extra or {})}
        if to_local is not None:
            record_extra["whole_shape"] = list(tensor.shape)
            tensor = to_local()
        snapshot, is_new = self.snapshots.of(tensor)
        record = Record(
            order=next(self._order),
            layer_type=call.site.layer_type,
            operation=operation,
            phase=phase,
            component=call.site.component,
            name=name,
            module=call.site.module,
            layer=call.site.layer,
            quant_type=call.quant_type,
            rank=writer.rank,
            world_size=writer.world_size,
            iteration=call.iteration,
            sample=call.sample,
            micro_batch=call.micro_batch,
            call=call.index,
            shape=snapshot.shape,
            dtype=snapshot.dtype,
            extra=record_extra,
        )
        self.account.records[f"{operation} {name}"] += 1
        work = functools.partial(self._write, writer, record, snapshot)
        self.thread.put(work, snapshot.size if is_new else 0)

    def next_iteration(self) -> None:
        self.calls = Calls()
        self.snapshots.clear()
        if self.writer is not None:
            self.thread.put(self.writer.flush, 0)

    def close(
        self,
        missing: Callable[[int], list[str]] = lambda _undone: [],
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the remaining records and close the dump.

        `missing` gets the number of records that were not written.
        """
        self.listening = False

        def last() -> None:
            try:
                if self.writer is not None:
                    self.writer.close(missing(self.thread.skipped))
            finally:
                closed()

        self.thread.end(last)

    def _stop_listening(self, _error: BaseException) -> None:
        self.listening = False

    def _write(self, writer: DumpWriter, record: Record, snapshot: Snapshot) -> None:
        """Write a record; one that cannot be stored is reported, a full disk ends the writing."""
        try:
            if snapshot.stored is None:
                self._store(writer, record, snapshot)
            else:
                writer.add(_with_values_of(snapshot.stored, record))
        except QgateError as error:
            if writer.failed is not None:
                raise
            self.account.missing.append(f"{record.title}: {error}")

    def _store(self, writer: DumpWriter, record: Record, snapshot: Snapshot) -> None:
        snapshot.wait()
        counts = None
        extra = dict(record.extra)
        if snapshot.reading is not None:
            figures, blocks = figures_of(snapshot.reading), blocks_of(snapshot.reading)
            counts = figures.counts
            shares = shares_of(record.quant_type, figures, blocks)
            extra |= {"counted_as": figures.counted_as} if figures.counted_as else {}
            record = replace(
                record,
                stats=figures.stats | ({} if blocks is None else blocks.stats) | shares,
                nonfinite=figures.nonfinite,
                sampled=figures.sampled,
            )
        if snapshot.values is not None and snapshot.dtype != str(snapshot.values.dtype)[6:]:
            extra["flowed_as"] = snapshot.dtype
        snapshot.stored = writer.add(replace(record, extra=extra), snapshot.values, counts)
        snapshot.reading = snapshot.values = None
        if snapshot.buffer is not None:
            self.snapshots.buffers.release(snapshot.buffer)
            snapshot.buffer = None


def _with_values_of(stored: Record, record: Record) -> Record:
    """Return a record of the same tensor at another site."""
    of_values = {name: stored.extra[name] for name in _OF_VALUES if name in stored.extra}
    return replace(
        record,
        shape=stored.shape,
        dtype=stored.dtype,
        stats=stored.stats,
        nonfinite=stored.nonfinite,
        sampled=stored.sampled,
        tensor=stored.tensor,
        counts=stored.counts,
        extra={**of_values, **record.extra},
    )
