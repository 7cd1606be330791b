"""The first model that a program calls, which is found from outside."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from qgate.collecting.collector import Collector, is_collecting
from qgate.collecting.targets import choose
from qgate.errors import QgateError


class FirstModel:
    """Starts `make(module)` at the first call of a module that has the requested sites.

    The first module that is called is the outermost, wrappers included. A program that collects by
    itself keeps its own collector. Errors of `make` are raised at once.
    """

    def __init__(self, make: Callable[[nn.Module], Collector]) -> None:
        self.collector: Collector | None = None
        self.found_collector = False
        self._make = make
        self._sites = make(nn.Identity()).settings.sites
        self._called_modules: set[int] = set()
        self._lock = threading.RLock()
        self._handle: Any = register_module_forward_pre_hook(self._on_call)
        self._eager: Any = None
        self._compile = torch.compile
        torch.compile = self._compile_later  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"sites {self._sites!r}"

    def remove(self) -> None:
        self._handle.remove()
        torch.compile = self._compile
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    @functools.wraps(torch.compile)
    def _compile_later(self, *args: Any, **kwargs: Any) -> Any:
        """Compile what runs eagerly until the model is found: compiled code skips hooks."""
        if self._eager is None:
            self._eager = torch.compiler.set_stance("force_eager")
        return self._compile(*args, **kwargs)

    def _on_call(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        with self._lock:
            if id(module) not in self._called_modules:
                self._called_modules.add(id(module))
                self._look_at(module)

    def _look_at(self, module: nn.Module) -> None:
        if self.collector is not None:
            return
        if is_collecting():
            self.remove()
            self.found_collector = True
        elif self._fits(module):
            self.remove()
            self.collector = self._make(module).start()
            # torch gathered the hooks of this call before they were added.
            self.collector.enter()

    def _fits(self, module: nn.Module) -> bool:
        try:
            return bool(choose(module, self._sites).targets)
        except QgateError as error:
            if "match no module" not in str(error):
                raise
            return False
