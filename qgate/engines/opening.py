"""Open the samples of an engine: a dump, a file of logits, or lines of log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from qgate.dumps import Dump
from qgate.engines import logit_files, logprob_lines
from qgate.engines.dump_runs import read_dump_run
from qgate.engines.scored import EngineRun, Pair, align
from qgate.errors import QgateError
from qgate.storage.access import folder_of
from qgate.storage.locations import user_location

READERS: Mapping[tuple[str, ...], Callable[[str], EngineRun]] = {
    logit_files.ENDINGS: logit_files.read_logit_file,
    logprob_lines.ENDINGS: logprob_lines.read_logprob_lines,
}


@dataclass(frozen=True)
class EnginePair:
    """Two engines that scored the same tokens, with their samples side by side."""

    actual: EngineRun
    reference: EngineRun
    samples: list[Pair]


def open_pair(actual: str, reference: str, head: str = "") -> EnginePair:
    """Open both engines; an error where they did not score the same tokens."""
    a, r = open_run(actual, head), open_run(reference, head)
    return EnginePair(a, r, align(a, r))


def open_run(spec: str, head: str = "") -> EngineRun:
    """Open a dump's folder, or a file by its ending.

    head  the module of a dump whose output is the logits
    """
    location = user_location(spec)
    for endings, read in READERS.items():
        if spec.endswith(endings):
            if folder_of(location.parent).stamp(location.name) is None:
                raise QgateError(f"there is no file {spec!r}.")
            return read(spec)
    if folder_of(location).kind() == "file":
        listed = ", ".join(chain.from_iterable(READERS))
        raise QgateError(f"{spec!r} is no dump; files that can be read end in {listed}.")
    return read_dump_run(spec, Dump.open(spec), head)
