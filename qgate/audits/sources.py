"""The source of tests: the function that some code is of, and the call that a frame executes."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType


class UnreadableError(Exception):
    """An expression that the audit does not follow."""


@functools.lru_cache(maxsize=256)
def function_of(code: CodeType) -> ast.AST | None:
    """Parse the function of some code, with the line numbers of its file."""
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    indented = lines[0][:1] in " \t"
    try:
        tree = ast.parse(("if 1:\n" if indented else "") + "".join(lines))
    except (SyntaxError, ValueError):
        return None
    return ast.increment_lineno(tree, first - 1 - indented)


def call_at(
    function: ast.AST, frame: FrameType, called: str, nested: bool
) -> tuple[ast.stmt, ast.expr]:
    """Return the innermost statement that a frame executes, and the call in it.

    Of a nested loop the frame is the one around it, so that the call is known by its name only.
    """
    return _call_of(function, frame.f_code, frame.f_lasti, frame.f_lineno, called, nested)


@functools.lru_cache(maxsize=1024)
def _call_of(
    function: ast.AST, code: CodeType, instruction: int, line: int, called: str, nested: bool
) -> tuple[ast.stmt, ast.expr]:
    position = next(itertools.islice(code.co_positions(), instruction // 2, None))
    line = position[0] or line
    statements = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.stmt)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    if not statements:
        raise UnreadableError("no statement")
    statement = min(statements, key=lambda node: (node.end_lineno or 0) - node.lineno)
    own: list[ast.AST] = list(_own_expressions(statement))
    calls = [node for top in own for node in ast.walk(top) if isinstance(node, ast.Call)]
    exact = [
        node
        for node in calls
        if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == position
    ]
    named = [node for node in calls if last_name(node.func) == called]
    chosen = exact if len(exact) == 1 and not nested else named if named or nested else calls
    if len(chosen) != 1:
        raise UnreadableError("more than one call")
    return statement, chosen[0]


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, without those of statements in its body."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


@functools.lru_cache(maxsize=1024)
def statements_from(function: ast.AST, first: ast.stmt) -> Sequence[ast.stmt]:
    """Return a statement and those after it in the function, in the order of lines."""
    statements = (node for node in ast.walk(function) if isinstance(node, ast.stmt))
    return sorted(
        (node for node in statements if node.lineno >= first.lineno),
        key=lambda node: (node.lineno, node.col_offset),
    )


def last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
