"""The default configuration of `qgate activations` as a file: every key, with what it means."""

from __future__ import annotations

import json
from typing import Any

from qgate.activation_stats.setting_keys import SettingKey, sections_of
from qgate.activation_stats.settings import ActivationSettings, keys
from qgate.errors import unknown

_HEADING = """\
# What `qgate activations --config FILE` is asked for. Every line is the default and can be left
# out. On the command line: --outlier.threshold 100, --data.num_samples 128.
"""


def default_config_text(kind: str = "yaml") -> str:
    """A file that says the defaults; read back, it is them."""
    if kind not in ("yaml", "toml"):
        raise unknown("kind of configuration", kind, ("yaml", "toml"))
    return _yaml() if kind == "yaml" else _toml()


def _yaml() -> str:
    sections = sections_of(ActivationSettings)
    lines = [_HEADING.rstrip()]
    opened: set[str] = set()
    for each in keys():
        *above, name = each.name.split(".")
        for depth in range(1, len(above) + 1):
            section = ".".join(above[:depth])
            if section not in opened:
                opened.add(section)
                gap = "\n" if depth == 1 else ""
                lines.append(f"{gap}{'  ' * (depth - 1)}{above[depth - 1]}:  # {sections[section]}")
        gap = "" if above else "\n"
        lines.append(f"{gap}{'  ' * len(above)}{name}: {_value(each.default)}  # {each.doc}")
    return "\n".join(lines) + "\n"


def _toml() -> str:
    """Keys of a table come before the tables inside it; TOML has no null, so such a key is out."""
    sections = sections_of(ActivationSettings)
    lines = [_HEADING.rstrip()]
    by_section: dict[str, list[SettingKey]] = {name: [] for name in ["", *sections]}
    for each in keys():
        by_section[each.name.rpartition(".")[0]].append(each)
    for section, inside in by_section.items():
        if section:
            lines.append(f"\n[{section}]  # {sections[section]}")
        for each in inside:
            name = each.name.rpartition(".")[2]
            unset = each.default is None
            value = '"null"' if unset else _value(each.default)
            lines.append(f"{'# ' if unset else ''}{name} = {value}  # {each.doc}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """The same in YAML and TOML: quoted texts, brackets, numbers, true and false."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)
