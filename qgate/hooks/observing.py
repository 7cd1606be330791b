"""Hooks on any torch module that hand over its inputs and outputs during a call."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.hooks.module_hooks import ModuleHooks
from qgate.hooks.nested import first_float_tensor
from qgate.text import listed

INPUT, OUTPUT, WEIGHT = "input", "output", "weight"
See = Callable[[str, str, Tensor], None]
_MOST = 20


@dataclass
class ObservedCalls:
    """Calls of modules while hooks are on them, and calls without floating point numbers."""

    ports: tuple[tuple[str, str], ...]
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    empty: Counter[tuple[str, str]] = field(default_factory=Counter)

    def silent(self) -> list[tuple[str, str]]:
        """List modules that never ran, or never had numbers in that role."""
        return [port for port in self.ports if not self.calls[port]]

    def numberless(self) -> list[tuple[str, str]]:
        """List modules that ran without numbers in that role, as an embedding gets ids."""
        return [port for port in self.silent() if self.empty[port]]

    def check(self) -> None:
        """Refuse a run in which no module had numbers."""
        silent = self.silent()
        if self.ports and len(silent) == len(self.ports):
            without = sum(1 for port in silent if self.empty[port])
            why = (
                "they were given no floating point numbers"
                if without == len(silent)
                else "their forward was never called; a fused path goes around them, or none"
            )
            names = listed([f"{module} ({role})" for module, role in silent], _MOST)
            raise QgateError(f"nothing was seen of {names}: {why}.")


def compile_pattern(pattern: str, noun: str = "pattern") -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise QgateError(f"{noun} {pattern!r} is not a regular expression: {error}.") from None


def matching_modules(root: nn.Module, pattern: str, noun: str = "pattern") -> list[str]:
    """List names of modules that match a regular expression, in the order of registration.

    The root itself has the empty name.
    """
    regex = compile_pattern(pattern, noun)
    names = [name for name, _ in root.named_modules()]
    matches = [name for name in names if regex.search(name)]
    if not matches:
        raise QgateError(
            f"{noun} {pattern!r} matches no module. The first names are "
            f"{listed([name for name in names if name], _MOST) or 'none'}."
        )
    return matches


@contextlib.contextmanager
def observe_calls(
    root: nn.Module, roles: Mapping[str, Iterable[str]], see: See
) -> Iterator[ObservedCalls]:
    """While open, call `see(module, role, tensor)` for each call of the modules in `roles`.

    The tensor is the first one of floating point numbers among inputs or outputs. `roles` has the
    roles of each module name. The hooks are removed at the end, also after an error.
    """
    ports = tuple((name, role) for name, module_roles in roles.items() for role in module_roles)
    observed = ObservedCalls(tuple(pair for pair in ports if pair[1] != WEIGHT))

    def observe(name: str, role: str, value: Any) -> None:
        tensor = first_float_tensor(value)
        if tensor is None:
            observed.empty[name, role] += 1
            return
        observed.calls[name, role] += 1
        see(name, role, tensor)

    with ModuleHooks() as hooks:
        for name, role in observed.ports:
            try:
                module = root.get_submodule(name)
            except AttributeError:
                raise QgateError(f"there is no module {name!r} in {type(root).__name__}.") from None

            def before(_m: Any, args: Any, kwargs: dict[str, object], name: str = name) -> None:
                observe(name, INPUT, [*args, *kwargs.values()])

            def after(_module: Any, _args: Any, result: Any, name: str = name) -> None:
                observe(name, OUTPUT, result)

            if role not in (INPUT, OUTPUT):
                raise QgateError(f"{name}: a role is input, output or weight, not {role!r}.")
            hooks.add(module, *((before, None) if role == INPUT else (None, after)))
        yield observed
