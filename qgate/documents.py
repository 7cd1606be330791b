"""Parsers of text data, with limits that the standard library and PyYAML lack."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import TYPE_CHECKING, Any

from qgate.loading import LateModule, explained_imports

if TYPE_CHECKING:
    import tomllib
else:
    tomllib = LateModule("tomllib")

_MOST_DOTS = 100
# What a document has after its aliases are put in; configurations have a hundred.
_MOST_VALUES = 20_000


def toml(text: str) -> dict[str, object]:
    """Parse a TOML text; a ValueError for one that is broken, or has too many dots."""
    for piece in re.split(r"[=,\n\[\]{}]", text):
        if piece.count(".") > _MOST_DOTS and not piece.lstrip().startswith("#"):
            raise ValueError(f"{piece.strip()[:30]}… has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@functools.cache
def _loader() -> Any:
    """Return a loader of plain data that refuses a key given twice, whose first value is lost."""
    with explained_imports():
        import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names: set[str] = set()
            for key_node, _ in node.value:
                name = str(getattr(key_node, "value", ""))
                if key_node.tag != "tag:yaml.org,2002:merge" and name in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name!r} is there twice", key_node.start_mark
                    )
                names.add(name)
            return super().construct_mapping(node, deep)

    return Loader


def plain_yaml(content: str) -> Any:
    """Read YAML; aliases count as often as they are used, because a few lines could fill memory."""
    loader = _loader()(content)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_in(node, {}, set()) > _MOST_VALUES:
            raise ValueError(f"its aliases repeat what is there to more than {_MOST_VALUES} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values_in(node: Any, sizes: dict[int, int], inside: set[int]) -> int:
    if isinstance(node.value, str):
        return 1
    if id(node) in inside:
        raise ValueError("an alias stands for what it is a part of")
    if id(node) not in sizes:
        inside.add(id(node))
        is_mapping = bool(node.value) and isinstance(node.value[0], tuple)
        parts = sum(node.value, ()) if is_mapping else node.value
        sizes[id(node)] = 1 + sum(_values_in(part, sizes, inside) for part in parts)
        inside.discard(id(node))
    return sizes[id(node)]


def split_list(text: str) -> list[Any]:
    """Split a list as YAML writes it, in brackets, or with commas between its items.

    Commas inside brackets of any kind belong to an item, so that patterns stay whole.
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        with explained_imports():
            import yaml
        with contextlib.suppress(yaml.YAMLError, ValueError, TypeError, RecursionError):
            content = plain_yaml(text)
            if isinstance(content, list):
                return content
    items, depth, escaped = [""], 0, False
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}") if not escaped else 0
        if letter == "," and depth <= 0 and not escaped:
            items.append("")
        else:
            items[-1] += letter
        escaped = letter == "\\" and not escaped
    return [item.strip() for item in items] if text else []
