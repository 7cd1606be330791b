"""Random numbers that a network draws in evaluation, as ViLT draws the order of its patches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qgate.hooks.module_hooks import ModuleHooks

_SEED = 0


def draws_numbers(run: Callable[[], object]) -> bool:
    """Run a network and tell if it drew from torch's generator."""
    before = _states()
    run()
    return any(not torch.equal(old, new) for old, new in zip(before, _states(), strict=True))


def repeat_draws(network: nn.Module) -> ModuleHooks:
    """Give a network the same random numbers in every run, and leave the caller's generator."""
    opened = contextlib.ExitStack()

    def seed(module: nn.Module, _args: Any, _kwargs: Any) -> None:
        opened.enter_context(torch.random.fork_rng(devices=[]))
        devices = {p.device for p in module.parameters()}
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            if hasattr(torch.get_device_module(kind), "get_rng_state"):
                own = [device for device in devices if device.type == kind]
                opened.enter_context(torch.random.fork_rng(devices=own, device_type=kind))
        torch.manual_seed(_SEED)

    def restore(_module: nn.Module, _args: Any, _result: Any) -> None:
        opened.close()

    hooks = ModuleHooks()
    hooks.add(network, seed, restore, first=True, always=True)
    return hooks


def _states() -> list[Tensor]:
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_devices]
