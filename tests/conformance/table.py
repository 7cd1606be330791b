"""The table of CHECKED.md that says where each format was checked.

`python -m tests.conformance.table` writes it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import qgate
from tests.conformance import (
    test_compressed_tensors,
    test_gguf,
    test_microxcaling,
    test_onnx_nodes,
    test_torchao,
)

DOCUMENT = Path(__file__).with_name("CHECKED.md")
HEADING = "## Checked against"
SUITES: dict[str, Mapping[str, int]] = {
    "ONNX": test_onnx_nodes.CHECKED,
    "gguf": test_gguf.CHECKED,
    "compressed-tensors": test_compressed_tensors.CHECKED,
    "torchao": test_torchao.CHECKED,
    "microxcaling": test_microxcaling.CHECKED,
}
"""How many cases of each suite compare a format."""


def rows() -> list[str]:
    """Return the lines of the table."""
    header = ["format", *SUITES]
    lines = [header, ["---"] * len(header)]
    for name in qgate.formats.names():
        counts = [suite.get(name, 0) for suite in SUITES.values()]
        if any(counts):
            lines.append([f"`{name}`", *(str(count or "–") for count in counts)])
    return [f"| {' | '.join(line)} |" for line in lines]


def replaced(text: str) -> str:
    """Return the document with the table as it has to be now."""
    before, heading, tail = text.partition(f"{HEADING}\n")
    if not heading:
        raise ValueError(f"{DOCUMENT.name} has no line {HEADING!r}.")
    lines = tail.split("\n")
    first = next(index for index, line in enumerate(lines) if line.startswith("|"))
    after = list(itertools.dropwhile(lambda line: line.startswith("|"), lines[first:]))
    return before + heading + "\n".join([*lines[:first], *rows(), *after])


if __name__ == "__main__":
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
