"""The assertion that a compared number or truth value ends in, read from the source of the test.

`torch.allclose` returns a truth value and a cosine a number; only the line that asserts it says
what would have passed. Followed are: the expression around the call, variables that take its value,
`return` to the caller, `assert`, unittest's methods, and `if … : raise`. Anything else counts as
not asserted, so that no place is accused by a guess.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import numpy as np

from qgate.audits.sources import (
    UnreadableError,
    call_at,
    function_of,
    last_name,
    statements_from,
)

Scope = Callable[[str], Any]
"""Values of names where the test compares."""

_DEEPEST = 6
_NESTED = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
_REDUCING = {"mean", "min", "max", "all", "abs", "sum", "prod", "amin", "amax", "nanmean"}
_PASSING = {
    "float", "double", "bfloat16", "half", "numpy", "cpu", "cuda", "detach", "tolist", "to",
    "clone", "squeeze", "flatten", "tensor", "as_tensor", "array", "asarray",
}  # fmt: skip
_UNITTEST: dict[str, type[ast.cmpop]] = {
    "assertGreater": ast.Gt,
    "assertGreaterEqual": ast.GtE,
    "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE,
    "assertEqual": ast.Eq,
    "assertIs": ast.Is,
}
_TRUTHS = ("assertTrue", "assert_")
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Eq: lambda a, b: a == b,
    ast.Is: lambda a, b: a is b or (isinstance(a, bool | np.bool_) and bool(a) == b),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}


@dataclass(frozen=True)
class Assertion:
    """The judgment of a test on a returned number or truth value.

    text     the source that asserts it
    code     the code in which it stands
    accepts  tells if the test would go on with another value
    """

    text: str
    code: CodeType
    accepts: Callable[[Any], bool]


def assertion_on(frame: FrameType, called: str) -> Assertion | None:
    """Return the assertion on what a call of `called` in this frame returns; None without one."""
    try:
        return _followed(frame, called, lambda value: value)
    except UnreadableError:
        return None


@dataclass(frozen=True)
class Carriers:
    """Expressions and variables that carry the returned value, with what each makes of it.

    leaves  expressions: the call itself
    names   variables that took the value
    scope   the values of all other names
    """

    leaves: Mapping[ast.expr, Callable[[Any], Any]]
    names: Mapping[str, Callable[[Any], Any]]
    scope: Scope

    def occur_in(self, node: ast.AST) -> bool:
        return any(
            inner in self.leaves or (isinstance(inner, ast.Name) and inner.id in self.names)
            for inner in ast.walk(node)
        )

    def made_by(self, node: ast.expr) -> Callable[[Any], Any]:
        return lambda value: self.evaluate(node, value)

    def evaluate(self, node: ast.expr, value: Any) -> Any:
        """Evaluate an expression with another value in place of what the comparison returned."""

        def of(inner: ast.expr) -> Any:
            return self.evaluate(inner, value)

        if node in self.leaves:
            return self.leaves[node](value)
        match node:
            case ast.Constant(value=constant) if isinstance(constant, bool | int | float):
                return constant
            case ast.Name(id=name):
                return self.names[name](value) if name in self.names else _number(self.scope(name))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                return _number(_plain_attribute(self.scope(name), attribute))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -of(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not np.all(of(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](of(left), of(right))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(
                type(op) in _COMPARE for op in ops
            ):
                sides = itertools.pairwise(of(side) for side in (left, *others))
                pairs = zip(ops, sides, strict=True)
                return np.all([np.all(_COMPARE[type(op)](a, b)) for op, (a, b) in pairs])
            case ast.BoolOp(op=ast.And(), values=values):
                return all(np.all(of(operand)) for operand in values if self.occur_in(operand))
            case ast.Call(func=function, args=[first, second], keywords=keywords) if (
                last_name(function) == "allclose"
            ):
                words = (word for word in keywords if word.arg in ("rtol", "atol"))
                limits = {str(word.arg): of(word.value) for word in words}
                return np.allclose(of(first), of(second), **limits)
            case ast.Call(func=function, args=args):
                return self._called(function, args, of)
        raise UnreadableError(ast.dump(node)[:80])

    def _called(
        self, function: ast.expr, args: list[ast.expr], of: Callable[[ast.expr], Any]
    ) -> Any:
        """Evaluate the few methods and functions that keep or reduce a number."""
        name = last_name(function)
        if isinstance(function, ast.Attribute) and self.occur_in(function.value):
            inner = of(function.value)
        elif len(args) == 1:
            if isinstance(args[0], ast.GeneratorExp | ast.ListComp):
                if name != "all":
                    raise UnreadableError("a comprehension")
                return of(args[0].elt)
            inner = of(args[0])
            if name == "bool":
                return bool(np.all(inner))
        else:
            raise UnreadableError(name)
        if name in _PASSING:
            return inner
        if name == "item":
            return inner if np.ndim(inner) == 0 else np.reshape(inner, ())
        if name in _REDUCING:
            return getattr(np, name)(inner)
        raise UnreadableError(name)


def _followed(
    frame: FrameType, called: str, made: Callable[[Any], Any], depth: int = 0
) -> Assertion | None:
    nested = frame.f_code.co_name in _NESTED
    while frame.f_code.co_name in _NESTED:
        # `all(allclose(…) for …)`: the loop belongs to the statement around it.
        if frame.f_back is None or frame.f_back.f_code.co_filename != frame.f_code.co_filename:
            return None
        frame = frame.f_back
    function = function_of(frame.f_code)
    if function is None or depth > _DEEPEST or frame.f_code.co_name == "<lambda>":
        return None
    statement, call = call_at(function, frame, called, nested)
    carriers = Carriers({call: made}, {}, _scope_of(frame))
    if (accepts := _judged(statement, carriers)) is not None:
        return Assertion(_source(statement), frame.f_code, accepts)
    if isinstance(statement, ast.Return) and statement.value is not None and frame.f_back:
        outer = carriers.made_by(statement.value)
        return _followed(frame.f_back, frame.f_code.co_name, outer, depth + 1)
    return _followed_names(function, statement, carriers, frame, depth)


def _followed_names(
    function: ast.AST, statement: ast.stmt, carriers: Carriers, frame: FrameType, depth: int
) -> Assertion | None:
    """Follow variables that take the value, up to every assertion on one of them."""
    names: dict[str, Callable[[Any], Any]] = {}
    judgments: list[tuple[ast.stmt, Callable[[Any], bool]]] = []
    for following in statements_from(function, statement):
        if isinstance(following, ast.Assign) and len(following.targets) == 1:
            target = following.targets[0]
            if isinstance(target, ast.Name):
                before = replace(carriers, names=dict(names))
                if before.occur_in(following.value):
                    names[target.id] = before.made_by(following.value)
                else:
                    names.pop(target.id, None)
            continue
        variables = replace(carriers, leaves={}, names=dict(names))
        if following is statement or not names or not variables.occur_in(following):
            continue
        if isinstance(following, ast.Return) and following.value is not None and frame.f_back:
            if judgments:
                break
            outer = variables.made_by(following.value)
            return _followed(frame.f_back, frame.f_code.co_name, outer, depth + 1)
        if (accepts := _judged(following, variables)) is not None:
            judgments.append((following, accepts))
    if not judgments:
        return None
    text = _source(judgments[0][0])
    all_accept = [accepts for _, accepts in judgments]
    return Assertion(text, frame.f_code, lambda value: all(accept(value) for accept in all_accept))


# Statements --------------------------------------------------------------------------------------


def _judged(statement: ast.stmt, carriers: Carriers) -> Callable[[Any], bool] | None:
    """Return the condition of a statement that asserts; None of any other statement."""
    condition = _condition(statement)
    if condition is None or not carriers.occur_in(condition[0]):
        return None
    test, truth = condition
    return lambda value: bool(np.all(carriers.evaluate(test, value))) is truth


def _condition(statement: ast.stmt) -> tuple[ast.expr, bool] | None:
    """Return the expression that a statement wants true, or false."""
    if isinstance(statement, ast.Assert):
        return statement.test, True
    if isinstance(statement, ast.If) and any(map(_fails, statement.body)):
        return statement.test, False
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return None
    call = statement.value
    name = last_name(call.func)
    if name in _TRUTHS and call.args:
        return call.args[0], True
    if name == "assertFalse" and call.args:
        return call.args[0], False
    if name in _UNITTEST and len(call.args) >= 2:
        compare = ast.Compare(call.args[0], [_UNITTEST[name]()], [call.args[1]])
        return compare, True
    return None


def _fails(statement: ast.stmt) -> bool:
    """Tell if a statement ends the test as failed."""
    if isinstance(statement, ast.Raise):
        return True
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and not statement.test.value
    called = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(called, ast.Call) and last_name(called.func) == "fail"


def _source(statement: ast.stmt) -> str:
    """Write the part of a statement that a line shows: no message, no body."""
    if isinstance(statement, ast.Assert):
        return ast.unparse(ast.Assert(test=statement.test, msg=None))
    if isinstance(statement, ast.If):
        return f"if {ast.unparse(statement.test)}: raise"
    return ast.unparse(statement)


# Names -------------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    """Return a plain number or truth value, also of a tensor that holds one."""
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return value
    raise UnreadableError(f"a name that stands for a {type(value).__name__}")


def _plain_attribute(owner: Any, name: str) -> Any:
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        raise UnreadableError(name) from None


def _scope_of(frame: FrameType) -> Scope:
    local, outer = dict(frame.f_locals), frame.f_globals

    def named(name: str) -> Any:
        if name in local:
            return local[name]
        if name in outer:
            return outer[name]
        raise UnreadableError(name)

    return named
