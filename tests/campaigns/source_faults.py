"""Faults planted in the sources of a small project: is each gate that one breaks run by --since?

  python -m tests.campaigns.source_faults --count 100 --seed 1

A fault is another number, operator or comparison in the body of a function. It is held against a
whole run: of the gates that fail there, none may be left out.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

# Imported here, since a run in a fork would import them each time.
import qgate.gate.measuring.model_gates
import qgate.plugin.records
import qgate.plugin.sessions
import qgate.plugin.summary  # noqa: F401
from qgate.cli import main as qgate_main
from tests.adoption.repository import clean, run
from tests.campaigns.forked import ran

REFUSED = "the run: its model cannot be made"
SUITES = ("layer_outputs", "outputs", "gradients")
SETTINGS = """model = ["qgate_model:build"]
mode = ["my_int8", "my_other", "int8"]
samples = 2
seqlen = 32
"""
KERNEL = '''"""A linear layer in INT8."""

import copy

from row_scales import row_scale
from torch import nn
from torch.nn.functional import linear


def {name}_rounded(x):
    scale = row_scale(x)
    codes = (x.detach() / scale).round().clamp(-127, 127)
    return x + (codes * scale - x).detach()


class {name}Linear(nn.Module):
    def __init__(self, replaced):
        super().__init__()
        self.weight, self.bias = replaced.weight, replaced.bias

    def forward(self, x):
        return linear({name}_rounded(x), {name}_rounded(self.weight), self.bias)


def {name}_model(model):
    quantized = copy.deepcopy(model.module)
    for name, module in model.module.named_modules():
        if name.startswith("layers.") and isinstance(module, nn.Linear):
            quantized.set_submodule(name, {name}Linear(quantized.get_submodule(name)))
    return quantized
'''
SCALES = '''"""Scales of rows."""


def row_scale(x):
    return x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
'''
MODES = (
    'modes={"my_int8": Kernel(A_model, stands_for="int8"), '
    '"my_other": Kernel(B_model, stands_for="int8")}'
)
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
              ast.Mod: ast.FloorDiv, ast.Lt: ast.GtE, ast.Eq: ast.NotEq, ast.And: ast.Or}  # fmt: skip
_FILES = ("qgate_model.py", "kernel_a.py", "kernel_b.py", "row_scales.py")


@dataclass(frozen=True)
class SourceFault:
    """A file with one other number or operator in the body of a function."""

    file: str
    unit: str
    text: str
    label: str


def make_project(folder: Path) -> Path:
    """Write a project with two kernels that share a function, record it, and commit it."""
    folder.mkdir(parents=True, exist_ok=True)
    run(["git", "init", "--quiet", "--initial-branch=main"], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert qgate_main(["init", "--suites", ",".join(SUITES)]) == 0
    (folder / "qgate.toml").write_text(SETTINGS)
    suites = folder / "suites"
    source = (suites / "qgate_model.py").read_text()
    source = re.sub(r"\ndef rounded_to_int8.*?(?=\ndef held_out)", "\n", source, flags=re.DOTALL)
    source = re.sub(r"modes=\{.*?\}", MODES, source)
    source = source.replace(
        "import copy\n", "from kernel_a import A_model\nfrom kernel_b import B_model\n"
    )
    (suites / "qgate_model.py").write_text(source)
    for letter in "AB":
        text = KERNEL.format(name=letter)
        (suites / f"kernel_{letter.lower()}.py").write_text(text)
    (suites / "row_scales.py").write_text(SCALES)
    (folder / "NOTES.md").write_text("Notes\n")
    status, said = pytest_run(folder, "--update-baselines")
    assert status == 0, said
    shutil.rmtree(folder / "qgate-out")
    run(["git", "add", "--all"], folder)
    run(["git", "commit", "--quiet", "--message", "All gates pass"], folder)
    return folder


def pytest_run(folder: Path, *options: str) -> tuple[int, str]:
    """`pytest suites` of a project, in a fork of this process."""

    def verb() -> int:
        os.environ.clear()
        os.environ.update(clean() | {"COLUMNS": "300"})
        sys.dont_write_bytecode = True
        torch.set_num_threads(1)  # the threads of this process are not in its fork
        plain = ("-q", "-p", "no:cacheprovider", "--no-report", "--plots=none")
        return int(pytest.main(["suites", *plain, *options]))

    ended = ran(verb, folder)
    return ended.status, ended.said


def selected(folder: Path, *options: str) -> tuple[set[str], str]:
    """The gates that --since runs, and what it says."""
    status, said = pytest_run(folder, "--since=HEAD", "--collect-only", *options)
    assert status in (0, 4, 5), said
    nodes = {REFUSED} if status == 4 else set()
    nodes |= {line for line in said.splitlines() if line.startswith("suites/") and "::" in line}
    return nodes, said


def failing(folder: Path) -> set[str]:
    """The gates that fail in a whole run, or that have no verdict."""
    status, said = pytest_run(folder)
    assert status in (0, 1, 4), said
    if status == 4:
        return {REFUSED}
    with (folder / "qgate-out" / "results.jsonl").open() as file:
        header, *records = map(json.loads, file)
    red = {record["node"] for record in records if not record["passed"]}
    red |= {*header["broken"], *header["other"]["failures"]}
    assert bool(red) is (status == 1), said
    return red


def faults(folder: Path) -> list[SourceFault]:
    """Every fault of this kind, file by file."""
    return [
        fault
        for name in _FILES
        for fault in _faults_of(name, (folder / "suites" / name).read_text())
    ]


def _faults_of(file: str, text: str) -> Iterator[SourceFault]:
    tree = ast.parse(text)
    for place, unit in enumerate(tree.body):
        if not isinstance(unit, ast.FunctionDef | ast.ClassDef):
            continue
        for number, node in enumerate(ast.walk(unit)):
            for label, changed in _changes(node):
                broken = copy.deepcopy(tree)
                target = [*ast.walk(broken.body[place])][number]
                for name, value in changed.items():
                    setattr(target, name, value)
                line = getattr(node, "lineno", unit.lineno)
                source = ast.unparse(ast.fix_missing_locations(broken))
                yield SourceFault(file, unit.name, source, f"{file}:{line} {label}")


def _changes(node: ast.AST) -> Iterator[tuple[str, dict[str, object]]]:
    """What may be different at a node."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for value in (node.value + 1, node.value * 2, node.value * 1.02):
            if isinstance(node.value, float) or value == int(value):
                yield f"{node.value} is {value}", {"value": type(node.value)(value)}
    for name in ("op", "ops"):
        found = getattr(node, name, None)
        kinds = [type(one) for one in (found if isinstance(found, list) else [found])]
        if len(kinds) == 1 and kinds[0] in _OPERATORS:
            other = _OPERATORS[kinds[0]]()
            value = [other] if name == "ops" else other
            yield f"{kinds[0].__name__} is {type(other).__name__}", {name: value}


@dataclass(frozen=True)
class FaultVerdict:
    """What a whole run says of a fault, and which gates --since would have run."""

    fault: SourceFault
    red: set[str]
    run: set[str]

    @property
    def missed(self) -> set[str]:
        return self.red - self.run


def judge(folder: Path, fault: SourceFault) -> FaultVerdict:
    """Plant a fault, run all and select; the project is then as before."""
    path = folder / "suites" / fault.file
    before = path.read_text()
    path.write_text(fault.text)
    try:
        return FaultVerdict(fault, failing(folder), selected(folder)[0])
    finally:
        path.write_text(before)


def drawn(folder: Path, count: int, seed: int) -> list[SourceFault]:
    """A seeded draw of faults, in which every function has its share."""
    draw = random.Random(seed)
    by_unit: dict[tuple[str, str], list[SourceFault]] = {}
    for fault in faults(folder):
        by_unit.setdefault((fault.file, fault.unit), []).append(fault)
    piles = [draw.sample(of, len(of)) for of in by_unit.values()]
    draw.shuffle(piles)
    deepest = max(map(len, piles))
    rounds = [pile[depth] for depth in range(deepest) for pile in piles if depth < len(pile)]
    return rounds[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = make_project(Path(home).resolve() / "project")
        gates = len(selected(folder, "--samples=2")[0])
        verdicts = []
        for fault in drawn(folder, args.count, args.seed):
            verdicts.append(judge(folder, fault))
            last = verdicts[-1]
            print(f"{fault.label} ({fault.unit}): {len(last.red)} red, {len(last.run)} run, "
                  f"{len(last.missed)} missed", flush=True)  # fmt: skip
    red = [one for one in verdicts if one.red]
    missed = [one for one in verdicts if one.missed]
    print(f"{len(verdicts)} faults, {len(red)} red in a whole run, {len(missed)} missed by --since; "
          f"{gates} gates run without a fault")  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
