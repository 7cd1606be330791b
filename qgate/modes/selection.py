"""The modes by name, those that fit a model, and those that a user's query selects."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from qgate.errors import QgateError, unknown
from qgate.modes.experts import EXPERT_MODES
from qgate.modes.formats import FORMAT_MODES, FP32
from qgate.modes.mamba import MAMBA_MODES
from qgate.modes.mode import Kernel, Mode
from qgate.modes.served import SERVED_MODES
from qgate.modes.served_weights import SERVED_WEIGHT_MODES
from qgate.registry import Registry

GROUPS = {
    "all": "every mode that fits the model",
    "quant_only": "those that quantize: all but fp16 and bf16",
    "fp_only": "the reference and fp16",
    "essential": "on Mamba 0, 2-1, 2-2, 2-4; on others mxfp8, mxfp4, int8; and the model's own",
}
_ESSENTIAL = {"mamba": ("0", "2-1", "2-2", "2-4"), "other": ("mxfp8", "mxfp4", "int8")}


_OF_TRANSFORMERS = (
    " A Mamba-1 checkpoint takes Mamba modes as mamba:PATH, whose network computes the same "
    "numbers in qgate's own block."
)


class DoesNotFitError(QgateError):
    """The modes exist, but not for this kind of model."""


_FITTING: dict[str, Registry[Mode]] = {"mamba": Registry("mode"), "other": Registry("mode")}
_BY_NAME = (*EXPERT_MODES, *SERVED_MODES, *SERVED_WEIGHT_MODES)
for _mode in (FP32, *MAMBA_MODES, *FORMAT_MODES, *_BY_NAME):
    for _family, _registry in _FITTING.items():
        if _mode.fits in ("any", _family):
            _key = _mode.name.replace("-", "_")
            _registry.add(_mode, *([_key] if _key != _mode.name else []))


def names(family: str | None = None) -> list[str]:
    """List the names of all modes, or of those for a family of models: "mamba" or "other"."""
    registries = [_FITTING[family]] if family else _FITTING.values()
    return list(dict.fromkeys(name for registry in registries for name in registry.names()))


def find_mode(
    name: str,
    family: str,
    own: Iterable[str] | Mapping[str, Any] = (),
    model: str = "this model",
) -> Mode:
    """Find a mode by name; an error tells a mode that is unknown from one that does not fit.

    `own` are the modes that a model brings: literal ones, or callables.
    """
    _check_names(own)
    if name in own:
        own_entry = own[name] if isinstance(own, Mapping) else None
        if isinstance(own_entry, Mode):
            return own_entry
        if not isinstance(own_entry, Kernel):
            return own_mode(name)
        if own_entry.meant is not None:
            return own_mode(name, own_entry.meant.name, own_entry.convention, own_entry.meant)
        meant = str(own_entry.stands_for)
        if meant and (meant in own or not _has(_FITTING[family], meant)):
            raise unknown(f"mode that {name!r} of {model} stands for", meant, names(family))
        return own_mode(name, meant, own_entry.convention)
    registry = _FITTING[family]
    fitting = [*registry.names(), *own]
    other = _FITTING["other" if family == "mamba" else "mamba"]
    if not _has(registry, name) and _has(other, name):
        kind = "Mamba models" if family == "other" else "models other than Mamba"
        raise DoesNotFitError(
            f"mode {name!r} does not fit {model}: it is for {kind}. Modes that fit: "
            f"{', '.join(fitting)}.{_OF_TRANSFORMERS if family == 'other' else ''}"
        )
    if not _has(registry, name):
        raise unknown("mode", name, fitting, GROUPS)
    return registry.get(name)


def _has(registry: Registry[Mode], name: str) -> bool:
    key = name.strip().lower().replace("-", "_")
    return key in (entry.replace("-", "_") for entry in registry.names())


def _check_names(own: Iterable[str]) -> None:
    """Refuse own modes with the name of the reference, a group or a pattern."""
    for name in own:
        if name in (*GROUPS, FP32.name) or any(sign in name for sign in ",*?["):
            raise QgateError(
                f"a model's own mode cannot be called {name!r}: groups, the reference and patterns "
                "use this name. Give it another one."
            )


def own_mode(
    name: str, stands_for: str = "", convention: str = "", meant: Mode | None = None
) -> Mode:
    """Return the mode of a model's own callable."""
    about = f"the model's own, for {stands_for}" if stands_for else "the model's own"
    return Mode(name, about, own=True, stands_for=stands_for, convention=convention, meant=meant)


def select(
    query: str | Sequence[str],
    family: str,
    own: Sequence[str] | Mapping[str, Any] = (),
    model: str = "this model",
) -> list[Mode]:
    """Select modes by names, groups and patterns, comma-separated or listed, each once.

    A part that selects nothing is an error: a gate that ran nothing must not look green.
    """
    chosen: dict[str, Mode] = {}
    for part in _parts_of(query):
        for name in _names_of(part, family, own, model):
            chosen[name] = find_mode(name, family, own, model)
    return list(chosen.values())


def select_fitting(
    query: str | Sequence[str],
    family: str,
    own: Sequence[str] | Mapping[str, Any] = (),
    model: str = "this model",
) -> tuple[list[Mode], dict[str, str]]:
    """Select modes, and return for each part of the query that does not fit the model why."""
    chosen: dict[str, Mode] = {}
    unfit: dict[str, str] = {}
    for part in _parts_of(query):
        try:
            chosen |= {mode.name: mode for mode in select(part, family, own, model)}
        except DoesNotFitError as error:
            unfit[part] = str(error)
    return list(chosen.values()), unfit


def is_selected(name: str, query: str | Sequence[str], beside: Collection[str] = ()) -> bool:
    """Tell if a query means the mode of a name, where no model says which modes fit.

    beside   other modes of the same model, which tell what is essential for it
    """
    registered = {mode.name: mode for registry in _FITTING.values() for mode in registry}
    by_name = name in registered and registered[name].by_name
    groups = {
        "all": not by_name,
        "quant_only": not by_name and name not in ("fp16", "bf16"),
        "fp_only": name == "fp16",
        "essential": any(
            name in listed
            for family, listed in _ESSENTIAL.items()
            if family == "mamba" or not set(_ESSENTIAL["mamba"]).intersection(beside)
        ),
    }
    return any(
        groups[part] if part in groups else fnmatch.fnmatchcase(name.lower(), part)
        for part in map(str.lower, _parts_of(query))
    )


def _parts_of(query: str | Sequence[str]) -> list[str]:
    texts = [query] if isinstance(query, str) else query
    parts = [part.strip() for text in texts for part in text.split(",")]
    if not parts:
        raise QgateError(f"no mode is named: name one, or a group: {', '.join(GROUPS)}.")
    return parts


def named_patterns() -> list[str]:
    """List patterns of the modes that no group selects, such as `kv-*`."""
    registries = _FITTING.values()
    named = (mode.name for registry in registries for mode in registry if mode.by_name)
    return sorted({f"{name.partition('-')[0]}-*" for name in named})


def _names_of(
    part: str, family: str, own: Sequence[str] | Mapping[str, Any], model: str
) -> list[str]:
    listed = [mode.name for mode in _FITTING[family] if not mode.by_name]
    every = [name for name in (*listed, *own) if name != FP32.name]
    group = part.lower()
    if group == "all":
        return every
    if group == "quant_only":
        return [name for name in every if name not in ("fp16", "bf16")]
    if group == "fp_only":
        return [FP32.name, "fp16"]
    if group == "essential":
        return [*_ESSENTIAL[family], *own]
    if any(sign in part for sign in "*?["):
        if part[0] not in "*?[":
            every += [mode.name for mode in _FITTING[family] if mode.by_name]
        matching = [name for name in every if fnmatch.fnmatchcase(name.lower(), part.lower())]
        if not matching:
            foreign = [name.lower() for name in names() if name != FP32.name]
            is_foreign = bool(fnmatch.filter(foreign, part.lower()))
            kind = DoesNotFitError if is_foreign else QgateError
            hint = _OF_TRANSFORMERS if is_foreign and family == "other" else ""
            raise kind(
                f"mode pattern {part!r} matches no mode that fits {model}: "
                f"{', '.join(every)}.{hint}"
            )
        return matching
    return [find_mode(part, family, own, model).name]
