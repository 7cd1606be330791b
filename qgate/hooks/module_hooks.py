"""Hooks on modules, added and removed together; all hooks of qgate go through this file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[..., Any]


class Handle(Protocol):
    """A handle that torch returns for a hook on a module, a tensor or a node of the graph."""

    def remove(self) -> None: ...


class _Uncopied:
    """A hook that a copied or pickled module does not get: there stands a call without effect."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library, so that a program without qgate can load the module.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ModuleHooks:
    """Hooks that are removed together: at the end of a `with` block, also after an error.

    Copies of a module, and pickled ones, have its hooks, too; without those that are not `copied`.
    """

    def __init__(self, *, copied: bool = True) -> None:
        self._handles: list[Handle] = []
        self._copied = copied
        self._modules: dict[int, nn.Module] = {}

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
        if not self._copied:
            self._modules[id(module)] = module
            before, after = (hook and _Uncopied(hook) for hook in (before, after))
        if before is not None:
            self.keep(module.register_forward_pre_hook(before, with_kwargs=True, prepend=first))
        if after is not None:
            register = module.register_forward_hook
            self.keep(register(after, prepend=first, with_kwargs=named, always_call=always))

    def keep(self, *handles: Handle) -> None:
        """Keep handles of other hooks, to remove them at the same time."""
        self._handles += handles

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Take hooks that are not copied off their modules for a while, and keep their order."""
        tables = [
            (table, list(table.items()))
            for module in self._modules.values()
            for table in (module._forward_pre_hooks, module._forward_hooks)
        ]
        for table, hooks in tables:
            for key, hook in hooks:
                if isinstance(hook, _Uncopied):
                    del table[key]
        try:
            yield
        finally:
            for table, hooks in tables:
                own = {key for key, hook in hooks if isinstance(hook, _Uncopied) and self._modules}
                merged = {key: hook for key, hook in hooks if key in own or key in table} | table
                table.clear()
                table.update(merged)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._modules.clear()

    def __enter__(self) -> ModuleHooks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
