"""The plan of a mode that quantizes recurrent states, and the network that follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from qgate.arithmetic import divided
from qgate.modes.attention.casting import largest_value
from qgate.modes.plan import PlanEntry, numbers_of
from qgate.modes.states.casting import Scale, StoredState
from qgate.modes.states.choices import StateChoice, StateChoices
from qgate.modes.states.ranges import Ranges, named_mixers, state_ranges, state_site

if TYPE_CHECKING:
    from qgate.models.model import Model


def state_entries(choices: StateChoices, model: Model) -> list[PlanEntry]:
    """List the states that a model stores."""
    ranges = state_ranges(model) if choices.is_static else {}
    return [
        _entry(state_site(at, side), choice, ranges, len(model.calibration_samples()))
        for at, _ in named_mixers(model)
        for side, choice in choices.chosen.items()
    ]


def _entry(site: str, choice: StateChoice, ranges: Ranges, samples: int) -> PlanEntry:
    scale = static_scale(choice, ranges, site)
    origins = {
        "none": "no scale",
        "token": "amax of its elements",
        "tensor": f"largest of {samples} calibration samples in the tensor",
        "channel": f"largest of {samples} calibration samples in each channel",
    }
    number = scale if isinstance(scale, float) else None
    scales = numbers_of(scale)
    return PlanEntry(site, choice.words(), number, origins[choice.share], calibrated=scales)


def static_scale(choice: StateChoice, ranges: Ranges, site: str) -> Scale:
    """Return the static scale of a state: one, or one for each channel; None without one."""
    if not choice.is_static:
        return None
    scales = divided(ranges[site].double(), largest_value(choice.format)).float()
    return float(scales.amax()) if choice.share == "tensor" else scales


def store_states(model: Model, network: nn.Module, choices: StateChoices) -> None:
    """Let the mixers of a network that shares a model's parameters store quantized states."""
    ranges = state_ranges(model) if choices.is_static else {}
    for at, _ in named_mixers(model):
        for side, choice in choices.chosen.items():
            site = state_site(at, side)
            cast = StoredState(site, choice, static_scale(choice, ranges, site), choices.seed)
            network.get_submodule(site.partition(":")[0]).store = cast.eval()
