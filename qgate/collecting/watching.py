"""A collector for a program that knows nothing of it: it starts with the first model that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from qgate.collecting.collector import Collector, is_collecting
from qgate.collecting.targets import choose
from qgate.errors import QgateError


class FirstModel:
    """Waits for the first call of a module that has what is asked for, and starts `make` of it.

    The first module to be called is the outermost: wrappers and all. A program that collects by
    itself is left alone. What `make` refuses is refused at once.
    """

    def __init__(self, make: Callable[[nn.Module], Collector]) -> None:
        self.collector: Collector | None = None
        self.left_alone = False
        self._make = make
        self._sites = make(nn.Identity()).wanted.sites
        self._seen: set[int] = set()
        self._handle: Any = register_module_forward_pre_hook(self._called)

    def __str__(self) -> str:
        return f"sites {self._sites!r}"

    def remove(self) -> None:
        self._handle.remove()

    def _called(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or id(module) in self._seen:
            return
        self._seen.add(id(module))
        if is_collecting():
            self.remove()
            self.left_alone = True
        elif self._fits(module):
            self.remove()
            self.collector = self._make(module).start()
            # The hooks of this very call were gathered before there were any.
            self.collector.enter()

    def _fits(self, module: nn.Module) -> bool:
        try:
            return bool(choose(module, self._sites).targets)
        except QgateError as error:
            if "match no module" not in str(error):
                raise
            return False
