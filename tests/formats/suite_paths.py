"""Which lines of the code that quantizes a suite enters, by test, format family and dtype.

python -m tests.formats.suite_paths SUITE.py OUT.json

The lines are read from the code objects of `qgate/formats`, so that a new path is in the list as
soon as it is written.
"""

from __future__ import annotations

import ast
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import qgate
from qgate.formats._literals import FORMATS
from qgate.formats.settings import QuantizerSettings

FOLDER = Path(qgate.__file__).parent / "formats"
EXPLORED = "what options and sizes can enter"
Line = tuple[str, int]


def lines_of_paths() -> dict[Line, str]:
    """List the lines of all functions that meet tensors, with the name of the function.

    Lines that raise an error are none: nothing is computed there.
    """
    lines: dict[Line, str] = {}
    for path in sorted(FOLDER.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        errors = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        codes = {
            (code.co_name, code.co_firstlineno): code
            for code in _codes(compile(source, str(path), "exec"))
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not _meets_tensors(node, path):
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            code = codes[node.name, first]
            name = f"{path.relative_to(FOLDER)}::{code.co_qualname}"
            for inner in _codes(code):
                for _, _, line in inner.co_lines():
                    if line and line >= node.body[0].lineno and line not in errors:
                        lines[str(path.relative_to(FOLDER)), line] = name
    return lines


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _meets_tensors(node: ast.FunctionDef, path: Path) -> bool:
    arguments = [*node.args.args, *node.args.kwonlyargs]
    annotations = [argument.annotation for argument in arguments] + [node.returns]
    words = " ".join(
        ast.unparse(annotation) for annotation in annotations if annotation is not None
    )
    return path.parent.name == "engine" or "Tensor" in words or "Job" in words


class Tracer:
    """Record the lines that are entered, by (test, family, dtype)."""

    def __init__(self) -> None:
        self.prefix = str(FOLDER) + "/"
        self.test = ""
        self.subject = ("", "")
        self.entered: dict[tuple[str, str, str], set[Line]] = defaultdict(set)

    def __call__(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.prefix):
            return None
        x, q = frame.f_locals.get("x"), frame.f_locals.get("q")
        if isinstance(x, torch.Tensor) and isinstance(q, QuantizerSettings):
            self.subject = type(q.format).__name__, str(x.dtype)
        entered = self.entered[self.test, *self.subject]
        name = frame.f_code.co_filename[len(self.prefix) :]

        def record(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "line":
                entered.add((name, frame.f_lineno))
            return record

        return record

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid.partition("::")[2].partition("[")[0]


def explore() -> None:
    """Quantize tensors of every family with few and many elements, ordinary and not."""
    formats = map(qgate.formats.get, FORMATS.names())
    families = {(type(fmt), fmt.element.signed): fmt for fmt in formats}
    options: list[dict[str, Any]] = [
        {},
        {"granularity": "tensor"},
        {"granularity": "channel", "axis": 0},
        {"granularity": "channel", "axis": 1},
        {"granularity": "block"},
        {"granularity": "block", "block": (16, 16)},
        {"zero_point": "minmax"},
        {"axis": 0},
    ]
    large_options: list[dict[str, Any]] = [{}, {"granularity": "tensor"}, {"granularity": "block"}]
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        small = torch.randn(15, 70, generator=generator)
        rough = small.clone()
        rough[2], rough[3, 4], rough[5, 6], rough[7] = 0, torch.nan, torch.inf, 2.0**-140
        large = torch.randn(36, 1030, generator=generator).repeat(29, 1)
        numbers = [small, rough] if dtype == torch.float64 else [small, rough, large]
        for fmt, chosen, x in itertools.product(families.values(), options, numbers):
            if len(x) > len(small) and chosen not in large_options:
                continue
            try:
                quantizer = qgate.Quantizer(fmt, **chosen)
            except qgate.QgateError:
                continue
            quantizer(x.to(dtype))


def main() -> int:
    suite, out = sys.argv[1:]
    tracer = Tracer()
    sys.settrace(tracer)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
    status = pytest.main([*options, suite], plugins=[tracer])
    tracer.test = EXPLORED
    explore()
    sys.settrace(None)
    rows = [[*key, sorted(lines)] for key, lines in tracer.entered.items()]
    Path(out).write_text(json.dumps(rows), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
