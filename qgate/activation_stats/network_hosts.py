"""A network where it computes: in this process, or in another one that loads it by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qgate.activation_stats._sending import fingerprint
from qgate.activation_stats.settings import MemorySettings
from qgate.activation_stats.subjects import MeasuredNetwork
from qgate.capture.offloading import fits, layer_by_layer
from qgate.devices import resolve
from qgate.engine import Sent, Workers
from qgate.errors import QgateError


@dataclass
class Host:
    """A network on a device of this process; `step` is told the sample that it is at."""

    root: nn.Module
    device: torch.device
    name: str
    notes: list[str] = field(default_factory=list)
    step: Callable[[int], None] = lambda _at: None


@dataclass(frozen=True, eq=False)
class Recipe:
    """What another process needs in order to have the same network: how to load it, or itself."""

    load: Callable[[], nn.Module] | None
    module: nn.Module | None
    name: str
    blocks: tuple[str, ...]
    memory: MemorySettings
    fingerprint: str

    def network(self) -> nn.Module:
        made = self.module if self.load is None else self.load()
        if made is None or fingerprint(made) != self.fingerprint:
            raise QgateError(
                f"the weights of {self.name} are others each time that it is loaded: seed what "
                "makes them, or leave --jobs and --engine out."
            )
        return made


Where = Host | Sent[Recipe]
# Of this process, by the recipe that it is of; what is open stays so until another one comes.
_hosts: dict[str, tuple[contextlib.ExitStack, Host]] = {}


def host_of(where: Where) -> Host:
    """The network of this process; it is loaded once."""
    if isinstance(where, Host):
        return where
    if where.key not in _hosts:
        for stack, _ in _hosts.values():
            stack.close()
        _hosts.clear()
        recipe = _unpacked(where)
        root, given = recipe.network(), recipe.load is None
        stack = contextlib.ExitStack()
        host = stack.enter_context(hosted(root, recipe.name, recipe.blocks, recipe.memory, given))
        _hosts[where.key] = stack, host
    return _hosts[where.key][1]


def _unpacked(sent: Sent[Recipe]) -> Recipe:
    try:
        return sent.value()
    except (AttributeError, ImportError) as error:
        raise QgateError(
            f"another process cannot load the model: {error}. Its class belongs into a module that "
            "can be imported there; or leave --jobs and --engine out."
        ) from error


def sent(subject: MeasuredNetwork, blocks: tuple[str, ...], memory: MemorySettings) -> Sent[Recipe]:
    """For other processes; a module that nothing names goes there itself, with its weights."""
    again = subject.again
    own = subject.module if again is None else None
    try:
        mark = fingerprint(subject.module)
        return Sent(Recipe(again, own, subject.name, blocks, memory, mark))
    except Exception as error:
        raise QgateError(
            f"{subject.name} cannot be sent to other processes ({type(error).__name__}: {error}). "
            "Name a model that they can load (hf:PATH, FILE.py:build), or leave --jobs and "
            "--engine out."
        ) from error


@contextlib.contextmanager
def placed(
    subject: MeasuredNetwork, blocks: tuple[str, ...], memory: MemorySettings, workers: Workers
) -> Iterator[Where]:
    """Where passes run: here, for as long as this is open, or with the workers."""
    if not workers.is_here:
        yield sent(subject, blocks, memory)
        return
    with hosted(subject.module, subject.name, blocks, memory, subject.given) as host:
        yield host


@contextlib.contextmanager
def hosted(
    root: nn.Module, name: str, blocks: tuple[str, ...], memory: MemorySettings, given: bool
) -> Iterator[Host]:
    """On the device; the module of a caller is where it was, and as it was, afterwards."""
    first = next((p.device for p in root.parameters()), torch.device("cpu"))
    auto = memory.device == "auto"
    device = first if auto and given else resolve(memory.device)
    home = resolve(memory.offload_device)
    if memory.auto_offload and not fits(root, device):
        if not blocks:
            raise QgateError(
                f"{name} does not fit {device}, and has no list of blocks that could come one by "
                "one."
            )
        note = (
            f"the model does not fit {device}: its {len(blocks)} blocks came one by one from "
            f"{home}."
        )
        with layer_by_layer(root, blocks, device, home=home), evaluating(root):
            yield Host(root, device, name, [note])
        return
    moved = first != device
    try:
        if moved:
            root.to(device)
        with evaluating(root):
            yield Host(root, device, name)
    finally:
        if moved and given:
            root.to(first)


@contextlib.contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """No dropout, no caches; afterwards as it was."""
    training = [module for module in root.modules() if module.training]
    configs: list[Any] = [getattr(module, "config", None) for module in root.modules()]
    caching = {id(c): c for c in configs if getattr(c, "use_cache", False) is True}
    try:
        root.eval()
        for config in caching.values():
            config.use_cache = False
        yield
    finally:
        for module in training:
            module.training = True
        for config in caching.values():
            config.use_cache = True
