"""Limits markers of the suites that qgate ships, to tell them from those that a project changed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SUITES = Path(__file__).parents[1] / "starter" / "suites"
Arguments = Mapping[str, Any]


@functools.cache
def shipped_markers(file: str, function: str) -> tuple[Arguments, ...]:
    """Return the arguments of the limits markers of a function in a suite as qgate ships it."""
    path = _SUITES / f"{file}.txt"
    if not path.is_file():
        return ()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    calls = [
        decorator
        for node in functions
        if node.name == function
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.limits"
    ]
    return tuple(
        {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        for call in calls
    )


def standard_of(file: str, function: str, arguments: Arguments) -> Arguments | None:
    """Return the shipped marker that a marker is, or that it changes; None for a project's own.

    A changed marker is compared with that for the same sites, modes and scopes.
    """
    markers = shipped_markers(file, function)
    if arguments in markers:
        return arguments
    where = ("sites", "modes", "models", "scopes")
    alike = [
        marker
        for marker in markers
        if all(marker.get(name) == arguments.get(name) for name in where)
    ]
    return alike[0] if alike else None
