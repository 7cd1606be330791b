"""The recipe and the plan of a checkpoint as text: which tensors have which format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import yaml

from qgate.checkpoints.gguf.recipes import main_types
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import WeightRecord, WrittenRecipe
from qgate.text import one_line

_MOST_LAYERS = 8


def recipe_lines(recipe: Recipe) -> list[str]:
    """Write what is declared: a line per format, and one for what is ignored."""
    groups = [f"{group.format} of {', '.join(group.targets)}" for group in recipe.groups]
    if recipe.mix:
        groups.append(f"most parameters of layers in {' or '.join(main_types(recipe.mix))}")
    return groups + ([f"ignores {', '.join(recipe.ignore)}"] if recipe.ignore else [])


def recipe_text(recipe: Recipe) -> str:
    """Write what is declared in one line."""
    if not recipe.method:
        return "nothing is declared"
    return f"{recipe.method}: {'; '.join(recipe_lines(recipe)) or 'nothing'}"


def recipe_file_lines(recipe: WrittenRecipe) -> list[str]:
    """Write out a recipe as the lines of a .yaml file; none where nothing is quantized."""
    if not recipe:
        return []
    text = yaml.dump(recipe, Dumper=_LineDumper, sort_keys=False, width=100)
    return [line if line.startswith(" ") else one_line(line) for line in text.splitlines()]


class _LineDumper(yaml.SafeDumper):
    """Writer of YAML that keeps each text with odd characters on one line, in escapes."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_LineDumper.add_representer(str, _LineDumper.represent_str)


def fold_numbers(name: str) -> str:
    """Replace the numbers of layers and experts in a name: all of one kind get one name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def plan_texts(weights: Sequence[WeightRecord]) -> Mapping[str, str]:
    """Return the format of each weight by its folded name; of several, how many have which."""
    return fold_texts((weight.name, weight.format or "unreadable") for weight in weights)


def fold_texts(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the text of each name by its folded name; of several, which are the remaining."""
    grouped: dict[str, list[tuple[str, str]]] = {}
    for name, text in texts:
        grouped.setdefault(fold_numbers(name), []).append((name, text))
    return {name: _joined(members) for name, members in grouped.items()}


def _joined(texts: Sequence[tuple[str, str]]) -> str:
    counts = Counter(text for _, text in texts)
    (usual, _), *remaining = counts.most_common()
    if not remaining:
        return usual
    parts = [usual]
    for other, count in remaining:
        places = [_numbers_in(name) for name, text in texts if text == other]
        listed = ", ".join(places[:_MOST_LAYERS]) + (", …" if count > _MOST_LAYERS else "")
        parts.append(f"{other} at {listed}" if any(places) else f"{other} {count} times")
    return ", but ".join(parts)


def _numbers_in(name: str) -> str:
    return ".".join(part for part in name.split(".") if part.isdecimal())


def bits_per_weight(weights: Sequence[WeightRecord]) -> float:
    """Return the bits that a parameter takes, with its scales."""
    count = sum(weight.count for weight in weights)
    return 8 * sum(weight.size for weight in weights) / count if count else 0.0
