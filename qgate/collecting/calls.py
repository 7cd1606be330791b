"""Calls of collected sites, which label tensors, and an account of records that are missing.

Gradients are labeled by the forward call they belong to. With activation checkpointing that call
ran without a graph; the repeated call of the backward pass stands for it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qgate.text import listed, one_line

_MOST = 8


@dataclass(frozen=True)
class CollectedSite:
    """A site that is collected: the fields that all its records share."""

    module: str
    layer_type: str
    component: str
    layer: int | None = None


@dataclass(eq=False)
class ModuleCall:
    """One forward call; `has_gradients` once hooks wait for its gradients."""

    site: CollectedSite
    iteration: int
    micro_batch: int
    sample: int | None
    quant_type: str
    index: int
    has_gradients: bool = False


@dataclass(eq=False)
class RepeatedCall:
    """A call repeated in a backward pass; the call it stands for is known at its end."""

    calls: Calls
    site: CollectedSite
    group: list[RepeatedCall]
    call: ModuleCall | None = None

    def resolved(self) -> ModuleCall | None:
        if self.call is None:
            self.calls.resolve(self.site, self.group)
        return self.call


@dataclass
class Calls:
    """The calls of one iteration."""

    forward: dict[CollectedSite, list[ModuleCall]] = field(default_factory=dict)
    _groups: dict[tuple[CollectedSite, int], list[RepeatedCall]] = field(default_factory=dict)

    def begin(
        self,
        site: CollectedSite,
        iteration: int,
        micro_batch: int,
        sample: int | None,
        quant_type: str,
    ) -> ModuleCall:
        calls = self.forward.setdefault(site, [])
        calls.append(ModuleCall(site, iteration, micro_batch, sample, quant_type, len(calls)))
        return calls[-1]

    def repeat(self, site: CollectedSite, node: int) -> RepeatedCall | None:
        """Note a call that a node of the backward pass repeats.

        None if all calls have a graph: the repetition then only restores its activations.
        """
        if all(call.has_gradients for call in self.forward.get(site, [])):
            return None
        group = self._groups.setdefault((site, node), [])
        if group and group[0].call is not None:
            group = self._groups[site, node] = []
        group.append(RepeatedCall(self, site, group))
        return group[-1]

    def resolve(self, site: CollectedSite, group: list[RepeatedCall]) -> None:
        """Match a group of repeated calls with forward calls.

        Checkpointed segments are repeated from the last to the first, each in its own order;
        micro-batches come back in forward order.
        """
        open_calls = [call for call in self.forward.get(site, []) if not call.has_gradients]
        first = min((call.micro_batch for call in open_calls), default=0)
        open_calls = [call for call in open_calls if call.micro_batch == first]
        for repeated, call in zip(reversed(group), reversed(open_calls), strict=False):
            repeated.call, call.has_gradients = call, True


def tensors_in(result: Any) -> list[Tensor]:
    """List the tensors in tuples, lists, dictionaries and records of any depth."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = list(result.values())
    elif dataclasses.is_dataclass(result):
        result = [getattr(result, field.name, None) for field in dataclasses.fields(result)]
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in tensors_in(item)]
    return []


class Account:
    """Counts of records, and reasons for missing ones; `expected` gradients may still come."""

    def __init__(self) -> None:
        self.records: collections.Counter[str] = collections.Counter()
        self.iterations: list[int] = []
        self.missing: list[str] = []
        self.notes: list[str] = []
        self.expected: dict[tuple[ModuleCall | RepeatedCall, str], CollectedSite] = {}
        self._failures: dict[str, list[str]] = {}

    def add_failure(self, site: CollectedSite, error: BaseException) -> None:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._failures.setdefault(why[:200], []).append(site.module)

    def end(
        self, label: int, calls: Calls, outputs: Mapping[CollectedSite, str], backward: bool
    ) -> None:
        """End an iteration, and report gradients that did not come.

        `outputs` has the output name of each site; it is empty where attention functions are
        expected.
        """
        self.iterations.append(label)
        ran = {site.module for site in calls.forward}
        functions = [f"{site.module}." for site in calls.forward if site.component == "FA"]
        missing: dict[str, list[str]] = collections.defaultdict(list)
        for site, output in outputs.items():
            if output and site.module not in ran:
                missing["nothing ran in"].append(site.module)
        for site, output in outputs.items():
            if not output and not any(name.startswith(f"{site.module}.") for name in functions):
                missing["no attention function was seen in"].append(site.module)
        for (_, name), site in self.expected.items():
            missing[f"{name} never came to"].append(site.module)
        for why, modules in self._failures.items():
            missing[f"{why} at"] += modules
        self.expected.clear()
        self._failures.clear()
        prefix = f"iteration {label}"
        self.missing += [
            f"{prefix}: {problem} {_listing(names)}" for problem, names in missing.items()
        ]
        if backward and calls.forward:
            bare = [
                site
                for site, site_calls in calls.forward.items()
                if not any(call.has_gradients for call in site_calls)
            ]
            if len(bare) == len(calls.forward):
                self.missing.append(f"{prefix}: no gradients, the model ran without a graph")
            elif bare:
                self.notes.append(f"{prefix}: no gradient in {_listing(s.module for s in bare)}")

    def stop(self, requested: int, why: str = "") -> None:
        """Report iterations that are missing at the end."""
        missing = requested - len(self.iterations)
        if missing > 0:
            self.missing.append(
                f"{missing} of {requested} iterations{f': stopped by {why}' if why else ''}"
            )

    def text(self) -> str:
        total = sum(self.records.values())
        kinds = ", ".join(f"{count} {name}" for name, count in self.records.items())
        complete = ", ".join(map(str, self.iterations)) or "none"
        lines = [f"iterations whole: {complete}; {total} records ({kinds or 'none'})"]
        lines += [f"missing: {text}" for text in self.missing] or ["nothing is missing"]
        return "\n".join(map(one_line, [*lines, *self.notes]))


def _listing(modules: Iterable[str]) -> str:
    return listed(list(dict.fromkeys(name or "the model" for name in modules)), _MOST)
