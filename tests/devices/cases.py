"""Cases of parts: functions of a setting that return a row, or what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.devices.journal import Journal
from tests.devices.record import Row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Setting:
    """Where cases run: a device by name, processes at once, a folder, and the journal of rows."""

    device: str
    jobs: int
    folder: Path
    journal: Journal

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)


Case = Callable[[Setting], "str | Row | None"]
Cases = dict[str, Case]


def checks(table: dict[str, Callable[[Any], str]]) -> Cases:
    """Return cases of functions that take a device and return what is wrong."""
    return {
        name: (lambda setting, check=check: check(setting.torch_device))
        for name, check in table.items()
    }


def noted(name: str, text: str, /, **figures: Any) -> Row:
    return Row(name, "noted", text, figures=figures)
