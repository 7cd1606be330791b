"""State modes on checkpoints of transformers, compared with transformers' own decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import QgateError, modes
from qgate.models import Sampling
from qgate.modes.setups import ModelSetup

transformers = pytest.importorskip("transformers")
DTYPES = {"state-bf16": torch.bfloat16, "state-fp16": torch.float16}
TOKENS = 40


@pytest.fixture(scope="module")
def network() -> Any:
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
        with torch.no_grad():
            for block in built.backbone.layers:
                block.mixer.dt_proj.bias.uniform_(-4, 0)
                block.mixer.in_proj.weight.mul_(40)
    return built


@pytest.fixture(scope="module")
def folder(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mamba")
    network.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(40, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def decoded(network: Any, ids: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return logits token by token; the cache of transformers is rounded after each."""
    cache, logits = None, []
    with torch.no_grad():
        for token in ids.unbind(1):
            result = network(token[:, None], cache_params=cache, use_cache=True)
            cache = result.cache_params
            logits.append(result.logits)
            for number in range(len(network.backbone.layers) if dtype else 0):
                for state in (cache.get_conv_state(number), cache.get_recurrent_state(number)):
                    state.copy_(state.to(dtype).float())
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", DTYPES)
def test_a_mode_decodes_as_transformers_with_a_rounded_cache(
    name: str, network: Any, folder: Path, ids: Tensor
) -> None:
    sampling = Sampling(1, TOKENS, 1, TOKENS, tokens=ids[0].repeat(2))
    model = ModelSetup(f"mamba:{folder}", sampling=sampling).load()
    quantized = modes.apply(modes.find_mode(name, "mamba"), model).model
    with torch.no_grad():
        actual, plain = quantized.module(ids), model.module(ids)
    expected = decoded(network, ids, DTYPES[name])
    torch.testing.assert_close(plain, decoded(network, ids, None), rtol=0, atol=1e-4)
    rounding = float((expected - plain).square().mean())
    distance = float((actual - expected).square().mean())
    assert distance < 1e-4 * rounding


@pytest.mark.parametrize("query", ["2-1", "2-*"])
def test_modes_of_the_block_are_refused_with_hf(query: str, folder: Path) -> None:
    with pytest.raises(QgateError, match=r"takes Mamba modes as mamba:PATH, whose network"):
        ModelSetup(f"hf:{folder}").check_modes(query)
