"""Tell rotated weights from broken ones: a rotation leaves the Gram matrix as it is.

Inputs are rotated as W R, where W Wᵀ stays; outputs as Rᵀ W, where WᵀW stays. Norms are multiplied
into the weights after them before. All weights of one network share R, the embedding too, so that
products of a weight's rows with the embedding's stay as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.checkpoints.compute import PER_DB
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.ideal import ideal_values
from qgate.checkpoints.methods.compared_rows import ComparedRows
from qgate.checkpoints.methods.surroundings import Surroundings

LINES = 128
"""Rows or columns whose products are compared."""
ALIKE = 0.8
"""Least correlation of products; those of other weights have about 0."""
SAME_LINE = 0.7
"""Cosine of a column and one of the parent's from which it is moved, not rotated."""


@dataclass(frozen=True)
class Rotation:
    """A rotation of one weight.

    side       "inputs" or "outputs"
    folded     the norm that was multiplied in before, empty for none
    noise      mean squared error of the values, as the products tell
    size       the values over those of the parent
    source     leading rows of the parent with the norm in it
    otherwise  the tensor that is rotated in another way, empty for none
    """

    side: str
    folded: str
    noise: float
    size: float
    source: Tensor
    otherwise: str = ""


def find_rotation(layer: Surroundings, weight: ComparedRows) -> Rotation | None:
    """Find out whether a weight is a rotation of its parent, and of which side."""
    values, parent = weight.leading()
    rotations = []
    for folded, source in _sources(layer, parent):
        lines = _lines(values), _lines(source)
        noise = _noise(*lines)
        if noise is not None and not _is_reordered(values.T, [source.T]):
            rotation = Rotation("inputs", folded, *noise, source)
            rotations.append(_compared(layer, rotation, *lines))
    own, before = weight.columns(LINES)
    lines = _lines(own), _lines(before)
    noise = _noise(*lines)
    if noise is not None and not _is_reordered(values, weight.parents()):
        rotation = Rotation("outputs", "", *noise, parent)
        rotations.append(_compared(layer, rotation, *lines))
    return min(rotations, key=lambda rotation: rotation.noise, default=None)


def is_rotated_twice(layer: Surroundings, weight: ComparedRows) -> bool:
    """Return True for a weight of a rotated network that has its parent's energy alone."""
    values, parent = weight.leading()
    folded = any(_is_folded(own) for length in weight.shape for _, own, _ in layer.norms(length))
    energies = [float(x.double().square().mean()) for x in (values, parent)]
    cosine = float((values * parent).double().mean()) / max(energies[1], 1e-300)
    return folded and abs(cosine) < 0.3 and abs(energies[0] - energies[1]) < 0.1 * energies[1]


def over_rotated_db(weight: QuantizedWeight, rotation: Rotation) -> float:
    """Return the error over that of an ideal quantizer of a parent rotated at random.

    Rotated weights are alike whatever the rotation is, so a random one shows the ideal error.
    """
    step = -(-len(rotation.source) // LINES) if weight.tile[0] == 1 else 1
    source = rotation.source[::step]
    scales, zeros, codes = (
        None if x is None else x[::step]
        for x in (weight.scales, weight.zero_points, weight.scale_codes)
    )
    assert scales is not None
    sample = replace(weight, elements=source, scales=scales, zero_points=zeros, scale_codes=codes)
    rotated = _rotated(source) if rotation.side == "inputs" else _rotated(source.T).T.contiguous()
    ideal, _ = ideal_values(sample, rotated)
    least = float((ideal - rotated).double().square().mean())
    return PER_DB * float(torch.tensor(max(rotation.noise, 1e-300) / max(least, 1e-300)).log10())


def _rotated(source: Tensor) -> Tensor:
    """Mix columns by random signs and a Fourier transform, which is orthogonal."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (source.shape[1],), generator=generator) * 2 - 1
    spectrum = torch.fft.fft(source * signs, norm="ortho")
    mixed: Tensor = spectrum.real + spectrum.imag
    return mixed


def _sources(layer: Surroundings, parent: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "", parent
    for name, own, source in layer.norms(parent.shape[1]):
        if _is_folded(own):
            yield name, parent * source


def _is_folded(norm: Tensor) -> bool:
    return bool((norm == norm[0]).all()) and bool(norm[0] == 1)


def _lines(x: Tensor) -> Tensor:
    return x[:: -(-len(x) // LINES)][:LINES].double()


def _noise(own: Tensor, before: Tensor) -> tuple[float, float] | None:
    """Return the mean squared error that products of lines tell, and how large values are.

    None if the products are not the parent's.
    """
    if len(own) < 8 or not bool(own.isfinite().all()):
        return None
    off_diagonal = ~torch.eye(len(own), dtype=torch.bool)
    actual, expected = (own @ own.T)[off_diagonal], (before @ before.T)[off_diagonal]
    if not _alike(actual, expected):
        return None
    size = float((actual * expected).sum() / expected.square().sum())
    actual = actual / size
    # A product has the error of both rows: (w + e)(v + f) - wv = wf + ev + ef.
    energies = before.square().sum(1)
    pairs = (energies[:, None] + energies[None, :])[off_diagonal].mean()
    square = (actual - expected).square().mean()
    length = own.shape[1]
    root = ((pairs / 2).square() + length * square).sqrt() - pairs / 2
    return float(root / length), size**0.5


def _alike(actual: Tensor, expected: Tensor) -> bool:
    norms = actual.norm() * expected.norm()
    if not float(norms):
        return False
    return float((actual * expected).sum() / norms) > ALIKE


def _is_reordered(values: Tensor, sources: Iterable[Tensor]) -> bool:
    """Return True if single rows of the parent stand elsewhere, or with another sign."""
    own = torch.nn.functional.normalize(_lines(values)[:16], dim=1)
    closest = torch.zeros(len(own), dtype=torch.float64)
    for source in sources:
        before = torch.nn.functional.normalize(source.double(), dim=1)
        closest = torch.maximum(closest, (own @ before.T).abs().amax(1))
    return bool((closest > SAME_LINE).float().mean() > 0.5)


def _compared(layer: Surroundings, rotation: Rotation, own: Tensor, before: Tensor) -> Rotation:
    """Compare the rotation of lines with that of the embedding."""
    embedding = layer.embedding(own.shape[1])
    if embedding is None:
        return rotation
    name, *rows = embedding
    actual, expected = (x @ row.double().T for x, row in zip((own, before), rows, strict=True))
    return rotation if _alike(actual, expected) else replace(rotation, otherwise=name)
