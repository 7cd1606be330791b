"""All known arithmetics by name, found in the files of this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import torch

import qgate.arithmetics
from qgate.arithmetics.attention import KnownAttention
from qgate.arithmetics.products import KnownProduct

__all__ = ["ATTENTIONS", "PRODUCTS", "KnownAttention", "KnownProduct", "products_for"]


def _entries() -> Iterator[KnownProduct | KnownAttention]:
    for info in pkgutil.iter_modules(qgate.arithmetics.__path__):
        if info.name != "known":
            yield from getattr(
                importlib.import_module(f"qgate.arithmetics.{info.name}"), "KNOWN", ()
            )


_ALL = list(_entries())
PRODUCTS = {entry.name: entry for entry in _ALL if isinstance(entry, KnownProduct)}
ATTENTIONS = {entry.name: entry for entry in _ALL if isinstance(entry, KnownAttention)}


def products_for(a: torch.dtype, b: torch.dtype) -> list[KnownProduct]:
    """List the arithmetics for operands of two dtypes."""
    return [product for product in PRODUCTS.values() if product.takes(a, b)]
