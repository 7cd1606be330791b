"""Registry of named entries, for look-ups, command-line choices, documentation and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from qgate.errors import QgateError, unknown


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """Entries in order of registration, with names and aliases in any case."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.entries: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self.families: list[Callable[[str], T | None]] = []
        """Makers of entries by name that are not listed; None means another family's name."""

    def add(self, entry: T, *aliases: str) -> T:
        for name in (entry.name, *aliases):
            if name in self.entries or name in self._aliases:
                raise QgateError(f"{self.noun} {name!r} is registered twice.")
        self.entries[entry.name] = entry
        self._aliases.update(dict.fromkeys(aliases, entry.name))
        return entry

    def remove(self, name: str) -> None:
        """Remove an entry with its aliases."""
        del self.entries[name]
        self._aliases = {alias: of for alias, of in self._aliases.items() if of != name}

    def get(self, name: str) -> T:
        key = str(name).strip().lower().replace("-", "_")
        entry = self.entries.get(self._aliases.get(key, key))
        for resolve in self.families if entry is None else []:
            entry = entry or resolve(key)
        if entry is None:
            raise unknown(self.noun, name, self.entries, self._aliases)
        return entry

    def aliases(self, name: str) -> list[str]:
        """List the aliases of an entry."""
        return [alias for alias, target in self._aliases.items() if target == name]

    def names(self) -> list[str]:
        return list(self.entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)
