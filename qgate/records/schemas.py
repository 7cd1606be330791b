"""JSON schemas of types of plain data."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from qgate.records.validating import msgspec_type


def json_schema(types: Mapping[str, Any]) -> dict[str, object]:
    """Return schema definitions of TypedDicts by name, and of union members by tag.

    Other types are written inline. Descriptions come from docstrings: the first paragraph, and a
    table of fields.
    """
    import msgspec

    kinds = [msgspec_type(hint, False) for hint in types.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="{name}")
    names = {hint.__name__: name for name, hint in types.items()}

    def component(name: str) -> Any:
        schema = {key: written(item) for key, item in components[name].items() if key != "title"}
        schema["description"], fields = _split_docstring(schema.get("description", ""))
        for field, text in fields.items():
            schema["properties"][field]["description"] = text
        return schema

    def written(value: Any) -> Any:
        if isinstance(value, list):
            return [written(item) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(tags := value.get("discriminator"), dict) and "mapping" in tags:
            names.update({name: tag for tag, name in tags["mapping"].items()})
            value = {key: item for key, item in value.items() if key != "discriminator"}
        if "$ref" not in value:
            return {key: written(item) for key, item in value.items()}
        name = value["$ref"]
        return {"$ref": f"#/$defs/{names[name]}"} if name in names else component(name)

    definitions: dict[str, object] = {}
    while missing := [name for name in names if names[name] not in definitions]:
        definitions |= {names[name]: component(name) for name in missing}
    return definitions


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its first paragraph and the texts of its table of fields."""
    first, _, table = inspect.cleandoc(text).partition("\n\n")
    fields: dict[str, str] = {}
    name = ""
    for line in table.splitlines():
        if row := re.fullmatch(r"(\w+) {2,}(\S.*)", line):
            name, fields[row[1]] = row.groups()
        elif name and line.startswith("  "):
            fields[name] += f" {line.strip()}"
        else:
            name = ""
    return first.replace("\n", " "), fields
