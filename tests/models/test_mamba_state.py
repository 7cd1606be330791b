"""A Mamba with states to decode with computes what it computes without them."""

from __future__ import annotations

import pytest
import torch

from qgate.errors import QgateError
from qgate.models.mamba.network import Mamba
from tests.gate.state_models import small_mamba


@pytest.fixture(scope="module")
def network() -> Mamba:
    module = small_mamba().module
    assert isinstance(module, Mamba)
    return module


IDS = torch.arange(3 * 45).reshape(3, 45) % 50
CHUNKS = {"tokens": [1] * 45, "whole": [45], "chunks": [16, 16, 13], "short": [2, 1, 2, 40]}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_states_change_no_result(chunks: str, network: Mamba) -> None:
    with torch.no_grad():
        expected, cache = network(IDS), network.new_cache()
        for _request in range(2):
            parts = [network(part, cache) for part in IDS.split(CHUNKS[chunks], 1)]
            torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-4)
            assert {state.length for state in cache} == {45}
            for state in cache:
                state.reset()


def test_states_of_others_are_refused(network: Mamba) -> None:
    cache = network.new_cache()
    with pytest.raises(QgateError, match=r"states of 1 layers after \[0\] tokens do not fit"):
        network(IDS, cache[:1])
    network(IDS, cache)
    with pytest.raises(QgateError, match="states of 3 sequences cannot take tokens of 2"):
        network(IDS[:2], cache)
    cache[0].reset()
    with pytest.raises(QgateError, match=r"after \[0, 45\] tokens do not fit"):
        network(IDS, cache)
