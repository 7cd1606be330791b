"""Hooks on modules, added and removed together; all hooks of qgate go through this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[..., Any]


class Handle(Protocol):
    """A handle that torch returns for a hook on a module, a tensor or a node of the graph."""

    def remove(self) -> None: ...


class ModuleHooks:
    """Hooks that are removed together: at the end of a `with` block, also after an error."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def add(
        self,
        module: nn.Module,
        before: Before | None = None,
        after: After | None = None,
        *,
        first: bool = False,
        always: bool = False,
        named: bool = False,
    ) -> None:
        """Call `before(module, args, kwargs)` and `after(module, args, result)` with each call.

        A value that they return replaces the arguments or the result. `first` runs before other
        hooks, `always` also after a call that raised; `named` gives `after` the kwargs, too, before
        the result. Without `remove`, hooks stay as long as the module.
        """
        if before is not None:
            self.keep(module.register_forward_pre_hook(before, with_kwargs=True, prepend=first))
        if after is not None:
            register = module.register_forward_hook
            self.keep(register(after, prepend=first, with_kwargs=named, always_call=always))

    def keep(self, *handles: Handle) -> None:
        """Keep handles of other hooks, to remove them at the same time."""
        self._handles += handles

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> ModuleHooks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
