"""What a collector got, and what it should have got and did not."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from qgate.collecting.calls import Again, Calls, CollectedPlace, ModuleCall, without_gradient
from qgate.collecting.targets import CollectedModule

_MOST = 8


class Account:
    """Counts what is kept; gradients that are on their way are expected until they arrive."""

    def __init__(self) -> None:
        self.records: collections.Counter[str] = collections.Counter()
        self.iterations: list[int] = []
        self.missing: list[str] = []
        self.notes: list[str] = []
        self._expected: dict[tuple[ModuleCall | Again, str], CollectedPlace] = {}
        self._failures: dict[str, list[str]] = {}

    def kept(self, operation: str, name: str) -> None:
        self.records[f"{operation} {name}"] += 1

    def expect(self, call: ModuleCall | Again, spot: CollectedPlace, names: Iterable[str]) -> None:
        self._expected |= {(call, name): spot for name in names}

    def arrived(self, call: ModuleCall | Again, name: str) -> None:
        self._expected.pop((call, name), None)

    def failed(self, spot: CollectedPlace, error: BaseException) -> None:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._failures.setdefault(why[:200], []).append(spot.module)

    def lost(self, title: str, error: Exception) -> None:
        """A record that was taken and could not be stored; told by the thread that writes."""
        self.missing.append(f"{title}: {error}")

    def end(
        self, label: int, calls: Calls, targets: Sequence[CollectedModule], backward: bool
    ) -> None:
        """An iteration is over: what did not come by now will not come."""
        self.iterations.append(label)
        when = f"iteration {label}"
        ran = {spot.module for spot in calls.made}
        functions = [spot.module for spot in calls.made if spot.component == "FA"]
        idle = [t.spot.module for t in targets if t.output and t.spot.module not in ran]
        empty = [
            target.spot.module
            for target in targets
            if not target.output
            and not any(f"{name}.".startswith(f"{target.spot.module}.") for name in functions)
        ]
        self._miss(f"{when}: nothing ran in", idle)
        self._miss(f"{when}: no attention function was seen in", empty)
        late: dict[str, list[str]] = {}
        for (_, name), spot in self._expected.items():
            late.setdefault(name, []).append(spot.module)
        for name, modules in late.items():
            self._miss(f"{when}: {name} never came to", modules)
        self._expected.clear()
        for why, modules in self._failures.items():
            self._miss(f"{when}: {why} at", modules)
        self._failures.clear()
        if backward and calls.made:
            flat = without_gradient(calls)
            if len(flat) == len(calls.made):
                self.missing.append(f"{when}: no gradients, the model ran without a graph")
            elif flat:
                self.notes.append(f"{when}: no gradient in {_listed([s.module for s in flat])}")

    def stopped(self, asked: int, why: str = "") -> None:
        """Say which iterations are missing in the end."""
        left = asked - len(self.iterations)
        if left > 0:
            self.missing.append(
                f"{left} of {asked} iterations{f': stopped by {why}' if why else ''}"
            )

    def _miss(self, what: str, modules: Sequence[str]) -> None:
        if modules:
            self.missing.append(f"{what} {_listed(modules)}")

    def text(self) -> str:
        total = sum(self.records.values())
        kinds = ", ".join(f"{count} {name}" for name, count in self.records.items())
        got = ", ".join(map(str, self.iterations)) or "none"
        lines = [f"iterations whole: {got}; {total} records ({kinds or 'none'})"]
        lines += [f"missing: {each}" for each in self.missing] or ["nothing is missing"]
        return "\n".join([*lines, *self.notes])


def _listed(modules: Sequence[str]) -> str:
    names = list(dict.fromkeys(name or "the model" for name in modules))
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + rest
