"""The recipe and the plan of a checkpoint as text: which tensors have which format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import WeightRecord

_MOST_LAYERS = 8


def recipe_lines(recipe: Recipe) -> list[str]:
    """Write what is declared: a line per format, and one for what is ignored."""
    groups = [f"{group.format} of {', '.join(group.targets)}" for group in recipe.groups]
    return groups + ([f"ignores {', '.join(recipe.ignore)}"] if recipe.ignore else [])


def recipe_text(recipe: Recipe) -> str:
    """Write what is declared in one line."""
    if not recipe.method:
        return "nothing is declared"
    return f"{recipe.method}: {'; '.join(recipe_lines(recipe)) or 'nothing'}"


def fold_numbers(name: str) -> str:
    """Replace the numbers of layers and experts in a name: all of one kind get one name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def plan_texts(weights: Sequence[WeightRecord]) -> Mapping[str, str]:
    """Return the format of each weight by its folded name; of several, how many have which."""
    return fold_texts((weight.name, weight.format or "unreadable") for weight in weights)


def fold_texts(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the text of each name by its folded name; of several, which are the others."""
    grouped: dict[str, list[tuple[str, str]]] = {}
    for name, text in texts:
        grouped.setdefault(fold_numbers(name), []).append((name, text))
    return {name: _joined(members) for name, members in grouped.items()}


def _joined(texts: Sequence[tuple[str, str]]) -> str:
    counts = Counter(text for _, text in texts)
    (usual, _), *others = counts.most_common()
    if not others:
        return usual
    parts = [usual]
    for other, count in others:
        places = [_numbers_in(name) for name, text in texts if text == other]
        shown = ", ".join(places[:_MOST_LAYERS]) + (", …" if count > _MOST_LAYERS else "")
        parts.append(f"{other} at {shown}" if any(places) else f"{other} {count} times")
    return ", but ".join(parts)


def _numbers_in(name: str) -> str:
    return ".".join(part for part in name.split(".") if part.isdecimal())


def bits_per_weight(weights: Sequence[WeightRecord]) -> float:
    """Return the bits that a parameter takes, with its scales."""
    count = sum(weight.count for weight in weights)
    return 8 * sum(weight.size for weight in weights) / count if count else 0.0
