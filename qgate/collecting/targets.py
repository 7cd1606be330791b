"""Choice of modules to collect, and names of their inputs and outputs in records."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from qgate.collecting.calls import CollectedSite
from qgate.collecting.settings import TYPES, WEIGHTS
from qgate.errors import QgateError
from qgate.models.sites import kind_of

_ROLES = {
    "query": ("query", "q", "query_layer", "query_states"),
    "key": ("key", "k", "key_layer", "key_states"),
    "value": ("value", "v", "value_layer", "value_states"),
}
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


@dataclass(frozen=True, eq=False)
class CollectedModule:
    """A module to collect: record names of its output and of its inputs, with their parameters.

    In a module without inputs and output attention functions are expected.
    """

    module: nn.Module
    site: CollectedSite
    inputs: Mapping[str, str]
    output: str
    parameters: tuple[str, ...]
    weight: bool = False
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChosenModules:
    """Modules that `sites` selects, and whether all attention functions are collected."""

    targets: list[CollectedModule]
    names: dict[int, str]
    paths: dict[str, str]
    functions_everywhere: bool
    pattern: re.Pattern[str] | None

    def takes_functions_in(self, name: str) -> bool:
        """Tell whether attention functions that a module calls are collected."""
        return self.functions_everywhere or bool(self.pattern and self.pattern.search(name))


def choose(root: nn.Module, sites: str | Sequence[str]) -> ChosenModules:
    """Choose by types and patterns of module names, with `|` between them, or a list of names."""
    words = _split(sites) if isinstance(sites, str) else [str(name) for name in sites]
    types = [word for word in words if word in TYPES]
    patterns = [word for word in words if word not in (*TYPES, WEIGHTS)]
    if not isinstance(sites, str):
        patterns = [f"^{re.escape(word)}$" for word in patterns]
    try:
        pattern = re.compile("|".join(patterns)) if patterns else None
    except re.error as error:
        raise QgateError(f"sites {sites!r} is no regular expression: {error}.") from None
    modules = _named(root)
    inside = {
        id(child)
        for named in modules
        if _is_fused(named.module)
        for child in named.module.modules()
        if child is not named.module
    }
    targets: list[CollectedModule] = []
    for named in modules:
        module, layer_type = named.module, type_of(named.module)
        fits = pattern is not None and any(pattern.search(name) for name in named.names)
        fits |= WEIGHTS in words and (layer_type == "linear" or _holds_weights(module))
        if id(module) in inside or not named.name or not (fits or layer_type in types):
            continue
        holder = layer_type == "other" and next(module.children(), None) is not None
        if holder and not (pattern is not None and pattern.fullmatch(named.name)):
            continue
        site = CollectedSite(
            named.name, layer_type, layer_type, layer_of(root, named.path, named.name)
        )
        targets.append(_target(module, site, named.names[1:]))
    everywhere = "attention" in types
    if not targets and not everywhere:
        raise QgateError(f"sites {sites!r} match no module. {_existing(modules)}")
    names = {id(named.module): named.name for named in modules}
    paths = {named.name: named.path for named in modules}
    return ChosenModules(targets, names, paths, everywhere, pattern)


def type_of(module: nn.Module) -> str:
    """Return attention, linear or another kind of computing module; `other` for the rest."""
    name = type(module).__name__.lower()
    if isinstance(module, nn.MultiheadAttention) or "attention" in name or "attn" in name:
        return "attention"
    kind = kind_of(module)
    if kind != "other":
        return str(kind)
    holds = any(type_of(child) == "linear" for child in module.children())
    if "linear" in name and _has_weight(module) and not holds:
        return "linear"
    return "other"


def layer_of(root: nn.Module, path: str, name: str) -> int | None:
    """Return the index of the block: Megatron's layer number, else the first number of the name."""
    module = root
    for part in path.split(".") if path else []:
        module = module.get_submodule(part)
        number = getattr(module, "layer_number", None)
        if type(number) is int and number > 0:
            return number - 1
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return int(numbers[0]) if numbers else None


@dataclass
class _Named:
    """A module with its full path, and its names without wrappers."""

    module: nn.Module
    path: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]


def model_name(root: nn.Module) -> str:
    """Return the class name of the model without wrappers, the same on one rank and many."""
    while [name for name, _ in root.named_children()] in (["module"], ["_orig_mod"]):
        root = next(root.children())
    kinds = type(root).__mro__
    if kinds[1].__name__ == "FSDPModule":  # FSDP puts its own class before that of the model
        return kinds[0].__name__.removeprefix("FSDP")
    return kinds[0].__name__


def _named(root: nn.Module) -> list[_Named]:
    """Return every module once, in the order of registration."""
    outer, inner = "", root
    while [name for name, _ in inner.named_children()] == ["module"]:
        outer, inner = f"{outer}module.", inner.get_submodule("module")
    modules: dict[int, _Named] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        name = _WRAPPERS.sub("", f"{path}.".removeprefix(outer)).strip(".")
        name = "" if f"{path}." in outer else name
        named = modules.setdefault(id(module), _Named(module, path, ()))
        if name not in named.names:
            named.names = (*named.names, name)
    return list(modules.values())


def _target(module: nn.Module, site: CollectedSite, also: tuple[str, ...]) -> CollectedModule:
    parameters = tuple(inspect.signature(module.forward).parameters)
    if site.layer_type == "attention":
        roles = {
            role: next((name for name in names if name in parameters), "")
            for role, names in _ROLES.items()
        }
        if not all(roles.values()):
            return CollectedModule(module, site, {}, "", parameters, also=also)
        children = [child for child in module.modules() if child is not module]
        if not _is_fused(module) and not any(type_of(child) == "linear" for child in children):
            site = replace(site, component="FA")
        return CollectedModule(module, site, roles, "context", parameters, also=also)
    weight = site.layer_type in ("linear", "conv", "embedding", "norm") and _has_weight(module)
    return CollectedModule(module, site, {"input": ""}, "output", parameters, weight, also)


def _is_fused(module: nn.Module) -> bool:
    """Tell whether a module uses the weights of those inside it without calling them."""
    return isinstance(module, nn.MultiheadAttention)


def _has_weight(module: nn.Module) -> bool:
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    return isinstance(weight, Tensor) or hasattr(module, "parametrizations")


def _holds_weights(module: nn.Module) -> bool:
    own = any(parameter is not None for parameter in module._parameters.values())
    return own or _has_weight(module)


def _split(pattern: str) -> list[str]:
    """Split a pattern at each `|` that is not inside brackets."""
    parts, depth = [""], 0
    for index, letter in enumerate(pattern):
        is_escaped = index > 0 and pattern[index - 1] == "\\"
        depth += 0 if is_escaped else (letter in "([") - (letter in ")]")
        if letter == "|" and depth == 0 and not is_escaped:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _existing(modules: Sequence[_Named]) -> str:
    kinds: dict[str, list[str]] = {}
    for named in modules:
        kind = type_of(named.module)
        leaf = next(named.module.children(), None) is None
        if named.name and (leaf or kind == "attention"):
            kinds.setdefault(kind, []).append(named.name)
    texts = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
    ]
    return f"There are: {'; '.join(texts) or 'no modules inside it'}."
