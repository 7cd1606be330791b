"""A source file cut into units: functions and classes, and what runs when it is imported.

A unit is known by its name. What runs at import is everything but the bodies of functions: also
decorators, defaults, bases and the other statements of classes.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from qgate.errors import QgateError

_IDENTIFIER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# Ways in which code runs other code that it does not name: functions of Python, by their bare
# names, and modules, attributes and keywords.
_BUILT_IN = ("eval", "exec", "compile", "__import__", "globals", "locals", "vars")
_INDIRECT = (
    "importlib", "import_module", "runpy", "inspect", "pickle", "dill", "cloudpickle", "joblib",
    "subprocess", "multiprocessing", "settrace", "setprofile", "__dict__", "__subclasses__",
    "__init_subclass__", "__getattr__", "metaclass", "weights_only",
)  # fmt: skip
_BY_NAME = ("getattr", "attrgetter", "methodcaller")
# Calls that keep the functions they are given and run none of them.
_KEEPING = ("Kernel", "partial")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceUnit:
    """A function or a class of a file: the code of its bodies, and the names in them."""

    code: str
    names: frozenset[str]


@dataclass
class SourceFile:
    """A parsed file.

    modes    names that a mode given as `Model(modes={"NAME": …})` refers to, by its name
    """

    tree: ast.Module
    modes: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, where: str) -> SourceFile:
        try:
            return cls(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError) as error:
            raise QgateError(f"{where} cannot be parsed: {error}") from None

    @cached_property
    def units(self) -> dict[str, SourceUnit]:
        """Return the functions and classes without decorators whose names occur once."""
        nodes = [node for node in self.tree.body if isinstance(node, _Function | ast.ClassDef)]
        names = [node.name for node in nodes]
        return {
            node.name: SourceUnit(
                "\n".join(map(_dump, bodies := [*_bodies(node)])),
                frozenset(name for body in bodies for name in self._names(body)),
            )
            for node in nodes
            if not node.decorator_list and names.count(node.name) == 1
        }

    @cached_property
    def at_import(self) -> ast.Module:
        """Return what runs when the file is imported: the tree without the bodies of units."""
        tree = copy.deepcopy(self.tree)
        for node in tree.body:
            if isinstance(node, _Function | ast.ClassDef) and node.name in self.units:
                for function in _functions(node):
                    function.body = [ast.Pass()]
        return tree

    @cached_property
    def import_code(self) -> str:
        return _dump(self.at_import)

    @cached_property
    def import_names(self) -> frozenset[str]:
        return frozenset(self._names(self.at_import))

    @cached_property
    def all_names(self) -> frozenset[str]:
        return frozenset(self._names(self.tree))

    @cached_property
    def aliases(self) -> dict[str, set[str]]:
        """Return other names of what is imported: `from kernels import a as b` has `b`."""
        aliases: dict[str, set[str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if alias.asname:
                        aliases.setdefault(alias.asname, set()).update(alias.name.split("."))
        return aliases

    def texts(self) -> Iterator[str]:
        """Yield the texts in the file, such as names of files that it reads."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield the modules that the file names anywhere, with the dots before them."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, 0) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                yield base, node.level
                yield from ((f"{base}.{a.name}".strip("."), node.level) for a in node.names)

    def untraceable(self) -> str:
        """Return a construct that may run code which the file does not name, with its line."""
        for node in ast.walk(self.tree):
            name, line = _own_name(node), getattr(node, "lineno", 1)
            if name in _INDIRECT or (name in _BUILT_IN and isinstance(node, ast.Name)):
                return f"{name} in line {line}"
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
                return f"sys.modules in line {line}"
            if isinstance(node, ast.Call) and (function := _own_name(node.func)) in _BY_NAME:
                texts = node.args[1:2] if function == "getattr" else node.args
                if not texts or not all(isinstance(text, ast.Constant) for text in texts):
                    return f"{function} in line {line}"
            if isinstance(node, _Function | ast.ClassDef) and node.name in _KEEPING:
                return f"a {node.name} of its own in line {line}"
        return ""

    def _is_model(self, call: ast.Call) -> bool:
        """Tell if a call makes a `qgate.Model`."""
        if isinstance(call.func, ast.Attribute):
            return call.func.attr == "Model" and _own_name(call.func.value) == "qgate"
        return (
            isinstance(call.func, ast.Name)
            and call.func.id == "Model"
            and any(
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == "qgate"
                and any(alias.name == "Model" and not alias.asname for alias in node.names)
                for node in ast.walk(self.tree)
            )
        )

    def _names(self, root: ast.AST) -> Iterator[str]:
        """Yield every name that a tree uses, but for those of modes, which are kept apart.

        A definition or an import is no use of its name.
        """
        pending = [root]
        while pending:
            node = pending.pop()
            call = node if isinstance(node, ast.Call) and self._is_model(node) else None
            if call is not None and (modes := _modes_of(call)) is not None:
                for name, value in modes.items():
                    self.modes.setdefault(name, set()).update(self._names(value))
                pending += [call.func, *call.args]
                pending += [keyword.value for keyword in call.keywords if keyword.arg != "modes"]
                continue
            if isinstance(node, ast.Name | ast.Attribute):
                yield _own_name(node) or ""
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and _IDENTIFIER.fullmatch(text):
                yield from text.split(".")
            pending += ast.iter_child_nodes(node)


def _own_name(node: ast.AST) -> str | None:
    """Return the name that a node is or defines."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name
        case ast.alias():
            return node.name.partition(".")[0]
        case ast.keyword():
            return node.arg if node.arg in ("metaclass", "weights_only") else None
    return None


def _functions(node: ast.AST) -> Iterator[_Function]:
    """Yield a function itself, or the functions of a class."""
    if isinstance(node, _Function):
        yield node
    elif isinstance(node, ast.ClassDef):
        yield from (child for child in node.body if isinstance(child, _Function))


def _bodies(node: ast.AST) -> Iterator[ast.AST]:
    return (statement for function in _functions(node) for statement in function.body)


def _dump(node: ast.AST) -> str:
    return ast.dump(node, include_attributes=False)


def _modes_of(call: ast.Call) -> dict[str, ast.expr] | None:
    """Return the modes of a call `Model(…, modes={"NAME": function})`.

    None if a mode may run code of the project while the model is made, or has no name here.
    """
    value = next((keyword.value for keyword in call.keywords if keyword.arg == "modes"), None)
    if not isinstance(value, ast.Dict):
        return None
    modes: dict[str, ast.expr] = {}
    for key, mode in zip(value.keys, value.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str) and _is_kept(mode)):
            return None
        modes[key.value] = mode
    return modes


def _is_kept(mode: ast.expr) -> bool:
    """Tell if an expression only names functions, or keeps them for later."""
    if isinstance(mode, ast.Call):
        arguments = [*mode.args, *(keyword.value for keyword in mode.keywords)]
        return _own_name(mode.func) in _KEEPING and all(map(_is_kept, arguments))
    return isinstance(mode, ast.Name | ast.Attribute | ast.Constant | ast.Lambda)
