"""Files of plain data: YAML, TOML and JSON, with one clear error for broken ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from qgate.documents import plain_yaml, toml
from qgate.errors import QgateError
from qgate.storage.foreign import MOST_SETTINGS, read_foreign

if TYPE_CHECKING:
    from qgate.storage.locations import Location


def read_document(
    path: Location, noun: str, kinds: tuple[str, ...] = (".yaml", ".yml", ".toml")
) -> dict[Any, Any]:
    """Return the content of a file, nested as it is there; an empty file has no keys."""
    subject, kind = f"the {noun} {str(path)!r}", path.suffix.lower()
    if kind not in kinds:
        raise QgateError(f"{subject} is no {', '.join(kinds[:-1])} or {kinds[-1]} file.")
    try:
        data = read_foreign(path, "settings", MOST_SETTINGS)
        text = data.decode("utf-8-sig")
        content = toml(text) if kind == ".toml" else plain_yaml(text)
    except UnicodeDecodeError as error:
        raise QgateError(
            f"{subject} is not text in UTF-8: byte 0x{data[error.start]:02x} at position "
            f"{error.start}."
        ) from None
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise QgateError(f"{subject} cannot be read: {why}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        tabs = " Tabs are not allowed for indenting." if "'\\t'" in str(error.problem) else ""
        why = re.sub(r"\s+", " ", str(error.problem or error.context)).rstrip(".")
        raise QgateError(f"{subject} is broken YAML{location}: {why}.{tabs}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        language = "TOML" if kind == ".toml" else "YAML"
        raise QgateError(f"{subject} is broken {language}: {error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise QgateError(f"{subject} holds {type(content).__name__} and not keys with values.")
    return content
