"""Names that people give to models: `hf:PATH=NAME` is called NAME wherever the folder is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qgate.errors import QgateError

FOLDER_SCHEMES = ("hf", "mamba")
# Those of the models that come with qgate; a test compares them with the registry.
TINY_NAMES = ("tiny-mamba", "tiny-llama", "tiny-moe", "tiny-moe-list")


def split_name(model: str) -> tuple[str, str | None]:
    """Return a model and the name given behind `=`, None without one.

    A folder whose own path has a `=` needs no name.
    """
    scheme, colon, location = model.strip().partition(":")
    if not colon or scheme.lower() not in FOLDER_SCHEMES or "=" not in location:
        return model, None
    if Path(location).expanduser().is_dir():
        return model, None
    folder, _, name = location.rpartition("=")
    if "/" in name and not Path(folder).expanduser().is_dir():
        return model, None  # a path that is not there, and no name
    check_name(name, model)
    return f"{scheme}:{folder}", name


def shown_name(model: str) -> str:
    """Return what a model is called in a list of tests: its name, else as it was asked for."""
    try:
        return split_name(model)[1] or model
    except QgateError:
        return model


def check_name(name: str, model: str) -> None:
    """Refuse a name that results and baselines cannot have."""
    reason = ""
    if not name.strip():
        reason = "it is empty"
    elif "/" in name or "\\" in name or ".." in name:
        reason = "it reads like a path"
    elif not name.isprintable() or name != name.strip():
        reason = "it has characters that do not print, or blanks around it"
    elif name.lower().replace("_", "-") in TINY_NAMES:
        reason = "a model of qgate has it"
    if reason:
        raise QgateError(
            f"name {name!r} of model {model!r} is not allowed: {reason}. A name is letters, digits "
            "and signs without slashes, as in hf:checkpoints/mine=mine."
        )


def check_names(models: Sequence[str]) -> None:
    """Refuse two models of one name: they would share a baseline."""
    names = [split_name(model)[1] for model in models]
    for name in filter(None, names):
        same = [model for model, other in zip(models, names, strict=True) if other == name]
        if len(same) > 1:
            raise QgateError(
                f"models {' and '.join(map(repr, same))} are all called {name!r}: give each a name "
                "of its own."
            )
