"""Records of comparisons that nobody made: a large one, and one with names that break pages."""

from __future__ import annotations

from dataclasses import replace

from qgate.checkpoints.record import (
    CheckpointFinding,
    CheckpointRecord,
    ScaleFigures,
    WeightFigures,
    WeightRecord,
    WorstBlock,
)
from tests.hostile import HOSTILE

LAYERS, EXPERTS = 48, 4
FORMATS = ("int4 per 128", "fp8_e4m3 in tiles of 128 x 128")


def quantized(name: str, over: float, form: str = FORMATS[0]) -> WeightRecord:
    """Return a quantized weight with an error over ideal."""
    scales = ScaleFigures(512, 0, 0, 0, 1e-3, 2e-2, False, 0.01, (-10, (3, 40, 300, 160, 9)))
    error = 0.009 * 10 ** (over / 10)
    figures = WeightFigures(65536, 0, 0.05, 0, 0.02, scales, error, 0.99, over, None, (7, over))
    return WeightRecord(name, "packed", form, 33280, 65536, (name,), "name", "quantized", figures)


def kept(name: str) -> WeightRecord:
    return WeightRecord(name, "", "BF16", 4096, 2048, (name,), "name", "equal")


def block(name: str) -> WorstBlock:
    """Return a block with a value that is not finite."""
    parent = tuple(0.01 * ((at * 7) % 13 - 6) for at in range(64))
    values = tuple(None if at == 9 else round(x * 50) / 50 for at, x in enumerate(parent))
    return WorstBlock(name, 12, 128, 0.02, 0.009, values, parent)


def large() -> CheckpointRecord:
    """Return a mixture of experts with a fault in one layer and an outlier in another."""
    record = CheckpointRecord("exports/mixture-w4a16", "models/mixture", "compressed-tensors")
    record.recipe = [
        f"{FORMATS[0]} of re:.*experts.*",
        f"{FORMATS[1]} of Linear",
        "ignores lm_head",
    ]
    weights = [kept("model.embed_tokens.weight"), kept("lm_head.weight"), kept("model.norm.weight")]
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        weights += [kept(f"{stem}.{name}_layernorm.weight") for name in ("input", "post_attention")]
        for at, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
            over = 0.05 * ((layer * 5 + at * 3) % 7)
            weights.append(quantized(f"{stem}.self_attn.{name}.weight", over, FORMATS[1]))
        for expert in range(EXPERTS):
            for at, name in enumerate(("gate_proj", "up_proj", "down_proj")):
                over = 0.04 * ((layer + expert * 3 + at) % 9)
                weights.append(quantized(f"{stem}.mlp.experts.{expert}.{name}.weight", over))
    bad = "model.layers.17.mlp.experts.2.up_proj.weight"
    odd = "model.layers.30.self_attn.k_proj.weight"
    changed = {bad: 13.2, odd: 0.95}
    record.weights = [
        quantized(weight.name, changed[weight.name], weight.format)
        if weight.name in changed
        else weight
        for weight in weights
    ]
    lost = "model.layers.40.self_attn.q_proj.bias"
    record.unmatched_parents = [lost]
    record.findings = [
        CheckpointFinding(bad, "neighboring codes are swapped (the order of nibbles): 13.2 dB worse "
                               "than ideal", 13.2),
        CheckpointFinding(lost, "it is in the parent alone"),
        CheckpointFinding("re:.*visual.*", "this ignore pattern matches no module"),
    ]  # fmt: skip
    record.blocks = [block(bad), *(block(odd) for _ in range(5))]
    return record


def hostile() -> CheckpointRecord:
    """Return a record in which every text is one that breaks pages, tables or terminals."""
    record = CheckpointRecord(HOSTILE[0], HOSTILE[1], HOSTILE[2])
    record.weights = [
        replace(quantized(name, 2.0, name), matched=name, parents=(name,), packing=name)
        for name in HOSTILE
    ]
    record.weights += [replace(kept(f"layers.{at}.{name}"), format=name)
                       for at, name in enumerate(HOSTILE[:40])]  # fmt: skip
    record.findings = [CheckpointFinding(name, name[::-1], 2.0) for name in HOSTILE]
    record.recipe, record.notes = list(HOSTILE), list(HOSTILE)
    record.unmatched_parents = list(HOSTILE)
    record.blocks = [block(name) for name in HOSTILE[:20]]
    return record
