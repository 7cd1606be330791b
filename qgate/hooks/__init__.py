"""Hooks on torch modules: what flows through them is handed over, and no trace is left."""

from qgate.hooks.module_hooks import ModuleHooks

__all__ = ["ModuleHooks"]
