"""Watching of the functions that compare: wrapped once their library is imported.

No library is imported here. A finder notices when a test imports torch or numpy, and wraps their
functions before any other file can bind their names. `torch.testing` is watched where it compares
two tensors, which also sees names that were bound earlier, and comparisons inside containers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """A comparison that raised nothing.

    function  the function that compared
    first     its two tensors, in the order of its arguments
    second
    returned  what it returned; None if it raises where tensors differ
    limits    rtol and atol, or decimal
    measure   the number that it returns, if that is one of `criteria.MEASURES`
    axis      the dimension of a cosine
    """

    function: str
    first: Any
    second: Any
    returned: Any
    limits: Mapping[str, float]
    measure: str = ""
    axis: int | None = None


Listener = Callable[[Callable[[], Comparison]], None]


@dataclass(frozen=True)
class _Signature:
    """Arguments of a function that compares, with the defaults of its limits."""

    function: str
    names: tuple[str, ...]
    defaults: Mapping[str, float]
    measure: str = ""

    def comparison(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], returned: Any
    ) -> Comparison:
        arguments = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        axis = None
        limits = {name: float(arguments.get(name, value)) for name, value in self.defaults.items()}
        if "dim" in limits:
            axis = int(limits.pop("dim"))
        first, second = (arguments[name] for name in self.names[:2])
        return Comparison(self.function, first, second, returned, limits, self.measure, axis)


_CLOSE = {"rtol": 1e-5, "atol": 1e-8}
_SIDES = ("actual", "desired")
# By library and name in it.
_SIGNATURES = {
    "torch": {
        "allclose": _Signature("torch.allclose", ("input", "other", "rtol", "atol"), _CLOSE),
        "equal": _Signature("torch.equal", ("input", "other"), {"rtol": 0.0, "atol": 0.0}),
        "cosine_similarity": _Signature(
            "cosine_similarity", ("x1", "x2", "dim"), {"dim": 1}, "cosine"
        ),
    },
    "numpy": {"allclose": _Signature("numpy.allclose", ("a", "b", "rtol", "atol"), _CLOSE)},
    "numpy.testing": {
        name: _Signature(name, (*_SIDES, *limits), limits)
        for name, limits in {
            "assert_allclose": {"rtol": 1e-7, "atol": 0.0},
            "assert_array_almost_equal": {"decimal": 6.0},
            "assert_almost_equal": {"decimal": 7.0},
        }.items()
    },
}
# Functions of projects, by the names that they go by. What they return is computed again and left
# out if it is something else.
_PROJECTS = {
    name: _Signature(name, ("x", "y"), {}, measure)
    for measure, names in {
        "calc_diff": "calc_diff",
        "cosine": "cosine_similarity cosine_sim cos_sim calc_cosine calc_cos_sim",
        "sqnr": "compute_error compute_sqnr calc_sqnr sqnr SQNR",
    }.items()
    for name in names.split()
}


class _Inside(threading.local):
    """Mark of a thread that is inside a watched function, whose own comparisons do not count."""

    active = False


_inside = _Inside()
_listeners: list[Listener] = []
_is_compiling: Callable[[], bool] = bool
"""Tells if torch compiles the caller; False until torch is imported."""
_undo: list[Callable[[], None]] = []


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of every comparison that passes; the last one that came is told alone."""
    finder = _LibraryFinder()
    _listeners.append(listener)
    if len(_listeners) == 1:
        for name in _SIGNATURES:
            if (module := sys.modules.get(name)) is not None:
                _watch_library(name, module)
                _rebind(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _listeners.remove(listener)
        while _undo and not _listeners:
            _undo.pop()()


def watch_projects(is_project: Callable[[str], bool]) -> None:
    """Wrap functions such as `calc_diff` that files of the project define or import."""
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        for name, signature in _PROJECTS.items():
            function = names.get(name)
            if isinstance(function, FunctionType) and not hasattr(function, "qgate_watched"):
                own = is_project(function.__code__.co_filename)
                if own or (is_project(names.get("__file__") or "") and name == "calc_diff"):
                    _replace(module, name, _wrapped(function, signature))


def _tell(signature: _Signature, args: Sequence[Any], kwargs: Mapping[str, Any], it: Any) -> None:
    """Report a comparison; the listener handles its own errors, also those of the arguments."""
    _inside.active = True
    try:
        _listeners[-1](functools.partial(signature.comparison, args, kwargs, it))
    finally:
        _inside.active = False


# Wrapping ----------------------------------------------------------------------------------------


class WatchedFunction:
    """A built-in function that reports its calls.

    It is equal to the function and hashes like it: tables of overrides are keyed by functions.
    """

    def __init__(self, function: Callable[..., Any], signature: _Signature, *first: Any) -> None:
        functools.update_wrapper(self, function)
        self._function, self._signature, self._first = function, signature, first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if _is_compiling() or _inside.active or not _listeners:
            return self._function(*args, **kwargs)
        returned = self._function(*args, **kwargs)
        _tell(self._signature, (*self._first, *args), kwargs, returned)
        return returned

    def __getattr__(self, name: str) -> Any:
        if name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    def __eq__(self, other: object) -> bool:
        return other is self or self._function == getattr(other, "_function", other)

    def __hash__(self) -> int:
        return hash(self._function)

    def __repr__(self) -> str:
        return repr(self._function)


class WatchedMethod:
    """A method of tensors that reports its calls."""

    def __init__(self, method: Any, signature: _Signature) -> None:
        self.__doc__ = method.__doc__
        self._method, self._signature = method, signature

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._method
        bound = self._method.__get__(instance, owner)
        return bound if _is_compiling() else WatchedFunction(bound, self._signature, instance)


def _wrapped(function: Callable[..., Any], signature: _Signature) -> Callable[..., Any]:
    """Return a Python function that reports its calls."""

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if _inside.active or not _listeners:
            return function(*args, **kwargs)
        _inside.active = True
        try:
            returned = function(*args, **kwargs)
        finally:
            _inside.active = False
        _tell(signature, args, kwargs, returned)
        return returned

    watched.qgate_watched = True  # type: ignore[attr-defined]
    return watched


def _replace(owner: Any, name: str, replacement: Any) -> None:
    """Set an attribute, to be restored with the last listener unless it was set again."""
    had = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, replacement)

    def restore() -> None:
        if vars(owner).get(name) is replacement:
            if had:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    _undo.append(restore)


# Libraries ---------------------------------------------------------------------------------------


def _watch_library(name: str, module: ModuleType) -> None:
    if name == "torch":
        _watch_torch(module)
        return
    wrap = WatchedFunction if name == "numpy" else _wrapped
    for function, signature in _SIGNATURES[name].items():
        _replace(module, function, wrap(getattr(module, function), signature))


def _watch_torch(torch: Any) -> None:
    global _is_compiling
    _is_compiling = torch.compiler.is_compiling
    for name, signature in _SIGNATURES["torch"].items():
        watched = WatchedFunction(getattr(torch, name), signature)
        # TorchScript finds built-in functions by identity.
        torch.jit._builtins._register_builtin(watched, f"aten::{name}")
        _replace(torch, name, watched)
        if name == "cosine_similarity":
            _replace(torch.nn.functional, name, watched)
        else:
            method = getattr(torch.Tensor, name)
            _replace(torch.Tensor, name, WatchedMethod(method, signature))
    pair = sys.modules["torch.testing._comparison"].TensorLikePair
    _replace(pair, "compare", _watched_pair(pair.compare))


def _watched_pair(compare: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the comparison of two tensors in torch.testing, which knows their tolerances."""

    @functools.wraps(compare)
    def watched(self: Any) -> None:
        __tracebackhide__ = True
        compare(self)
        if _listeners and not _inside.active:
            limits = {"rtol": self.rtol, "atol": self.atol}
            signature = _Signature("assert_close", ("actual", "expected", "rtol", "atol"), limits)
            _tell(signature, (self.actual, self.expected), {}, None)

    return watched


def _rebind(library: str) -> None:
    """Replace functions that other files imported by name before they were watched."""
    home = sys.modules[library]
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        top = (names.get("__name__") or "").partition(".")[0]
        for name in _SIGNATURES[library]:
            watched = getattr(home, name)
            original = watched.__wrapped__
            if top not in ("torch", "numpy") and names.get(name) is original:
                _replace(module, name, watched)


class _LibraryFinder(importlib.abc.MetaPathFinder):
    """A finder that finds nothing itself, and wraps a library once another one has loaded it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _SIGNATURES:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _LibraryFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._follow(name, spec.loader)
                return spec
        return None

    @staticmethod
    def _follow(name: str, loader: Any) -> None:
        """Let a loader wrap the library after it has run it, once."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if module.__name__ == name:
                del loader.exec_module
                if _listeners:
                    _watch_library(name, module)

        loader.exec_module = exec_module
