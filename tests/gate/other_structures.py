"""Right models of one's own of many structures, by name: none of their gates may be red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import qgate
from tests.gate import structures_of_choices as choices
from tests.gate import structures_of_code as code
from tests.gate import structures_of_fields as fields
from tests.gate import structures_of_images as images
from tests.gate import structures_of_sets as sets
from tests.gate import structures_of_texts as texts
from tests.gate import structures_of_training as training
from tests.gate.structure_parts import WORDS

TOKENS = 24
MODES = ("int8", "mxfp4", "bf16", "fp16")


@dataclass(frozen=True)
class Structure:
    """A network and a function that makes one of its samples from a generator."""

    network: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Any]


def model_of(name: str) -> qgate.Model:
    """Make a model of the registry, with its samples of seed 0."""
    structure, generator = STRUCTURES[name], torch.Generator().manual_seed(0)
    samples = [structure.sample(generator) for _ in range(2)]
    torch.manual_seed(4)
    return qgate.Model(structure.network().eval(), samples, name, calibration=samples)


def _ids(generator: torch.Generator, rows: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, WORDS, (rows, tokens), generator=generator)


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator)


def _named(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda generator: {
        name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()
    }


def _ended_early(generator: torch.Generator) -> Tensor:
    ids = _ids(generator).clamp_min(1)
    ids[:, -5:] = texts.StopsEarly.padding
    return ids


def _padded(generator: torch.Generator) -> dict[str, Tensor]:
    padding = torch.arange(TOKENS) >= torch.tensor([TOKENS, 15])[:, None]
    return {"ids": _ids(generator), "padding": padding}


def _of_lengths(generator: torch.Generator) -> dict[str, Tensor]:
    return {"ids": _ids(generator, 3, 12), "lengths": torch.tensor([12, 7, 9])}


def _nested(generator: torch.Generator) -> dict[str, Any]:
    first, second = (torch.randn(4, width, generator=generator) for width in (6, 3))
    return {"batch": {"views": [first, second], "extra": [torch.zeros(4, 0)]}}


def _timed(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": _normal(2, 4, 8, 8)(generator), "t": torch.tensor([3.0, 500.0])}


def _paired(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": _normal(4, 3, 16, 16)(generator), "input_ids": _ids(generator, 4, 10)}


def _of_edges(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _normal(20, 6)(generator), torch.randint(0, 20, (2, 50), generator=generator)


def _of_bags(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _normal(12, 5)(generator), torch.randint(0, 30, (12, 3, 4), generator=generator)


def _of_segments(generator: torch.Generator) -> dict[str, Tensor]:
    segments = (torch.arange(TOKENS) // 9).repeat(2, 1)
    return {"ids": _ids(generator), "segments": segments}


def _complex(generator: torch.Generator) -> Tensor:
    return torch.randn(6, 16, dtype=torch.cfloat, generator=generator)


def _heard(generator: torch.Generator) -> dict[str, Tensor]:
    return {"audio": _normal(2, 12, 10)(generator), "ids": _ids(generator, 2, 6)}


def _with_patches(generator: torch.Generator) -> dict[str, Tensor]:
    ids = _ids(generator, 2, 12).clamp_min(1)
    ids[:, :4] = 0
    return {"input_ids": ids, "pixel_values": _normal(2, 3, 16, 16)(generator)}


STRUCTURES = {
    "translator": Structure(choices.Translator, lambda g: {"src": _ids(g), "tgt": _ids(g, 2, 16)}),
    "looped": Structure(choices.Looped, _ids),
    "diffusion": Structure(fields.Diffusion, _timed),
    "two towers": Structure(fields.TwoTowers, _paired),
    "residual": Structure(fields.Residual, _normal(3, 3, 16, 16)),
    "vocoder": Structure(fields.Vocoder, _normal(2, 20, 12)),
    "graph": Structure(fields.Graph, _of_edges),
    "recommender": Structure(choices.Recommender, _of_bags),
    "expert choice": Structure(choices.ExpertChoice, _ids),
    "limited experts": Structure(choices.LimitedExperts, _ids),
    "skipped tokens": Structure(choices.SkippedTokens, _ids),
    "raw parameters": Structure(choices.RawParameters, _ids),
    "torch encoder": Structure(choices.TorchEncoder, _ids),
    "fourier operator": Structure(fields.FourierOperator, _normal(2, 32, 2)),
    "hyper network": Structure(choices.HyperNetwork, _ids),
    "recurrent cell": Structure(choices.RecurrentCell, lambda g: _ids(g, 2, 12)),
    "leaves early": Structure(choices.LeavesEarly, _ids),
    "perceiver": Structure(fields.Perceiver, _normal(3, 20, 7)),
    "segmentation": Structure(fields.Segmentation, _normal(2, 3, 16, 16)),
    "distance bias": Structure(choices.DistanceBias, _of_segments),
    "shifted windows": Structure(images.ShiftedWindows, _normal(2, 3, 16, 16)),
    "convnext": Structure(images.ConvNext, _normal(2, 3, 16, 16)),
    "mobile": Structure(images.SqueezedMobile, _normal(3, 3, 16, 16)),
    "efficient": Structure(lambda: images.SqueezedMobile(hard=False), _normal(3, 3, 16, 16)),
    "volumes": Structure(images.VolumeUnet, _normal(2, 1, 8, 8, 8)),
    "speech": Structure(images.SpeechEncoder, _normal(2, 200)),
    "causal convolutions": Structure(images.CausalConvolutions, _normal(2, 5, 24)),
    "variational": Structure(images.Variational, _normal(4, 1, 16, 16)),
    "standardized": Structure(images.StandardizedWeights, _normal(3, 3, 12, 12)),
    "detector": Structure(images.Detector, _normal(2, 3, 16, 16)),
    "shared tower": Structure(
        images.SharedTower, _named(left=(4, 1, 16, 16), right=(4, 1, 16, 16))
    ),
    "radiance field": Structure(sets.RadianceField, _named(points=(16, 3), directions=(16, 3))),
    "point cloud": Structure(sets.PointCloud, _normal(3, 20, 3)),
    "set transformer": Structure(sets.SetTransformer, _normal(3, 12, 3)),
    "tied autoencoder": Structure(sets.TiedAutoencoder, _normal(8, 24)),
    "only keywords": Structure(sets.OnlyKeywords, _named(features=(8, 6), context=(8, 3))),
    "named results": Structure(sets.NamedResults, _normal(8, 6)),
    "dataclass results": Structure(sets.DataclassResults, _normal(8, 6)),
    "nested inputs": Structure(sets.NestedInputs, _nested),
    "optional empty": Structure(sets.OptionalEmpty, _named(x=(2, 8, 6), prompt=(2, 0, 5))),
    "moving average": Structure(sets.MovingAverage, _normal(8, 6)),
    "adds in place": Structure(sets.AddsInPlace, _normal(2, 8, 6)),
    "complex signals": Structure(sets.ComplexSignals, _complex),
    "selective scan": Structure(texts.SelectiveScan, _ids),
    "token shift": Structure(texts.TokenShift, _ids),
    "linear attention": Structure(texts.LinearAttention, _ids),
    "random features": Structure(texts.RandomFeatures, _ids),
    "associative": Structure(texts.Associative, _ids),
    "grouped experts": Structure(texts.GroupedExperts, _ids),
    "shared keys": Structure(texts.SharedKeys, _ids),
    "shared layers": Structure(texts.SharedLayers, _ids),
    "relative buckets": Structure(texts.RelativeBuckets, _ids),
    "many heads": Structure(texts.ManyHeads, _ids),
    "adapted": Structure(texts.Adapted, _ids),
    "stops early": Structure(texts.StopsEarly, _ended_early),
    "masked encoder": Structure(texts.MaskedEncoder, _padded),
    "unit embeddings": Structure(texts.UnitEmbeddings, _ids),
    "both ways": Structure(texts.BothWays, _of_lengths),
    "packed": Structure(texts.PackedTexts, _of_lengths),
    "native bfloat16": Structure(texts.NativeBfloat16, _ids),
    "hooked weights": Structure(code.HookedWeights, _normal(40, 6)),
    "pruned weights": Structure(code.PrunedWeights, _normal(40, 6)),
    "tied head": Structure(code.TiedHead, _ids),
    "whole transformer": Structure(
        code.WholeTransformer, lambda g: {"src": _ids(g), "tgt": _ids(g, 2, 16)}
    ),
    "projected recurrent": Structure(code.ProjectedRecurrent, _ids),
    "bilinear": Structure(code.Bilinear, _named(left=(8, 6), right=(8, 3))),
    "ordinary equation": Structure(code.OrdinaryEquation, _normal(8, 6)),
    "circular": Structure(code.Circular, _normal(2, 3, 12, 12)),
    "rotated": Structure(code.Rotated, _ids),
    "class token": Structure(code.ClassToken, _normal(3, 3, 16, 16)),
    "ensemble": Structure(code.Ensemble, _normal(8, 6)),
    "one number": Structure(code.OneNumber, _normal(8, 6)),
    "mixed precision": Structure(code.MixedPrecision, _ids),
    "other weights": Structure(code.OtherWeights, _ids),
    "buckets": Structure(code.Buckets, _ids),
    "warped": Structure(code.Warped, _normal(2, 3, 16, 16)),
    "warped, nearest": Structure(lambda: code.Warped("nearest"), _normal(2, 3, 16, 16)),
    "doubles": Structure(lambda: code.Rotated().double(), _ids),
    "checkpointed": Structure(training.Checkpointed, _ids),
    "reentrant": Structure(lambda: training.Checkpointed(reentrant=True), _ids),
    "codebook": Structure(training.Codebook, _normal(40, 12)),
    "codebook of squares": Structure(lambda: training.Codebook(squares=True), _normal(40, 12)),
    "spectral norms": Structure(training.SpectralNorms, _normal(20, 12)),
    "styled images": Structure(training.StyledImages, _normal(4, 8)),
    "transducer": Structure(training.Transducer, _heard),
    "hyper connections": Structure(training.HyperConnections, _ids),
    "sorted experts": Structure(training.SortedExperts, _ids),
    "patches in texts": Structure(training.PatchesInTexts, _with_patches),
}
