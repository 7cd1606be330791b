"""Images and sounds from a seeded generator: samples for models of vision and audio.

An image is smooth shading in several octaves, a few flat shapes with edges, and a little noise. A
sound is a few tones that come and go over noise. All is computed in whole numbers, from draws that
numpy promises to keep: the values are the same on every machine and version.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.models.language import Part

Grid = npt.NDArray[np.int64]

RATE = 16_000  # samples of a waveform per second
_BITS = 12  # a value of 1.0 is 2**12
_ONE = 1 << _BITS
_OCTAVES, _SHAPES, _TONES = 4, 6, 5
_TURN = 1 << 12  # entries of the sine table
_PHASE = 20  # bits of a turn


def image(shape: tuple[int, int, int], part: Part, index: int, seed: int = 0) -> Tensor:
    """Return an image of (channels, height, width) with values around 0, between -3 and 3."""
    draw = _generator(f"image {part}", index, seed)
    channels, height, width = shape
    light = 2 * _shading(draw, height, width)
    planes = [light + _shading(draw, height, width) for _ in range(channels)]
    for _ in range(_SHAPES):
        top, start = int(draw.randint(0, height)), int(draw.randint(0, width))
        bottom = top + int(draw.randint(1, max(2, height // 3)))
        end = start + int(draw.randint(1, max(2, width // 3)))
        for plane in planes:
            plane[top:bottom, start:end] = 2 * int(draw.randint(-_ONE, _ONE + 1))
    noise = draw.randint(-_ONE // 16, _ONE // 16 + 1, size=shape)
    return _as_floats(np.stack(planes) + noise)


def waveform(length: int, part: Part, index: int, seed: int = 0) -> Tensor:
    """Return a sound of `length` values at 16 kHz, between -6 and 6, of variance near 1."""
    draw = _generator(f"waveform {part}", index, seed)
    time = np.arange(length, dtype=np.int64)
    sound = draw.randint(-_ONE // 4, _ONE // 4 + 1, size=length).astype(np.int64)
    for hertz, begin, end in _tones(draw, length, 80, 4000):
        phase = time[begin:end] * ((hertz << _PHASE) // RATE) + int(draw.randint(0, 1 << _PHASE))
        turn = (phase & ((1 << _PHASE) - 1)) >> (_PHASE - 12)
        sound[begin:end] += _SINE[turn]
    return _as_floats(sound)


def spectrogram(bands: int, frames: int, part: Part, index: int, seed: int = 0) -> Tensor:
    """Return features of a sound, (bands, frames), between -2 and 2: tones over noise."""
    draw = _generator(f"spectrogram {part}", index, seed)
    energy = _shading(draw, bands, frames) // 2 - _ONE // 2
    for band, begin, end in _tones(draw, frames, 0, bands):
        tone = energy[band : band + 2, begin:end]
        np.maximum(tone, _ONE // 2 + int(draw.randint(0, _ONE)), out=tone)
    noise = draw.randint(-_ONE // 8, _ONE // 8 + 1, size=(bands, frames))
    return _as_floats(energy + noise)


def _tones(
    draw: np.random.RandomState, length: int, low: int, high: int
) -> list[tuple[int, int, int]]:
    """Draw tones: the pitch, where it begins, and where it ends."""
    tones = []
    for _ in range(_TONES):
        begin = int(draw.randint(0, max(1, length // 2)))
        duration = int(draw.randint(length // 4, length // 2 + 2))
        tones.append((int(draw.randint(low, high)), begin, min(length, begin + duration)))
    return tones


def _generator(subject: str, index: int, seed: int) -> np.random.RandomState:
    """Return the generator of one sample; the stream of RandomState is frozen for good."""
    words = [zlib.crc32(subject.encode()), index, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    return np.random.RandomState(words)


def _shading(draw: np.random.RandomState, height: int, width: int) -> Grid:
    """Return smooth noise between -1.0 and 1.0: octaves of interpolated grids, each half as strong.

    Interpolation rounds down, in whole numbers.
    """
    total = np.zeros((height, width), dtype=np.int64)
    for octave in range(_OCTAVES):
        cells = 2 << octave
        knots = draw.randint(-_ONE, _ONE + 1, size=(cells + 1, cells + 1)).astype(np.int64)
        rows, columns = _positions(height, cells), _positions(width, cells)
        upper, lower = (_between(knots[rows[0] + k].T, columns) for k in (0, 1))
        blend = rows[1]
        total += ((upper * (256 - blend) + lower * blend) >> 8).T >> (octave + 1)
    return total


def _positions(size: int, cells: int) -> tuple[Grid, Grid]:
    """Return the cell that each pixel is in, and how far, in 256 steps."""
    position = np.arange(size, dtype=np.int64) * (cells << 8) // size
    return position >> 8, position & 255


def _between(knots: Grid, positions: tuple[Grid, Grid]) -> Grid:
    cell, step = positions[0], positions[1][:, None]
    return (knots[cell] * (256 - step) + knots[cell + 1] * step) >> 8


def _as_floats(whole: Grid) -> Tensor:
    """Return the values, which floats hold exactly."""
    return torch.from_numpy(np.asarray(whole, dtype=np.float32)) / _ONE


# Rounded to whole numbers, a sine is the same in every mathematical library.
_SINE: Grid = np.array([round(_ONE * math.sin(math.tau * k / _TURN)) for k in range(_TURN)])
