"""Differences between the headers of runs: what changed besides the values one compares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qgate.results.other_tests import ended_badly, is_finished, other_tests_of, other_tests_text
from qgate.text import one_line

# Whatever is written about these, numbers may differ because of it.
_PLAIN = ("commit", "device", "torch", "python", "qgate", "seed", "reference", "command")
_LONGEST = 60


class Difference(NamedTuple):
    """A difference between runs; a warning where it changes the meaning of their values.

    `values` has one text per run, or none where `about` says it all.
    """

    what: str
    about: str
    values: tuple[str, ...]
    warning: bool = True

    def text(self, names: Sequence[str]) -> str:
        """Return `commit: before 1a2b, after 3c4d`."""
        values = [f"{name} {value}" for name, value in zip(names, self.values, strict=False)]
        return f"{self.what}: {': '.join(filter(None, [self.about, ', '.join(values)]))}"


def differences(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return all differences, warnings first."""
    collected = [*_models(headers), *_limits(headers), *_plans(headers)]
    collected += [*_incomplete(names, headers), *_unwell(names, headers)]
    for key in _PLAIN:
        values = [header.get(key) for header in headers]
        if any(value != values[0] for value in values):
            texts = tuple(_shown(key, value) for value in values)
            collected.append(Difference(key, "", texts, warning=key in ("seed", "reference")))
    return sorted(collected, key=lambda difference: not difference.warning)


def _models(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    models_by_run = [header["models"] for header in headers]
    everywhere = set(models_by_run[0]).intersection(*models_by_run[1:])
    collected = []
    if any(set(models) != set(models_by_run[0]) for models in models_by_run):
        texts = tuple(", ".join(map(one_line, models)) or "none" for models in models_by_run)
        other = not everywhere
        collected.append(
            Difference("models", "different models are compared" if other else "", texts, other)
        )
    for model in sorted(everywhere):
        for field, words in (("weights", "other weights"), ("inputs", "other samples")):
            values = [str(models[model].get(field, "")) for models in models_by_run]
            if len(set(values)) > 1:
                texts = tuple(_cut(value, 12) for value in values)
                collected.append(Difference(one_line(model), words, texts))
    return collected


def _limits(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Compare limits by model and source: each verdict depends on them."""
    limits_by_run = [
        {
            (str(limits.get("model", "")), str(limits.get("source", ""))): limits
            for limits in h["limits"]
        }
        for h in headers
    ]
    collected = []
    for model, source in dict.fromkeys(key for limits in limits_by_run for key in limits):
        rows = [limits.get((model, source)) for limits in limits_by_run]
        present = [row for row in rows if row is not None]
        if len(present) < len(rows):
            values = tuple("none" if row is None else "there" for row in rows)
            collected.append(Difference("limits", one_line(f"{source} of {model}"), values))
            continue
        for key in dict.fromkeys(key for row in present for key in row):
            if any(row.get(key) != present[0].get(key) for row in present):
                texts = tuple(_shown(key, row.get(key)) for row in present)
                collected.append(
                    Difference("limits", one_line(f"{key}, {source} of {model}"), texts)
                )
    return collected


def _plans(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return modes of one name whose plans differ."""
    plans_by_run = [header["plans"] for header in headers]
    collected = []
    for name in set(plans_by_run[0]).intersection(*plans_by_run[1:]):
        plans = [plans_of_run[name] for plans_of_run in plans_by_run]
        sites = dict.fromkeys(site for plan in plans for site in plan)
        other = [site for site in sites if any(p.get(site) != plans[0].get(site) for p in plans)]
        if other:
            about = f"{len(other)} sites are quantized otherwise, such as {other[0]}"
            values = tuple(_cut(str(plan.get(other[0], "not at all")), _LONGEST) for plan in plans)
            collected.append(Difference(f"plan of {one_line(name)}", one_line(about), values))
    return sorted(collected)


def _unwell(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return runs that failed apart from their gates, and shards: their equal gates say little."""
    collected = []
    for name, header in zip(names, headers, strict=True):
        broken, errors = len(header.get("broken") or {}), len(header.get("errors") or [])
        shard = header.get("shard") or {}
        reasons = [
            f"{broken} tests had no verdict" if broken else "",
            other_tests_text(other_tests_of(header)).partition(",")[0],
            f"{errors} errors" if errors else "",
            f"it is shard {shard.get('number')} of {shard.get('of')}" if shard else "",
        ]
        problems = [reason for reason in reasons if reason] or [ended_badly(header)]
        if any(problems):
            collected.append(Difference("verdict", one_line(f"{name}: {', '.join(problems)}"), ()))
    return collected


def _incomplete(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return runs of a part of the tests: gates that they lack are not gone."""
    ended = [is_finished(header) for header in headers]
    if not all(ended):
        off = ", ".join(name for name, whole in zip(names, ended, strict=True) if not whole)
        return [Difference("complete", f"{off} was broken off before its end", ())]
    complete = [header.get("complete", True) for header in headers]
    if all(complete) or not any(complete):
        return []
    less = [name for name, whole in zip(names, complete, strict=True) if not whole]
    about = f"{', '.join(less)} ran a part of the tests, or was broken off"
    return [Difference("complete", about, ())]


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key == "commit":
        return _cut(one_line(value), 12)
    if key == "command" and isinstance(value, list):
        return _cut(one_line(" ".join(map(str, value))) or "none", 200)
    text = value if isinstance(value, str) else json.dumps(value)
    return _cut(one_line(text), _LONGEST)


def _cut(text: str, most: int) -> str:
    return one_line(text)[:most]
