"""A network where it computes: in this process, or in another one that loads it by itself."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qgate.activation_stats.settings import MemorySettings
from qgate.activation_stats.subjects import MeasuredNetwork
from qgate.devices import resolve
from qgate.engine import PackedValue, Workers
from qgate.errors import QgateError
from qgate.hooks.offloading import fits, layer_by_layer

_FINGERPRINT_WEIGHTS = 64  # of each tensor


@dataclass
class LoadedNetwork:
    """A network on a device of this process; `step` is called with each sample's number."""

    root: nn.Module
    device: torch.device
    name: str
    notes: list[str] = field(default_factory=list)
    step: Callable[[int], None] = lambda _at: None


@dataclass(frozen=True, eq=False)
class NetworkRecipe:
    """A way for another process to get the same network: how to load it, or the module itself."""

    load: Callable[[], nn.Module] | None
    module: nn.Module | None
    name: str
    blocks: tuple[str, ...]
    memory: MemorySettings
    fingerprint: str


NetworkSource = LoadedNetwork | PackedValue[NetworkRecipe]
# The network of this process by the key of its recipe; it stays open until another one comes.
_loaded: dict[str, tuple[contextlib.ExitStack, LoadedNetwork]] = {}


def network_of(source: NetworkSource) -> LoadedNetwork:
    """Return the network of this process; it is loaded once."""
    if isinstance(source, LoadedNetwork):
        return source
    if source.key not in _loaded:
        for stack, _ in _loaded.values():
            stack.close()
        _loaded.clear()
        try:
            recipe = source.value()
        except (AttributeError, ImportError) as error:
            raise QgateError(
                f"another process cannot load the model: {error}. Its class belongs into a module "
                "that can be imported there; or leave --jobs and engine out."
            ) from error
        root = recipe.load() if recipe.load else recipe.module
        if root is None or _fingerprint(root) != recipe.fingerprint:
            raise QgateError(
                f"{recipe.name} has other weights each time it is loaded: seed what makes them, or "
                "leave --jobs and engine out."
            )
        stack = contextlib.ExitStack()
        network = stack.enter_context(
            _on_device(root, recipe.name, recipe.blocks, recipe.memory, recipe.load is None)
        )
        _loaded[source.key] = stack, network
    return _loaded[source.key][1]


def packed_recipe(
    subject: MeasuredNetwork, blocks: tuple[str, ...], memory: MemorySettings
) -> PackedValue[NetworkRecipe]:
    """Pack a network for other processes; a module without a name goes there with its weights."""
    module = subject.module if subject.from_caller else None
    try:
        fingerprint = _fingerprint(subject.module)
        return PackedValue(
            NetworkRecipe(subject.reload, module, subject.name, blocks, memory, fingerprint)
        )
    except Exception as error:
        raise QgateError(
            f"{subject.name} cannot be sent to other processes ({type(error).__name__}: {error}). "
            "Name a model that they can load (hf:PATH, FILE.py:build), or leave --jobs and "
            "engine out."
        ) from error


def _fingerprint(network: nn.Module) -> str:
    """Hash names, shapes and a few numbers of all weights: other weights have another one."""
    digest = hashlib.sha256()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            flat = tensor.detach().reshape(-1)
            few = flat[:: max(len(flat) // _FINGERPRINT_WEIGHTS, 1)].contiguous().cpu()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(few.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def network_source(
    subject: MeasuredNetwork, blocks: tuple[str, ...], memory: MemorySettings, workers: Workers
) -> Iterator[NetworkSource]:
    """Yield the network that passes run on: here, while this is open, or its recipe."""
    if not workers.is_here:
        yield packed_recipe(subject, blocks, memory)
        return
    with _on_device(subject.module, subject.name, blocks, memory, subject.from_caller) as network:
        yield network


@contextlib.contextmanager
def _on_device(
    root: nn.Module, name: str, blocks: tuple[str, ...], memory: Any, from_caller: bool
) -> Iterator[LoadedNetwork]:
    """Move it to the device; the module of a caller is where and as it was afterwards."""
    first = next((p.device for p in root.parameters()), torch.device("cpu"))
    device = first if memory.device == "auto" and from_caller else resolve(memory.device)
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
        with layer_by_layer(root, blocks, device, home=home), evaluation_mode(root):
            yield LoadedNetwork(root, device, name, [note])
        return
    try:
        if first != device:
            root.to(device)
        with evaluation_mode(root):
            yield LoadedNetwork(root, device, name)
    finally:
        if first != device and from_caller:
            root.to(first)


@contextlib.contextmanager
def evaluation_mode(root: nn.Module) -> Iterator[None]:
    """Switch dropout and caches off; afterwards all is as it was."""
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
