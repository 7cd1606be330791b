"""Open the samples of an engine: a dump, a file of logits, or lines of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from qgate.dumps import Dump
from qgate.engines import logit_files, logprob_lines
from qgate.engines.dump_runs import read_dump_run
from qgate.engines.scored import EngineRun, Pair, align
from qgate.errors import QgateError
from qgate.storage.access import folder_of
from qgate.storage.locations import user_location


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
    if spec.endswith(logit_files.ENDINGS):
        _check_there(spec)
        return logit_files.read_logit_file(spec)
    if spec.endswith(logprob_lines.ENDINGS):
        _check_there(spec)
        return logprob_lines.read_logprob_lines(spec)
    if folder_of(user_location(spec)).kind() == "file":
        endings = ", ".join((*logit_files.ENDINGS, *logprob_lines.ENDINGS))
        raise QgateError(f"{spec!r} is no dump; files that can be read end in {endings}.")
    return read_dump_run(spec, Dump.open(spec), head)


def _check_there(spec: str) -> None:
    location = user_location(spec)
    if folder_of(location.parent).stamp(location.name) is None:
        raise QgateError(f"there is no file {spec!r}.")
