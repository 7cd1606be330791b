"""Images and sounds from a seeded generator: the same bits everywhere, smooth, in range."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from qgate.models.signals import image, spectrogram, waveform


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def test_the_values_are_the_same_on_every_machine() -> None:
    """Stored once: other digests are other samples, and every baseline of a vision model."""
    assert digest(image((3, 20, 24), "evaluation", 0)) == "ded68a971b0a816d"
    assert digest(waveform(3000, "evaluation", 1, seed=-5)) == "4b155ffa4dd3d4c5"
    assert digest(spectrogram(16, 50, "calibration", 2, seed=2**40)) == "aa6d5f8e6e6d07ca"


@pytest.mark.parametrize("size", [1, 2, 7, 224])
def test_an_image_is_smooth_and_in_range(size: int) -> None:
    pictures = torch.stack([image((3, size, size + 1), "evaluation", k) for k in range(8)])
    assert pictures.shape == (8, 3, size, size + 1)
    assert pictures.dtype == torch.float32
    assert float(pictures.abs().max()) <= 3
    if size < 200:
        return
    steps = (pictures[..., 1:] - pictures[..., :-1]).abs().mean()
    assert float(steps) < 0.2 * float(pictures.std()), "white noise has steps of about its spread"
    assert 0.3 < float(pictures.std()) < 1.5
    assert abs(float(pictures.mean())) < 0.3
    assert float(torch.corrcoef(pictures.flatten(1)).triu(1).abs().max()) < 0.7


def test_a_waveform_has_tones_over_noise() -> None:
    sounds = torch.stack([waveform(16000, "evaluation", k) for k in range(8)])
    assert 0.5 < float(sounds.var()) < 2
    assert float(sounds.abs().max()) <= 6
    power = torch.fft.rfft(sounds).abs().square()
    loudest = power.topk(20).values.sum(-1) / power.sum(-1)
    assert float(loudest.min()) > 0.3, "tones have their power in few frequencies"
    assert float(loudest.max()) < 0.99


def test_features_have_tones_that_last() -> None:
    features = torch.stack([spectrogram(80, 300, "evaluation", k) for k in range(8)])
    assert features.shape == (8, 80, 300)
    assert float(features.abs().max()) <= 2
    steps = [(features.diff(dim=axis)).abs().mean() for axis in (1, 2)]
    assert float(features.std()) > 0.2
    assert float(steps[1]) <= float(steps[0]), "a tone lasts, and its neighbors are silent"


@pytest.mark.parametrize("length", [1, 2, 5])
def test_tiny_shapes(length: int) -> None:
    assert waveform(length, "calibration", 0).shape == (length,)
    assert spectrogram(length, length, "calibration", 0).shape == (length, length)


def test_parts_numbers_and_seeds_differ() -> None:
    signal_keys = [
        ("evaluation", 0, 0),
        ("calibration", 0, 0),
        ("evaluation", 1, 0),
        ("evaluation", 0, 1),
    ]
    assert len({digest(image((1, 8, 8), part, k, seed)) for part, k, seed in signal_keys}) == 4  # type: ignore[arg-type]
    assert len({digest(waveform(64, part, k, seed)) for part, k, seed in signal_keys}) == 4  # type: ignore[arg-type]
