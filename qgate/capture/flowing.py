"""Hooks on any torch module: what flows into and out of modules, handed over as it flows.

Nothing is kept here. A tensor that several modules get, as those of queries, keys and values do, is
looked at once: `Once` knows what was made of it while it is alive and not written to.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from qgate.errors import QgateError

INPUT, OUTPUT, WEIGHT = "input", "output", "weight"
See = Callable[[str, str, Tensor], None]
T = TypeVar("T")
_MOST = 20
_DEEP = 4


@dataclass
class Flowed:
    """Which modules ran while hooks were there, and which handed over no floating point numbers."""

    wanted: tuple[tuple[str, str], ...]
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    empty: Counter[tuple[str, str]] = field(default_factory=Counter)

    def silent(self) -> list[tuple[str, str]]:
        """Modules that were matched and never ran, or never had numbers in that role."""
        return [each for each in self.wanted if not self.calls[each]]

    def numberless(self) -> list[tuple[str, str]]:
        """Modules that ran, and never had numbers in that role: they are given ids, or nothing."""
        return [each for each in self.silent() if self.empty[each]]

    def check(self) -> None:
        """Refuse a run in which nothing that was matched had anything to look at."""
        silent = self.silent()
        if self.wanted and len(silent) == len(self.wanted):
            without = sum(1 for each in silent if self.empty[each])
            why = (
                "they were given no floating point numbers"
                if without == len(silent)
                else "their forward was never called; a fused path goes around them, or none"
            )
            names = listed([f"{module} ({role})" for module, role in silent])
            raise QgateError(f"nothing was seen of {names}: {why}.")


def listed(names: Sequence[str], most: int = _MOST) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def compiled(pattern: str, what: str = "pattern") -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise QgateError(f"{what} {pattern!r} is not a regular expression: {error}.") from None


def matching(root: nn.Module, pattern: str, what: str = "pattern") -> list[str]:
    """Names of modules that a regular expression finds in, in the order they were registered; the
    module itself has the empty name."""
    inside = compiled(pattern, what)
    names = [name for name, _ in root.named_modules()]
    found = [name for name in names if inside.search(name)]
    if not found:
        raise QgateError(
            f"{what} {pattern!r} matches no module. The first names are "
            f"{listed([name for name in names if name]) or 'none'}."
        )
    return found


@contextlib.contextmanager
def flowing(root: nn.Module, wanted: Mapping[str, Iterable[str]], see: See) -> Iterator[Flowed]:
    """While open, `see(module, role, tensor)` is called for each call of each module wanted, with
    the first tensor of floating point numbers that it is given or returns.

    `wanted` has roles by module name. The hooks are gone afterwards, also after an error.
    """
    pairs = tuple((name, role) for name, roles in wanted.items() for role in roles)
    flowed = Flowed(tuple(pair for pair in pairs if pair[1] != WEIGHT))
    handles: list[Any] = []
    try:
        for name, role in flowed.wanted:
            module = _module(root, name)
            if role == INPUT:
                hook = _before(name, see, flowed)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            elif role == OUTPUT:
                handles.append(module.register_forward_hook(_after(name, see, flowed)))
            else:
                raise QgateError(f"{name}: a role is input, output or weight, not {role!r}.")
        yield flowed
    finally:
        for handle in handles:
            handle.remove()


def _module(root: nn.Module, name: str) -> nn.Module:
    try:
        return root.get_submodule(name)
    except AttributeError:
        raise QgateError(f"there is no module {name!r} in {type(root).__name__}.") from None


def _before(name: str, see: See, flowed: Flowed) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _tell(name, INPUT, [*args, *kwargs.values()], see, flowed)

    return hook


def _after(name: str, see: See, flowed: Flowed) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, result: Any) -> None:
        _tell(name, OUTPUT, result, see, flowed)

    return hook


def _tell(name: str, role: str, value: Any, see: See, flowed: Flowed) -> None:
    tensor = first_numbers(value)
    if tensor is None:
        flowed.empty[name, role] += 1
        return
    flowed.calls[name, role] += 1
    see(name, role, tensor)


def first_numbers(value: Any, depth: int = _DEEP) -> Tensor | None:
    """The first tensor of floating point numbers in tuples, dicts and outputs of Hugging Face."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if depth == 0 or value is None or isinstance(value, str | bytes):
        return None
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, name, None) for name in value.__dataclass_fields__]
    else:
        return None
    for item in items:
        found = first_numbers(item, depth - 1)
        if found is not None:
            return found
    return None


class Once(Generic[T]):
    """What was made of the last few tensors, so that a shared one is looked at once.

    A tensor is the same as long as it is alive and was not written to.
    """

    def __init__(self, make: Callable[[Tensor], T], room: int = 4) -> None:
        self._make, self._room = make, room
        self._kept: list[tuple[weakref.ref[Tensor], int, Any, T]] = []
        self.made = 0

    def __call__(self, tensor: Tensor, key: Any = None) -> T:
        """`key` tells apart what is to be made of the same tensor in several ways."""
        version = -1 if tensor.is_inference() else tensor._version
        for known, at, how, made in self._kept:
            if known() is tensor and at == version and how == key and version >= 0:
                return made
        made = self._make(tensor)
        self.made += 1
        alive = [each for each in self._kept if each[0]() is not None]
        self._kept = [*alive[-(self._room - 1) :], (weakref.ref(tensor), version, key, made)]
        return made

    def forget(self) -> None:
        self._kept.clear()
