"""Tensors that a pass hands over at its sites, and parameters that stand in for others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qgate.gate.measuring.segment_views import Port
from qgate.hooks.tapping import tap_sites


class TakenTensors:
    """Tensors that a pass hands over; those that later code overwrites are copied."""

    def __init__(self, overwritten: Iterable[str] = (), copies: bool = False) -> None:
        self.tensors: dict[str, list[Tensor]] = {}
        self._copied = set(overwritten)
        self._copies = copies
        self._versions: list[tuple[str, Tensor, int]] = []
        self._clones: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def watch(self, module: nn.Module, ports: Sequence[Port]) -> Iterator[None]:
        first = [port for port in ports if port.first]
        after = [port for port in ports if not port.first]
        with (
            tap_sites(module, first, self._take, first=True),
            tap_sites(module, after, self._take),
        ):
            yield

    def _take(self, port: Port, tensor: Tensor) -> None:
        key = id(tensor), (version := _version(tensor))
        if key not in self._clones:
            is_copied = self._copies or port.name in self._copied
            self._clones[key] = tensor.detach().clone() if is_copied else tensor.detach()
        self._versions.append((port.name, tensor, version))
        self.tensors.setdefault(port.name, []).append(self._clones[key])

    def overwritten(self) -> set[str]:
        return {name for name, tensor, version in self._versions if _version(tensor) != version}

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._clones.values())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def swapped(module: nn.Module, parameters: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
    """Let modules compute with other parameters for a while."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, values in parameters.items():
            owner = module.get_submodule(name)
            for key, value in values.items():
                before.append((owner, key, owner._parameters[key]))
                owner._parameters[key] = value  # type: ignore[assignment]
        yield
    finally:
        for owner, key, parameter in before:
            owner._parameters[key] = parameter
