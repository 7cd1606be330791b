"""Exports of the small network by GPTQ, AWQ, SmoothQuant and rotations, and faults of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints.exports import LAYERS, WIDTH, parent_tensors, write
from tests.checkpoints.faults import ExportFault
from tests.checkpoints.references import (
    IntegerWeight,
    activations,
    awq_parts,
    awq_scales,
    gptq,
    gptq_parts,
    hadamard,
    nearest,
    with_stored_scales,
)

Tensors = dict[str, Tensor]
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
PAIRS = (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj"))
GROUP = 32


def linear_names() -> Iterator[str]:
    for name in parent_tensors():
        if "_proj" in name:
            yield name.removesuffix(".weight")


@dataclass
class Export:
    """An export before it is packed: weights as codes, other tensors, and what is declared."""

    weights: dict[str, IntegerWeight]
    others: Tensors
    pack: Callable[[IntegerWeight], Tensors]
    settings: dict[str, Any]

    def write(self, folder: Path) -> Path:
        tensors = dict(self.others)
        for name, weight in self.weights.items():
            tensors |= {f"{name}.{ending}": x for ending, x in self.pack(weight).items()}
        return write(folder, tensors, {"quantization_config": self.settings})


def _split(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = set(linear_names())
    linear = {n: tensors[f"{n}.weight"].float() for n in names}
    return linear, {n: x for n, x in tensors.items() if n.removesuffix(".weight") not in names}


def export_gptq(seed: int, bits: int = 4, by_activation: bool = False, v2: bool = False) -> Export:
    linear, other_tensors = _split(parent_tensors(seed))
    weights = {
        name: with_stored_scales(
            gptq(w, activations(w.shape[1], seed=seed + number), bits, GROUP,
                 by_activation=by_activation)
        )
        for number, (name, w) in enumerate(sorted(linear.items()))
    }  # fmt: skip
    settings: dict[str, Any] = {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": by_activation,
    }  # fmt: skip
    if v2:
        settings["checkpoint_format"] = "gptq_v2"
    return Export(weights, other_tensors, lambda w: gptq_parts(w, 0 if v2 else 1), settings)


def scaled_tensors(seed: int, pairs: bool = True) -> Tensors:
    """Return the network with the scales that AWQ finds moved from weights to what is before."""
    tensors = {name: x.float() for name, x in parent_tensors(seed).items()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for number, (norm, readers) in enumerate(READERS.items()):
            names = [f"{prefix}{reader}.weight" for reader in readers]
            inputs = activations(WIDTH, seed=seed * 10 + number)
            scales = awq_scales([tensors[name] for name in names], inputs, points=10)
            tensors[f"{prefix}{norm}.weight"] /= scales
            for name in names:
                tensors[name] *= scales
        for number, (first, second) in enumerate(PAIRS if pairs else ()):
            weight = tensors[f"{prefix}{second}.weight"]
            inputs = activations(weight.shape[1], seed=seed * 10 + 5 + number)
            scales = awq_scales([weight], inputs, points=10)
            weight *= scales
            tensors[f"{prefix}{first}.weight"] /= scales[:, None]
    return tensors


def export_awq(seed: int) -> Export:
    linear, other_tensors = _split(scaled_tensors(seed))
    weights = {name: with_stored_scales(nearest(w, 4, GROUP)) for name, w in linear.items()}
    other_tensors = {name: x.bfloat16() for name, x in other_tensors.items()}
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    return Export(weights, other_tensors, awq_parts, settings)


def rotated_tensors(seed: int) -> Tensors:
    """Return the network with norms folded in, and what layers exchange rotated."""
    tensors = {name: x.float() for name, x in parent_tensors(seed).items()}
    rotation = hadamard(WIDTH, seed)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm, readers in READERS.items():
            for reader in readers:
                name = f"{prefix}{reader}.weight"
                tensors[name] = (tensors[name] * tensors[f"{prefix}{norm}.weight"]) @ rotation
            tensors[f"{prefix}{norm}.weight"] = torch.ones(WIDTH)
        for writer in ("self_attn.o_proj", "mlp.down_proj"):
            name = f"{prefix}{writer}.weight"
            tensors[name] = rotation.T @ tensors[name]
    tensors["lm_head.weight"] = (
        tensors["lm_head.weight"] * tensors["model.norm.weight"]
    ) @ rotation
    tensors["model.norm.weight"] = torch.ones(WIDTH)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] @ rotation
    return tensors


def export_rotated(seed: int, errors_passed_on: bool = False) -> Export:
    linear, other_tensors = _split(rotated_tensors(seed))
    weights = {
        name: with_stored_scales(
            gptq(w, activations(w.shape[1], seed=seed + number), 4, GROUP)
            if errors_passed_on
            else nearest(w, 4, GROUP)
        )
        for number, (name, w) in enumerate(sorted(linear.items()))
    }
    other_tensors = {name: x.bfloat16() for name, x in other_tensors.items()}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    return Export(weights, other_tensors, gptq_parts, settings)


# Faults -------------------------------------------------------------------------------------------

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj"
Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
NORM = "model.layers.1.post_attention_layernorm.weight"


def _weight(
    name: str, change: Callable[[IntegerWeight], IntegerWeight]
) -> Callable[[Export], None]:
    def plant(export: Export) -> None:
        export.weights[name] = change(export.weights[name])

    return plant


def _other(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Export], None]:
    def plant(export: Export) -> None:
        export.others[name] = change(export.others[name])

    return plant


def _in_order(weight: IntegerWeight) -> IntegerWeight:
    return replace(weight, groups=torch.arange(len(weight.groups)) // GROUP)


def _inverse(weight: IntegerWeight) -> IntegerWeight:
    """Store the groups in the order of quantization, not of columns."""
    order = weight.groups.argsort(stable=True)
    return replace(weight, groups=weight.groups[order.argsort().argsort().flip(0)])


def _nibbles(weight: IntegerWeight) -> IntegerWeight:
    rows, columns = weight.codes.shape
    return replace(weight, codes=weight.codes.reshape(rows, -1, 2).flip(2).reshape(rows, columns))


def _words(weight: IntegerWeight) -> IntegerWeight:
    rows, columns = weight.codes.shape
    return replace(weight, codes=weight.codes.reshape(rows, -1, 8).flip(2).reshape(rows, columns))


def _noisy(weight: IntegerWeight) -> IntegerWeight:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-1, 2, weight.codes.shape, generator=generator)
    return replace(weight, codes=(weight.codes + noise).clamp(0, 15))


def _end_unwritten(weight: IntegerWeight) -> IntegerWeight:
    codes = weight.codes.clone()
    codes[:, -16:] = 0
    return replace(weight, codes=codes)


def by_activation(seed: int) -> Export:
    return export_gptq(seed, by_activation=True)


def _unscaled(seed: int, name: str) -> IntegerWeight:
    return with_stored_scales(nearest(parent_tensors(seed)[f"{name}.weight"].float(), 4, GROUP))


FAULTS = (
    ExportFault("zero points stored without less one", export_gptq, UP, "zero points are 1 too high",
                _weight(UP, lambda w: replace(w, zeros=w.zeros + 1))),
    ExportFault("zero points stored less one twice", export_gptq, DOWN, "zero points are 1 too low",
                _weight(DOWN, lambda w: replace(w, zeros=w.zeros - 1))),
    ExportFault("group index left out", by_activation, DOWN, "g_idx", _weight(DOWN, _in_order)),
    ExportFault("group index of another order", by_activation, DOWN, "g_idx", _weight(DOWN, _inverse)),
    ExportFault("nibbles swapped", export_gptq, UP, "the order of nibbles", _weight(UP, _nibbles)),
    ExportFault("words reversed", export_gptq, UP, "codes of each word are in reversed", _weight(UP, _words)),
    ExportFault("groups moved", export_gptq, DOWN, "every scale belongs to the group",
                _weight(DOWN, lambda w: replace(w, scales=w.scales.reshape(-1).roll(1).reshape(w.scales.shape),
                                                zeros=w.zeros.reshape(-1).roll(1).reshape(w.zeros.shape)))),
    ExportFault("scales doubled", export_gptq, UP, "all scales are 2 times too high",
                _weight(UP, lambda w: replace(w, scales=w.scales * 2))),
    ExportFault("rows moved", export_gptq, UP, "rows stand in another order",
                _weight(UP, lambda w: replace(w, codes=w.codes.roll(1, 0), scales=w.scales.roll(1, 0),
                                              zeros=w.zeros.roll(1, 0)))),
    ExportFault("codes with noise", export_gptq, UP, "codes are not the nearest", _weight(UP, _noisy)),
    ExportFault("codes never written", export_gptq, UP, "codes are not the nearest", _weight(UP, _end_unwritten)),
    ExportFault("AWQ's norm not divided", export_awq, UP, "which nothing undoes",
                _other(NORM, lambda _: parent_tensors(0)[NORM])),
    ExportFault("AWQ's norm divided twice", export_awq, UP, "which nothing undoes",
                _other(NORM, lambda x: x * x / parent_tensors(0)[NORM])),
    ExportFault("AWQ left one reader of a norm out", export_awq, V, "undoes what was done to",
                lambda export: export.weights.update({V: _unscaled(0, V)})),
    ExportFault("AWQ's nibbles swapped", export_awq, Q, "the order of nibbles", _weight(Q, _nibbles)),
    ExportFault("AWQ left the weight before out", export_awq, DOWN, "which nothing undoes",
                lambda export: export.weights.update({
                    DOWN.replace("down", "up"): _unscaled(0, DOWN.replace("down", "up"))})),
    ExportFault("a norm divided for nothing", export_gptq, "model.layers.0.input_layernorm", "not the parent's",
                _other("model.layers.0.input_layernorm.weight", lambda x: (x / 1.3).bfloat16())),
    ExportFault("one weight not rotated", export_rotated, Q, "not to this",
                lambda export: export.weights.update({Q: _unscaled(0, Q)})),
    ExportFault("another rotation", export_rotated, UP, "rotated otherwise than model.embed_tokens",
                lambda export: export.weights.update({UP: with_stored_scales(nearest(
                    (parent_tensors(0)[f"{UP}.weight"].float() * parent_tensors(0)[NORM].float())
                    @ hadamard(WIDTH, 99), 4, GROUP))})),
    ExportFault("nibbles of a rotated weight", export_rotated, Q, "rotated otherwise than", _weight(Q, _nibbles)),
    ExportFault("a norm not folded", export_rotated, NORM, "all values are 1.5, the parent's are not",
                _other(NORM, lambda _: torch.ones(WIDTH).bfloat16() * 1.5)),
    ExportFault("scales of a rotated weight", export_rotated, K, "scales are 1.5. times the ideal",
                _weight(K, lambda w: replace(w, scales=w.scales * 1.5))),
)  # fmt: skip
