"""What differs between the headers of runs: what else changed beside what one wanted to compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qgate.results.others import ended_badly, is_finished, others_of, others_text
from qgate.text import one_line

# Whatever is written about these, numbers may differ because of it.
_PLAIN = ("commit", "device", "torch", "python", "qgate", "seed", "reference", "command")
_LONGEST = 60


class Difference(NamedTuple):
    """Something of the runs that is not the same; a warning where values do not mean the same.

    `values` has one text per run, or none where `about` says it all.
    """

    what: str
    about: str
    values: tuple[str, ...]
    warning: bool = True

    def text(self, names: Sequence[str]) -> str:
        """`commit: before 1a2b, after 3c4d`."""
        told = [f"{name} {value}" for name, value in zip(names, self.values, strict=False)]
        said = ", ".join(told)
        return f"{self.what}: {self.about}{': ' if self.about and said else ''}{said}"


def differences(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Warnings first: what makes a comparison one of different things."""
    found = [*_models(headers), *_limits(headers), *_plans(headers)]
    found += [*_incomplete(names, headers), *_unwell(names, headers)]
    for key in _PLAIN:
        values = [header.get(key) for header in headers]
        if any(value != values[0] for value in values):
            shown = tuple(_shown(key, value) for value in values)
            found.append(Difference(key, "", shown, warning=key in ("seed", "reference")))
    return sorted(found, key=lambda each: not each.warning)


def _models(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    given = [header["models"] for header in headers]
    everywhere = set(given[0]).intersection(*given[1:])
    found = []
    if any(set(each) != set(given[0]) for each in given):
        shown = tuple(", ".join(map(one_line, each)) or "none" for each in given)
        other = not everywhere
        found.append(
            Difference("models", "different models are compared" if other else "", shown, other)
        )
    for model in sorted(everywhere):
        for what, words in (("weights", "other weights"), ("inputs", "other samples")):
            values = [str(each[model].get(what, "")) for each in given]
            if len(set(values)) > 1:
                shown = tuple(_cut(value, 12) for value in values)
                found.append(Difference(one_line(model), words, shown))
    return found


def _limits(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Limits by model and source: what was allowed is part of every verdict."""
    given = [
        {(str(each.get("model", "")), str(each.get("source", ""))): each for each in h["limits"]}
        for h in headers
    ]
    found = []
    for model, source in dict.fromkeys(key for each in given for key in each):
        rows = [each.get((model, source)) for each in given]
        if any(row is None for row in rows):
            values = tuple("none" if row is None else "there" for row in rows)
            found.append(Difference("limits", one_line(f"{source} of {model}"), values))
            continue
        known = [row for row in rows if row is not None]
        keys = dict.fromkeys(key for row in known for key in row)
        for key in keys:
            shown = [row.get(key) for row in known]
            if any(each != shown[0] for each in shown):
                texts = tuple(_shown(key, each) for each in shown)
                found.append(Difference("limits", one_line(f"{key}, {source} of {model}"), texts))
    return found


def _plans(headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Modes of the same name that mean something else."""
    given = [header["plans"] for header in headers]
    found = []
    for name in set(given[0]).intersection(*given[1:]):
        plans = [each[name] for each in given]
        sites = dict.fromkeys(site for plan in plans for site in plan)
        other = [site for site in sites if any(p.get(site) != plans[0].get(site) for p in plans)]
        if other:
            about = f"{len(other)} sites are quantized otherwise, such as {other[0]}"
            values = tuple(_cut(str(plan.get(other[0], "not at all")), _LONGEST) for plan in plans)
            found.append(Difference(f"plan of {one_line(name)}", one_line(about), values))
    return sorted(found)


def _unwell(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Runs that were red apart from their gates, or are a part of one: equal gates say little."""
    found = []
    for name, header in zip(names, headers, strict=True):
        broken, errors = len(header.get("broken") or {}), len(header.get("errors") or [])
        shard = header.get("shard") or {}
        what = [
            f"{broken} tests had no verdict" if broken else "",
            others_text(others_of(header)).partition(",")[0],
            f"{errors} errors" if errors else "",
            f"it is shard {shard.get('number')} of {shard.get('of')}" if shard else "",
        ]
        said = [each for each in what if each] or [ended_badly(header)]
        if any(said):
            found.append(Difference("verdict", one_line(f"{name}: {', '.join(said)}"), ()))
    return found


def _incomplete(names: Sequence[str], headers: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Runs of a part of the tests: what they lack is not gone."""
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
    text = one_line(text)
    return text if len(text) <= most else text[:most]
