"""fp16 rounds numbers below its normal ones in equal steps: right code with small values is green."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import qgate
from qgate.gate.measuring.bench import Bench
from qgate.modes.setups import ModelSetup
from tests.gate.benches import mode_of
from tests.gate.test_routing import SIZES
from tests.shares import share, slow_file

pytestmark = slow_file

GEMMA = transformers.GemmaConfig, transformers.GemmaForCausalLM, {"head_dim": 16}
OLMO = transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}


def wrong(family: Any, seed: int, factor: float = 1.0) -> list[str]:
    config, network, sizes = family
    torch.manual_seed(seed)
    samples = [torch.randint(1, 128, (1, 96)) for _ in range(3)]
    model = network(config(**SIZES, **sizes)).eval()
    of = Bench(ModelSetup("net"), _model=qgate.Model(model, samples, "net", calibration=samples))
    chosen = mode_of(of, "fp16")
    run: Any = of.quantized(chosen).model.module
    if factor != 1:
        embedding, product = run.model.embed_tokens, run.model.layers[0].mlp.down_proj
        right = product.forward
        product.forward = lambda x: right(x) * factor
        with torch.no_grad():
            embedding.weight[46] *= factor
    rows = of.measure(chosen)
    assert rows
    differing_sites = [row.site for row in rows for c in row.conformance or () if c.differing]
    return differing_sites + [row.site for row in rows if row.why]


@share(8)
@pytest.mark.parametrize("family", [GEMMA, OLMO], ids=["gemma", "olmo"])
@pytest.mark.parametrize("seed", [0, 1])
def test_small_values_in_fp16_are_green(family: Any, seed: int) -> None:
    assert wrong(family, seed) == []
    bad_sites = wrong(family, seed, 1.1)
    assert "model.embed_tokens:output" in bad_sites
    assert "model.layers.0.mlp.down_proj:output" in bad_sites
