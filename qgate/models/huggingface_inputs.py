"""Inputs of networks that transformers loads: what a network is fed, and samples of it.

A new kind of input is one more entry of `FEEDS`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.models.huggingface_checks import OWN_CALLABLE, read_settings
from qgate.models.language import Part
from qgate.models.random_draws import draws_numbers, repeat_draws
from qgate.models.rows import MASK
from qgate.models.signals import RATE, image, spectrogram, waveform
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.models.model import Model

TEXT = "input_ids"
_IMAGE_SIZE, _CHANNELS = 224, 3
_VIEWS = 4
_TRIAL_TOKENS = 4

# The sample of an input: of a network's config, its folder, a part, a number and a seed.
Maker = Callable[[Any, Path, Part, int, int], Tensor]


def check_inputs(network: nn.Module, folder: Path) -> None:
    """Refuse a network that takes none of the inputs that there are samples of, or others too."""
    parameters = inspect.signature(network.forward).parameters
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {n for n, p in parameters.items() if p.default is p.empty and p.kind not in free}
    names = {TEXT, *FEEDS} & {*parameters}
    lacking = sorted(required - {*names, MASK}) if names else [*parameters][:1]
    if lacking or not names:
        raise QgateError(
            f"{type(network).__name__} in {str(folder)!r} takes {listed(lacking, 4) or 'nothing'}, "
            f"and hf:PATH feeds text ({TEXT}), images (pixel_values) and sound (input_values, "
            f"input_features); to gate it, {OWN_CALLABLE}."
        )


def fed_names(network: nn.Module) -> tuple[str, ...]:
    """Return the names of what a network is fed, in the order of its arguments.

    A network that runs on text alone gets text alone.
    """
    parameters = inspect.signature(network.forward).parameters
    names = tuple(name for name in parameters if name in (TEXT, *FEEDS))
    return (TEXT,) if names != (TEXT,) and TEXT in names and _runs_on_text(network) else names


def _runs_on_text(network: nn.Module) -> bool:
    can_generate = getattr(network, "can_generate", None)
    if callable(can_generate) and can_generate():
        return True
    with contextlib.suppress(Exception), torch.no_grad():
        network(input_ids=torch.ones(1, _TRIAL_TOKENS, dtype=torch.long))
        return True
    return False


@dataclass(frozen=True)
class NetworkFeed:
    """Maker of the samples of a network that is fed images or sound: one row each."""

    network: nn.Module
    folder: Path
    names: tuple[str, ...]
    seed: int

    def sample(self, part: Part, index: int, ids: Tensor | None) -> Any:
        """Return a sample: a tensor where it is the first argument, else keyword arguments."""
        config = self.network.config
        tensors: dict[str, Tensor] = {} if ids is None else {TEXT: ids}
        parameters = [*inspect.signature(self.network.forward).parameters]
        if ids is not None and MASK in parameters:
            tensors[MASK] = torch.ones_like(ids)
        tensors |= {
            name: FEEDS[name](config, self.folder, part, index, self.seed)
            for name in self.names
            if name in FEEDS
        }
        return tensors[parameters[0]] if [*tensors] == parameters[:1] else tensors

    def prepare(self, model: Model) -> None:
        """Run the first sample: a network that refuses it needs samples of its own.

        One that draws random numbers gets the same ones in every run.
        """
        try:
            with torch.no_grad():
                is_random = draws_numbers(lambda: model(model.inputs[0]))
        except QgateError as error:
            raise QgateError(
                f"{error}; what hf:PATH feeds {type(self.network).__name__} does not fit it: to "
                f"gate it, {OWN_CALLABLE}."
            ) from None
        if is_random:
            repeat_draws(model.module)


# What is fed ------------------------------------------------------------------------------------


def _image(config: Any, folder: Path, part: Part, index: int, seed: int) -> Tensor:
    """Return (1, channels, height, width), or (1, frames, …) of a video."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    height, width = _size(size) or _processed_size(folder) or (_IMAGE_SIZE, _IMAGE_SIZE)
    shape = _whole(vision, "num_channels") or _CHANNELS, height, width
    frames = _whole(vision, "num_frames")
    if not frames:
        return image(shape, part, index, seed)[None]
    numbers = range(index * frames, (index + 1) * frames)
    return torch.stack([image(shape, part, k, seed) for k in numbers])[None]


def _sound(config: Any, folder: Path, part: Part, index: int, seed: int) -> Tensor:  # noqa: ARG001
    """Return a second of sound, (1, length), or (1, frames, bands) where a config has bands."""
    audio = getattr(config, "audio_config", config)
    bands, frames = _whole(audio, "num_mel_bins"), _whole(audio, "max_length")
    if bands and frames:
        return spectrogram(bands, frames, part, index, seed).T.contiguous()[None]
    channels = _whole(audio, "audio_channels")
    if not channels:
        return waveform(RATE, part, index, seed)[None]
    numbers = range(index * channels, (index + 1) * channels)
    return torch.stack([waveform(RATE, part, k, seed) for k in numbers])[None]


def _features(config: Any, folder: Path, part: Part, index: int, seed: int) -> Tensor:  # noqa: ARG001
    """Return features of sound: (1, bands, frames) of Whisper, else (1, 100 frames, width).

    CLAP takes (1, views, frames, bands): one view, or where views are fused the whole and 3 cuts.
    """
    audio = getattr(config, "audio_config", config)
    bands, positions = _whole(audio, "num_mel_bins"), _whole(audio, "max_source_positions")
    side = _whole(audio, "spec_size")
    if bands and side >= bands:
        views = range(index * _VIEWS, (index + 1) * _VIEWS)[: _VIEWS if _is_fused(config) else 1]
        frames = side * (side // bands)
        of_views = [spectrogram(bands, frames, part, k, seed).T for k in views]
        return torch.stack(of_views)[None].contiguous()
    if bands and positions:
        return spectrogram(bands, 2 * positions, part, index, seed)[None]
    width = _whole(audio, "feature_projection_input_dim") or bands or 80
    return spectrogram(width, 100, part, index, seed).T.contiguous()[None]


def _is_longer(config: Any, folder: Path, part: Part, index: int, seed: int) -> Tensor:  # noqa: ARG001
    """Return (1, 1): where views of a sound are fused, it is longer than one of them."""
    return torch.full((1, 1), _is_fused(config))


def _is_fused(config: Any) -> bool:
    return getattr(getattr(config, "audio_config", config), "enable_fusion", None) is True


# A config may say anything; a size beyond these is none.
_MOST, _MOST_SIDE = 1 << 16, 1 << 13
FEEDS: dict[str, Maker] = {
    "pixel_values": _image,
    "input_values": _sound,
    "input_features": _features,
    "is_longer": _is_longer,
}


def _whole(config: Any, name: str) -> int:
    """Return a size of a config; 0 where it has none."""
    value = getattr(config, name, None)
    return value if type(value) is int and 0 < value <= _MOST else 0


def _size(value: Any) -> tuple[int, int] | None:
    """Read a height and a width, written as one number, two, or by their names."""
    if isinstance(value, dict):
        if "height" in value:
            return _size([value["height"], value.get("width")])
        value = value.get("shortest_edge")
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) == 2 and all(type(side) is int and 0 < side <= _MOST_SIDE for side in sides):
        return sides[0], sides[1]
    return None


def _processed_size(folder: Path) -> tuple[int, int] | None:
    """Read the size that images of a folder are cut to before the network."""
    alone = read_settings(folder / "preprocessor_config.json")
    beside = read_settings(folder / "processor_config.json").get("image_processor")
    for settings in (alone, beside):
        if isinstance(settings, dict):
            size = _size(settings.get("crop_size")) or _size(settings.get("size"))
            if size is not None:
                return size
    return None
