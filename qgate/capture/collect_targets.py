"""Which modules are collected, and under which names what flows through them is kept."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from qgate.capture.collect_calls import Spot
from qgate.errors import QgateError
from qgate.models.sites import kind_of

TYPES = ("attention", "linear", "conv", "norm", "embedding", "activation")

_ROLES = {
    "query": ("query", "q", "query_layer", "query_states"),
    "key": ("key", "k", "key_layer", "key_states"),
    "value": ("value", "v", "value_layer", "value_states"),
}
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.?"
)


@dataclass(frozen=True, eq=False)
class Target:
    """A module to collect: record names of its inputs with the parameter each is, and its output.

    A module without inputs and output is a place in which attention functions are expected.
    """

    module: nn.Module
    spot: Spot
    inputs: Mapping[str, str]
    output: str
    parameters: tuple[str, ...]
    weight: bool = False
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """What `sites` chose: modules, and whether attention functions count wherever they are."""

    targets: list[Target]
    names: dict[int, str]
    functions_everywhere: bool
    pattern: re.Pattern[str] | None

    def takes_functions_in(self, name: str) -> bool:
        """Whether an attention function that a module runs is collected."""
        return self.functions_everywhere or bool(self.pattern and self.pattern.search(name))


def choose(root: nn.Module, sites: str | Sequence[str]) -> Chosen:
    """`sites` is types and patterns of module names, with `|` between them, or a list of names."""
    every, names, modules = _named(root)
    words = [sites] if isinstance(sites, str) else [str(name) for name in sites]
    parts = [part for word in words for part in _split(word)] if isinstance(sites, str) else words
    types = [part for part in parts if part in TYPES]
    rest = [part for part in parts if part not in TYPES]
    pattern = None
    if rest:
        text = "|".join(rest if isinstance(sites, str) else (f"^{re.escape(p)}$" for p in rest))
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise QgateError(f"sites {sites!r} is no regular expression: {error}.") from None
    inside = {id(child) for m in modules.values() if _is_fused(m) for child in m.modules()}
    inside -= {id(m) for m in modules.values() if _is_fused(m)}
    targets: list[Target] = []
    for name, module in modules.items():
        layer_type = type_of(module)
        named = pattern is not None and any(pattern.search(each) for each in every[id(module)])
        if layer_type not in types and not named:
            continue
        whole = pattern is not None and pattern.fullmatch(name) is not None
        holder = next(module.children(), None) is not None and layer_type == "other"
        if id(module) in inside or not name or (holder and not whole):
            continue
        also = tuple(each for each in every[id(module)] if each != name)
        targets.append(_target(module, Spot(name, layer_type, layer_type, layer_of(root, name)), also))
    everywhere = "attention" in types
    chosen = Chosen(targets, names, everywhere, pattern)
    if not targets and not everywhere:
        raise QgateError(f"sites {sites!r} match no module. {_there_is(modules)}")
    return chosen


def type_of(module: nn.Module) -> str:
    """attention, linear, or another kind of module that computes; `other` for the rest."""
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


def layer_of(root: nn.Module, name: str) -> int | None:
    """The index of the block: Megatron's own number, which counts over all stages, else the name's
    first number."""
    found: nn.Module = root
    for part in [] if not name else name.split("."):
        child = dict(found.named_children()).get(part)
        found = found if child is None else child
        number = getattr(found, "layer_number", None)
        if type(number) is int and number > 0:
            return number - 1
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return int(numbers[0]) if numbers else None


def clean(name: str) -> str:
    """A module's name without the wrappers around it."""
    return _WRAPPERS.sub("", name).strip(".")


def _named(root: nn.Module) -> tuple[dict[int, list[str]], dict[int, str], dict[str, nn.Module]]:
    """All names of each module, its first name, and the modules by that."""
    prefix = "module." if type(root).__name__ in _PARALLEL else ""
    every: dict[int, list[str]] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        short = clean(name.removeprefix(prefix) if name != "module" or not prefix else "")
        known = every.setdefault(id(module), [])
        if short not in known:
            known.append(short)
        if len(known) == 1 and (short not in modules or id(modules[short]) == id(module)):
            modules[short] = module
        elif len(known) == 1:
            modules[short] = module  # a wrapper and what it wraps: the inner one does the work
    return every, {key: names[0] for key, names in every.items()}, modules


_PARALLEL = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def _target(module: nn.Module, spot: Spot, also: tuple[str, ...]) -> Target:
    parameters = tuple(inspect.signature(module.forward).parameters)
    if spot.layer_type == "attention":
        roles = {
            role: next((name for name in names if name in parameters), "")
            for role, names in _ROLES.items()
        }
        if not all(roles.values()):
            return Target(module, spot, {}, "", parameters, also=also)
        if not _is_fused(module) and not any(
            type_of(child) == "linear" for child in module.modules() if child is not module
        ):
            spot = Spot(spot.module, spot.layer_type, "FA", spot.layer)
        return Target(module, spot, roles, "context", parameters, also=also)
    weight = spot.layer_type in ("linear", "conv", "embedding", "norm") and _has_weight(module)
    return Target(module, spot, {"input": ""}, "output", parameters, weight, also)


def _is_fused(module: nn.Module) -> bool:
    """Modules that use the weights of those inside them without calling them."""
    return isinstance(module, nn.MultiheadAttention)


def _has_weight(module: nn.Module) -> bool:
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    return isinstance(weight, Tensor) or hasattr(module, "parametrizations")


def _split(pattern: str) -> list[str]:
    """At each `|` that is not inside brackets."""
    parts, depth = [""], 0
    for place, letter in enumerate(pattern):
        escaped = place > 0 and pattern[place - 1] == "\\"
        depth += 0 if escaped else (letter in "([") - (letter in ")]")
        if letter == "|" and depth == 0 and not escaped:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _there_is(modules: Mapping[str, nn.Module], most: int = 12) -> str:
    kinds: dict[str, list[str]] = {}
    for name, module in modules.items():
        if name and next(module.children(), None) is None or type_of(module) == "attention":
            kinds.setdefault(type_of(module), []).append(name)
    told = [
        f"{len(found)} {kind} ({', '.join(found[:3])}{', …' if len(found) > 3 else ''})"
        for kind, found in list(kinds.items())[:most]
    ]
    return f"There are: {'; '.join(told) or 'no modules inside it'}."
