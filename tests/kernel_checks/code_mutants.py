"""Mutants of plain kernels: one place of right code changed, as a slip of the hand would.

python -m tests.kernel_checks.code_mutants                  60 mutants of each kernel
python -m tests.kernel_checks.code_mutants 200 --only flash so many of one kernel

Prints each mutant that the check does not see, though it gives something else at drawn inputs, and
ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.testing import CheckFailure, check_kernel
from tests.kernel_checks import plain_kernels

NAMES = tuple(
    name.removeprefix("check_") for name in vars(plain_kernels) if name.startswith("check_")
)
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr, ast.Lt: ast.LtE, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
}  # fmt: skip
_CALLS = {
    "amax": "mean", "maximum": "minimum", "round": "trunc", "min": "max", "exp": "exp2",
    "sum": "mean", "mean": "sum", "sqrt": "abs", "rsqrt": "sqrt", "abs": "relu", "log": "log1p",
    "sigmoid": "tanh", "zeros": "ones", "zeros_like": "ones_like",
}  # fmt: skip
_DROPPED = ("clamp", "round", "sqrt", "rsqrt", "exp", "sigmoid", "abs", "softmax")
_DRAWS, _LEAST = 24, 3e-4
"""Drawn inputs, and the share of a result that a fault moves at one of them."""
Change = Callable[[ast.AST], ast.AST]


@dataclass(frozen=True)
class Mutant:
    """A changed kernel, and words for the change."""

    words: str
    function: Callable[..., Tensor]


def changes_of(
    node: ast.AST, names: list[str], draw: random.Random
) -> Iterator[tuple[str, Change]]:
    """List what may be changed at a node: operators, numbers, names, calls, parts and statements."""

    def put(**fields: Any) -> Change:
        def change(other: ast.AST) -> ast.AST:
            for name, value in fields.items():
                setattr(other, name, value)
            return other

        return change

    if isinstance(node, ast.BinOp):
        if kind := _OPERATORS.get(type(node.op)):
            yield f"{type(node.op).__name__} → {kind.__name__}", put(op=kind())
        yield "the left side alone", lambda other: other.left  # type: ignore[attr-defined]
        if not isinstance(node.op, ast.Sub | ast.Div):
            yield "the right side alone", lambda other: other.right  # type: ignore[attr-defined]
    elif isinstance(node, ast.Compare) and (kind := _OPERATORS.get(type(node.ops[0]))):
        yield f"{type(node.ops[0]).__name__} → {kind.__name__}", put(ops=[kind()])
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        steps = (1, -1) if type(node.value) is int else (0.01 * node.value, -2 * node.value)
        for step in steps:
            yield f"{node.value} → {node.value + step}", put(value=node.value + step)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in _CALLS:
            function = ast.Attribute(node.func.value, _CALLS[name], ast.Load())  # type: ignore[attr-defined]
            yield f"{name} → {_CALLS[name]}", put(func=function)
        if name in _DROPPED:
            yield (
                f"without {name}",
                lambda other: (
                    other.args[0] if _is_of_torch(other) else other.func.value  # type: ignore[attr-defined]
                ),
            )
        if len(node.args) > 1:
            swapped = [node.args[1], node.args[0], *node.args[2:]]
            yield f"arguments of {name} swapped", put(args=swapped)
    elif isinstance(node, ast.Slice):
        for part in ("lower", "upper"):
            if (bound := getattr(node, part)) is not None:
                later = ast.BinOp(bound, ast.Add(), ast.Constant(1 if part == "lower" else -1))
                yield f"{part} bound by one", put(**{part: later})
                yield f"no {part} bound", put(**{part: None})
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        other_name = draw.choice([name for name in names if name != node.id])
        yield f"{node.id} → {other_name}", put(id=other_name)
    elif isinstance(node, ast.Assign):
        yield f"without `{ast.unparse(node)}`", lambda _other: ast.Pass()


def _is_of_torch(call: Any) -> bool:
    owner = getattr(call.func, "value", None)
    return isinstance(owner, ast.Name) and owner.id == "torch"


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def mutants(name: str, count: int, seed: int = 0) -> Iterator[Mutant]:
    """Make up to so many mutants of a kernel that run at its example."""
    source = ast.parse(textwrap.dedent(inspect.getsource(getattr(plain_kernels, name)))).body[0]
    assert isinstance(source, ast.FunctionDef)
    draw, nodes = random.Random(f"{name} {seed}"), list(ast.walk(source))
    stored = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names = list(dict.fromkeys([*(a.arg for a in source.args.args), *stored]))
    listed = [
        (index, words, change)
        for index, node in enumerate(nodes)
        for words, change in changes_of(node, names, draw)
    ]
    draw.shuffle(listed)
    yielded, arguments = 0, getattr(plain_kernels, f"check_{name}")()[0]
    for node_index, words, change in listed:
        tree = copy.deepcopy(source)
        node = list(ast.walk(tree))[node_index]
        changed = change(node)
        if changed is not node:
            tree = _Replacing(node, changed).visit(tree)
        module = ast.fix_missing_locations(ast.Module([tree], []))
        defined = dict(vars(plain_kernels))
        exec(compile(module, f"<{name}>", "exec"), defined)
        if _result(defined[name], arguments) is None:
            continue  # Who runs such code once, knows.
        line = ast.unparse(nodes[node_index]).partition("\n")[0]
        yield Mutant(f"{words} in `{line}`", defined[name])
        yielded += 1
        if yielded == count:
            return


def _result(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Tensor | None:
    try:
        result = kernel(*(a.clone() for a in arguments))
    except Exception:
        return None
    return result if isinstance(result, Tensor) else None


def differs(name: str, mutant: Mutant) -> bool:
    """Tell if a mutant differs anywhere from the right kernel: at drawn values, zeros and more."""
    right = getattr(plain_kernels, name)
    arguments = getattr(plain_kernels, f"check_{name}")()[0]
    generator = torch.Generator().manual_seed(1)
    for number in range(_DRAWS):
        values = []
        for position, value in enumerate(arguments):
            if not value.is_floating_point():
                values.append(value)
                continue
            x = torch.randn(value.shape, generator=generator) * 4.0 ** (number % 5 - 2)
            if number % len(arguments) == position and number % 3 == 0:
                x[: max(1, len(x) // 2)] = 0.0
            values.append(x)
        expected, actual = _result(right, tuple(values)), _result(mutant.function, tuple(values))
        if actual is None or expected is None or not bool(actual.isfinite().all()):
            return True
        change = (actual - expected).square().mean().sqrt()
        if float(change) > _LEAST * float(expected.square().mean().sqrt()):
            return True
    return False


def seen(name: str, kernel: Callable[..., Tensor]) -> str:
    """Return the first line of a failing check, or nothing."""
    arguments, like, options = getattr(plain_kernels, f"check_{name}")()
    try:
        check_kernel(kernel, *arguments, like=like, **options)
    except CheckFailure as failure:
        return failure.cause
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=60)
    parser.add_argument("--only", default="", help="the name of a kernel")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    missed = 0
    for name in NAMES:
        if args.only not in ("", name):
            continue
        assert not seen(name, getattr(plain_kernels, name)), name
        listed = list(mutants(name, args.count, args.seed))
        unseen = [mutant for mutant in listed if not seen(name, mutant.function)]
        faults = [mutant for mutant in unseen if differs(name, mutant)]
        missed += len(faults)
        same = len(unseen) - len(faults)
        print(
            f"{name}: {len(listed) - len(unseen)} of {len(listed)} are red, {same} change nothing"
        )
        for mutant in faults:
            print(f"  not seen: {mutant.words}")
    return min(missed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
