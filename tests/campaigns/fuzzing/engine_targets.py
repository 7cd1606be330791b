"""Runs of engines as targets: files of logits, and lines of log-probabilities of every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from tests.campaigns.fuzzing.target import Target
from tests.engines import runs

LINES = ("read_logprob_lines", "_parsed")


def _read(folder: Path) -> None:
    from qgate.engines.comparison import compare_engines
    from qgate.engines.texts import result_lines

    path = next(path for path in sorted(folder.iterdir()) if path.is_file())
    list(result_lines(compare_engines(str(path), str(path))))


def _lines(kind: str, folder: Path) -> None:
    runs.write_lines(folder / "run.jsonl", runs.scored(samples=2), kind)


def _tensors(folder: Path) -> None:
    runs.write_ragged(folder / "run.safetensors", runs.scored(samples=2))


def _probe(folder: Path) -> None:
    from qgate.probe import snapshot

    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 3)})
    snapshot(model, folder, 42)


def _read_probe(folder: Path) -> None:
    from qgate.engines.probes import read_probe

    read_probe(str(folder))


TARGETS = (
    *(
        Target(
            f"lines of {kind}",
            partial(_lines, kind),
            _read,
            tuple(f"qgate.engines.logprob_lines:{name}" for name in LINES),
        )
        for kind in runs.LINES
    ),
    Target("logits", _tensors, _read, ("qgate.engines.logit_files:read_logit_file",)),
    Target("probe", _probe, _read_probe, ("qgate.engines.probes:_about",)),
)
