"""Samples of a dump: the tokens that went into its embedding, and the logits that came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from qgate.dumps import Dump, Record
from qgate.engines.scored import EngineRun, LogitRows, ScoredSample, scored
from qgate.errors import QgateError

FLOATS = ("float", "bfloat")
Time = tuple[int | None, int | None, int | None, int]


def read_dump_run(spec: str, dump: Dump, head: str = "") -> EngineRun:
    """Read the samples of a dump's forward passes.

    head  the module whose output is the logits; found by its shape where it is not given
    """
    tokens = [record for record in dump.records(operation="forward") if _is_tokens(record)]
    if not tokens:
        raise QgateError(
            f"the dump {spec!r} has no token ids, so its tokens cannot be aligned: collect the "
            "embedding, too, as in sites='embedding|attention|linear'."
        )
    logits = _logits(spec, dump, tokens[0], head)
    samples: list[ScoredSample] = []
    for record in tokens:
        if record.rank == tokens[0].rank and (output := logits.get(_time(record))) is not None:
            samples += _samples(dump, record, output, len(samples))
    if not samples:
        raise QgateError(f"the dump {spec!r} has token ids and logits, but of different calls.")
    return EngineRun(spec, tuple(samples), dump=dump)


def _is_tokens(record: Record) -> bool:
    return (
        record.phase == "pre"
        and record.name == "input"
        and record.dtype.startswith(("int", "uint"))
        and record.tensor is not None
    )


def _time(record: Record) -> Time:
    return record.iteration, record.sample, record.micro_batch, record.call


def _logits(spec: str, dump: Dump, tokens: Record, head: str) -> dict[Time, Record]:
    """Find the records of logits by the time of their call."""
    outputs = [
        record
        for record in dump.records(operation="forward", phase="post", rank=tokens.rank)
        if record.name == "output"
        and record.layer_type != "embedding"
        and record.tensor is not None
        and record.dtype.startswith(FLOATS)
    ]
    if head:
        module = head
    else:
        shaped = [r for r in outputs if r.shape[:-1] == tokens.shape and r.layer is None]
        module = shaped[-1].module if shaped else ""
    chosen = {_time(record): record for record in outputs if module and record.module == module}
    if not chosen:
        listed = ", ".join(dict.fromkeys(r.module for r in outputs[-6:] if r.module)) or "none"
        problem = f"no output of {head!r}" if head else "no output that looks like logits"
        raise QgateError(
            f"the dump {spec!r} has {problem}; its last outputs are those of {listed}. Collect the "
            "head with the linear layers, or name it by --logits MODULE."
        )
    return chosen


def _samples(dump: Dump, tokens: Record, logits: Record, first: int) -> Iterator[ScoredSample]:
    ids = dump.tensor(tokens, check=False)
    rows: Sequence[Tensor] = list(ids.reshape(-1, ids.shape[-1]))

    def reader(index: int) -> LogitRows:
        def read(start: int, stop: int) -> Tensor:
            values = dump.tensor(logits, check=False)
            sample = values.reshape(len(rows), -1, values.shape[-1])[index]
            return sample[start - 1 : stop - 1]

        return read

    for index, row in enumerate(rows):
        yield scored(str(first + index), row.numpy().astype(np.int64), None, reader(index))
