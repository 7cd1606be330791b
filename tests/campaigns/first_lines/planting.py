"""Ways to plant a fault in a network that a mode made, and what its gates then say first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import qgate
from qgate.capture import Capture
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.modes.setups import ModelSetup
from qgate.relations.gate import RelationGates
from qgate.results import Tally
from tests.campaigns.first_lines.subjects import subject

Plant = Callable[[nn.Module], object]
Change = Callable[[Tensor], Tensor]
Bits = Literal[4, 8, 16]
MODES: dict[Bits, str] = {4: "mxfp4", 8: "int8", 16: "bf16"}
_CAPTURES: dict[str, dict[tuple[str, str, str], Capture]] = {}


@dataclass(frozen=True)
class Fault:
    """A fault in a model, and what the first line says of it.

    site    pattern of the place that the line begins with
    words   pattern of what it says
    suite   whose gates run: "forward", "gradients" or "relations"
    """

    model: str
    name: str
    plant: Plant
    site: str
    words: str
    bits: tuple[Bits, ...] = (4, 8, 16)
    suite: str = "forward"


def first_line(fault: Fault, mode: str, folder: Path) -> str:
    """Run the gates of a mode with a fault and return the first line of the run, if any is red."""
    model = subject(fault.model)
    return first_line_of(model, mode, fault.plant, fault.suite, folder)


def first_line_of(model: qgate.Model, mode: str, plant: Plant, suite: str, folder: Path) -> str:
    """Run gates of a model in a mode that a fault is planted in; a refusal is a first line, too."""
    try:
        return _first_line_of(model, mode, plant, suite, folder)
    except QgateError as error:
        return str(error)


def _first_line_of(model: qgate.Model, mode: str, plant: Plant, suite: str, folder: Path) -> str:
    captures = _CAPTURES.setdefault(model.name, {})
    bench = Bench(ModelSetup(model.name), _model=model, _captures=captures)
    chosen = bench.mode(mode)
    plant(bench.quantized(chosen).model.module)
    if suite == "relations":
        outcomes = [RelationGates(bench, folder, Policy()).mode(suite, chosen)]
    else:
        gates = ModelGates(bench, folder, Policy(), updating="all")
        gates.plots = "none"
        gate = gates.gradients if suite == "gradients" else gates.layer
        outcomes = [gate(suite, chosen, layer) for layer in bench.layers]
        if suite == "forward":
            outcomes.append(gates.outputs(suite, chosen))
    rows = (
        {**row, "node": f"{number}", "seconds": 0.0}
        for number, outcome in enumerate(outcomes)
        for row in outcome.record["rows"]
    )
    causes = [cause.text() for cause in Tally(rows).causes]
    failed = [outcome for outcome in outcomes if not outcome.passed]
    return causes[0] if causes else failed[0].text.partition("\n")[0] if failed else ""


# Ways to plant ------------------------------------------------------------------------------------


def after(name: str, change: Change) -> Plant:
    """Change what a module returns, the first tensor of several."""
    return between(name, lambda _x, y: change(y))


def between(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """Change what a module returns, by its first argument."""

    def plant(network: nn.Module) -> None:
        module = network.get_submodule(name)
        right = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = right(*args, **kwargs)
            x = args[0] if args else next(iter(kwargs.values()))
            if isinstance(result, tuple):
                return change(x, result[0]), *result[1:]
            return change(x, result)

        module.forward = forward  # type: ignore[method-assign]

    return plant


def before(name: str, change: Change, place: int | str = 0) -> Plant:
    """Change an argument of a module."""

    def plant(network: nn.Module) -> None:
        module = network.get_submodule(name)
        right = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if isinstance(place, str):
                return right(*args, **{**kwargs, place: change(kwargs[place])})
            changed_args = [change(x) if k == place else x for k, x in enumerate(args)]
            return right(*changed_args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]

    return plant


def instead(name: str, forward: Callable[..., Any]) -> Plant:
    """Compute a module by another function, which takes the module before its arguments."""

    def plant(network: nn.Module) -> None:
        module: Any = network.get_submodule(name)
        module.forward = lambda *args, **kwargs: forward(module, *args, **kwargs)

    return plant


def stored(name: str, parameter: str, change: Change) -> Plant:
    """Change a stored tensor of the mode; the reference keeps its own."""

    def plant(network: nn.Module) -> None:
        module = network.get_submodule(name)
        kind = type(module)
        tensor = getattr(module, parameter)
        with torch.no_grad():
            changed = change(tensor.detach().clone())
        value = property(lambda _: changed)
        module.__class__ = type(kind.__name__, (kind,), {parameter: value})

    return plant


def attribute(name: str, key: str, change: Callable[[Any], Any]) -> Plant:
    def plant(network: nn.Module) -> None:
        module = network.get_submodule(name)
        setattr(module, key, change(getattr(module, key)))

    return plant


# Changes ------------------------------------------------------------------------------------------


def times(factor: float, where: slice | None = None) -> Change:
    """Multiply all values, or those of some channels."""

    def change(x: Tensor) -> Tensor:
        if where is None:
            return x * factor
        y = x.clone()
        y[..., where] *= factor
        return y

    return change


def at_tokens(factor: float, where: slice) -> Change:
    """Multiply all values of some tokens."""

    def change(x: Tensor) -> Tensor:
        y = x.clone()
        y[..., where, :] *= factor
        return y

    return change


def set_at(place: tuple[Any, ...], change: Change) -> Change:
    """Change a part of a tensor."""

    def changed(x: Tensor) -> Tensor:
        y = x.clone()
        y[place] = change(y[place])
        return y

    return changed
