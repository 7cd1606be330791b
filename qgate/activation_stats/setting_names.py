"""Names of keys of configurations: dotted, in sections, and each given once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from qgate.errors import QgateError, unknown

# A section whose name may be left out: outlier.threshold is visualization.outlier.threshold.
UNSAID = "visualization."
# Names that configuration files of others have for a key of here.
OTHER_NAMES = {
    "visualization.model_name": "model.name",
    "visualization.report_name": "output.report_name",
}


def resolve_keys(tree: Mapping[Any, Any], keys: Collection[str], where: str) -> dict[str, object]:
    """Return the values of a nested file by the full names of their keys."""
    values: dict[str, object] = {}
    written: dict[str, str] = {}
    sections = {name.rpartition(".")[0] for name in keys}
    sections |= {name.rpartition(".")[0] for name in sections} - {""}

    def leaves(inner: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in inner.items():
            dotted = f"{prefix}{name}"
            full = dotted if dotted in sections else UNSAID + dotted
            if full not in sections or _key_named(dotted, keys):
                yield dotted, value
            elif isinstance(value, Mapping):
                yield from leaves(value, f"{dotted}.")
            elif value is not None:
                raise QgateError(
                    f"{where}: {dotted} {value!r} is not allowed; it is a section with "
                    f"{', '.join(_inside(full, keys))}."
                )

    for dotted, value in leaves(tree, ""):
        try:
            name = full_name(dotted, keys)
        except QgateError as error:
            raise QgateError(f"{where}: {error}") from None
        if name in written:
            raise QgateError(
                f"{where}: {written[name]} and {dotted} are the same key: keep one of them."
            )
        written[name] = dotted
        values[name] = value
    return values


def full_name(text: str, keys: Collection[str]) -> str:
    """Return the full name of a key, from its name with or without `visualization.`."""
    name = text.strip().removeprefix("--").replace("-", "_")
    if full := _key_named(name, keys):
        return full
    for section in (name, UNSAID + name):
        inside = [full.removeprefix(UNSAID) for full in _inside(section, keys)]
        if inside:
            raise QgateError(f"{text} is a section; give one of its keys: {', '.join(inside)}.")
    # The keys of the section that was meant, or else the sections.
    short = [full.removeprefix(UNSAID) for full in keys]
    name = text.strip().removeprefix("--").removeprefix(UNSAID)
    beside = [full for full in short if full.rpartition(".")[0] == name.rpartition(".")[0]]
    tops = sorted({full.partition(".")[0] for full in short})
    allowed = beside if "." in name and beside else tops
    error = unknown("key", text, allowed, also=set(short) - set(allowed))
    if name.rpartition(".")[2].replace("-", "_") == "trust_remote_code":
        error = QgateError(f"{error} --trust-remote-code is an option of the command line alone.")
    raise error


def _key_named(name: str, keys: Collection[str]) -> str:
    """Return the key of a name; the empty text if it is none."""
    names = (OTHER_NAMES.get(full, full) for full in (name, UNSAID + name))
    return next((full for full in names if full in keys), "")


def _inside(section: str, keys: Collection[str]) -> list[str]:
    return [name for name in keys if name.startswith(f"{section}.")]
