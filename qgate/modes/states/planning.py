"""The plan of a mode that quantizes recurrent states, and the network that follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from qgate.arithmetic import divided
from qgate.errors import QgateError
from qgate.modes.attention.casting import largest_value
from qgate.modes.plan import PlanEntry, numbers_of
from qgate.modes.states.casting import Scale, StoredState
from qgate.modes.states.choices import StateChoice, StateChoices
from qgate.modes.states.mixers import named_mixers, reached
from qgate.modes.states.ranges import Ranges, state_ranges

if TYPE_CHECKING:
    from qgate.models.model import Model


def stored_sides(choices: StateChoices, model: Model) -> list[tuple[str, str]]:
    """List the sites of a model where a state is stored, with its side; none is an error."""
    stored = [
        (mixer.site(side), side)
        for mixer in named_mixers(model)
        for side in choices.chosen
        if side in mixer.leaves
    ]
    if not stored:
        raise QgateError(
            f"{model.name} keeps the last inputs of convolutions and no other state, which this "
            "mode leaves as they are: give StateChoices(conv=…)."
        )
    return stored


def state_entries(choices: StateChoices, model: Model) -> list[PlanEntry]:
    """List the states that a model stores."""
    ranges = state_ranges(model) if choices.is_static else {}
    samples = len(model.calibration_samples()) if choices.is_static else 0
    return [
        _entry(site, choices.chosen[side], ranges, samples)
        for site, side in stored_sides(choices, model)
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
    for mixer in named_mixers(model, reached(network, in_place=True)):
        for side, choice in choices.chosen.items():
            if side in mixer.leaves:
                site = mixer.site(side)
                cast = StoredState(site, choice, static_scale(choice, ranges, site), choices.seed)
                mixer.part(side).store = cast.eval()
