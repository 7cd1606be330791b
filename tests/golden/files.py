"""Turn what a command printed and wrote into texts that hold still: the golden files of a case."""

from __future__ import annotations

import csv
import io
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qgate._version import __version__
from tests.golden.pages import page_lines
from tests.golden.summaries import MOST_ROWS, array_text, json_lines, number_text, table_lines

TEXTS = (".txt", ".log", ".md", ".py", ".toml", ".yml", ".yaml", ".gitignore")
STORED = (".safetensors", ".npz", ".npy", ".pt")

# What differs from run to run, machine to machine or version to version, and what stands for it.
VOLATILE = [
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z| UTC|[+-]\d\d:?\d\d)?", "<time>"),
    (r"\b\d{8}_\d{6}(?=_|\b)", "<time>"),
    (r"\bcpu-(?:default|avx\w*|\w+)-[0-9a-f]{4,}\b", "<cpu>"),
    (r"(?m)^(version of \w+\n).*$", r"\1<version>"),
    (r"(?m)^(seconds of \w+\n).*$", r"\1<seconds>"),
    (r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}\b", "<hash>"),
    (r"(?m)^(# device +\S+|\w+ +\S+ +(?:local|carried|\w+ward|task|sweep) +\S+ +\S+) +[0-9a-f]{8}$", r"\1 <digest>"),
    (r"\b(qgate|torch|python|Python|pytest|numpy|triton|Torch) v?\d+\.\d+[\w.+]*", r"\1 <version>"),
    (r"\b2\.\d+\.\d+\+cpu\b", "<version>"),
    (r"\bin (\d+ min )?\d+(\.\d+)? ?s(econds?)?\b( \(\d+:\d\d:\d\d\))?", "in <seconds>"),
    (r"\b\d+(\.\d+)? (?:s|ms|seconds|kB/s|MB/s|GB/s)\b", "<seconds>"),
]  # fmt: skip
VOLATILE += [
    (rf"(?<![\w.]){re.escape(version)}(?![\w.])", "<version>")
    for version in (__version__, torch.__version__, platform.python_version())
]
_VOLATILE = [(re.compile(pattern), stand_in) for pattern, stand_in in VOLATILE]
# Fields of JSON whose values are of this run.
OF_THE_RUN: dict[str, object] = {
    "started": "2000-01-01T00:00:00+00:00",
    "created": "2000-01-01T00:00:00+00:00",
    "time": "2000-01-01T00:00:00+00:00",
    "seconds": 0.0,
    "duration": 0.0,
    "qgate": "0",
    "torch": "0",
    "python": "0",
    "numpy": "0",
    "pid": 0,
    "host": "",
    "commit": None,
}
_LONG = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:e[-+]?\d+)?(?!\w|\.\d)")


_JSON = (".json", ".jsonl")


def steady(text: str, folder: Path | None = None) -> str:
    """The text without times, versions, hashes and the folder of this run; numbers in 9 digits."""
    if folder is not None:
        text = text.replace(str(folder), "<folder>")
    for pattern, stand_in in _VOLATILE:
        text = pattern.sub(stand_in, text)
    return _LONG.sub(_nine_digits, text)


def _nine_digits(number: re.Match[str]) -> str:
    digits = re.sub(r"e.*|\D", "", number[0]).lstrip("0")
    return number_text(float(number[0])) if len(digits) > 9 else number[0]


def golden_text(path: Path, pictures: dict[str, list[str]], folder: Path) -> str:
    """What is pinned of a file that a command wrote."""
    if path.name == "results.jsonl":
        return "".join(f"{line}\n" for line in _results_lines(path, folder))
    lines = "\n".join(_lines(path, pictures, folder))
    return "\n".join(line.rstrip() for line in steady(lines, folder).splitlines()) + "\n"


def _lines(path: Path, pictures: dict[str, list[str]], folder: Path) -> Iterator[str]:
    ending = path.suffix or path.name
    # How lines break must not depend on how long the name of a temporary folder is.
    text = path.read_text("utf-8").replace(str(folder), "<folder>") if ending in _JSON else ""
    if str(path) in pictures:
        yield from pictures[str(path)]
    elif ending == ".jsonl":
        for line in text.splitlines():
            yield from json_lines(without_run(json.loads(line)))
    elif ending == ".json":
        yield from json_lines(without_run(json.loads(text)))
    elif ending == ".html":
        yield from page_lines(path.read_text(encoding="utf-8"))
    elif ending == ".csv":
        yield from _csv_lines(path.read_text(encoding="utf-8"))
    elif ending in TEXTS:
        yield from path.read_text(encoding="utf-8").splitlines()
    elif ending in STORED:
        yield from _array_lines(path)
    else:
        yield f"a file of another kind: {ending}"


def without_run(value: Any) -> Any:
    """JSON in which fields that are of this run have a fixed value."""
    if isinstance(value, dict):
        return {
            name: _fixed(name, entry) if name in OF_THE_RUN else without_run(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [without_run(item) for item in value]
    return steady(value) if isinstance(value, str) else value


def _fixed(name: str, value: object) -> object:
    """What stands for a field of this run; seconds may be told step by step."""
    if isinstance(value, dict):
        return dict.fromkeys(value, 0.0) if name == "seconds" else without_run(value)
    return without_run(value) if isinstance(value, list) else OF_THE_RUN[name]


def _results_lines(path: Path, folder: Path) -> Iterator[str]:
    """Records as they are, a line each, so that `qgate report` can read the golden file."""
    text = path.read_text(encoding="utf-8").replace(str(folder), "<folder>")
    for line in text.splitlines():
        record = _in_nine_digits(without_run(json.loads(line)))
        yield json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _in_nine_digits(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_nine_digits(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_in_nine_digits(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _csv_lines(text: str) -> Iterator[str]:
    rows = list(csv.reader(io.StringIO(text)))
    lines = text.splitlines()
    if len(rows) <= MOST_ROWS or len(lines) != len(rows):
        yield from lines
        return
    yield from [*lines[:4], "…", *lines[-2:]]
    cells = [
        {name: _cell(cell) for name, cell in zip(rows[0], row, strict=False)} for row in rows[1:]
    ]
    yield from list(table_lines(cells))[3:]


def _cell(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _array_lines(path: Path) -> Iterator[str]:
    if path.suffix == ".npy":
        yield array_text(np.load(path))
        return
    if path.suffix == ".pt":
        content = torch.load(path, weights_only=True)
    elif path.suffix == ".npz":
        content = dict(np.load(path))
    else:
        from safetensors.torch import load_file

        content = load_file(path)
    parts = content if isinstance(content, dict) else {"": content}
    for name, value in sorted(parts.items()):
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            yield f"{name} {dtype} {array_text(value.double().numpy())}"
        elif isinstance(value, np.ndarray):
            yield f"{name} {value.dtype} {array_text(value)}"
        else:
            yield from json_lines({name: json.loads(json.dumps(without_run(value), default=str))})
