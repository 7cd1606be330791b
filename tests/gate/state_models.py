"""A small Mamba whose states are quantized: two layers, untrained, with slow and fast decays."""

from __future__ import annotations

import torch

from qgate.models import Model
from qgate.models.mamba.network import Mamba, MambaConfig
from qgate.models.mamba.rotation import rotate


def small_mamba(number: int = 3, tokens: int = 48, seed: int = 0) -> Model:
    """Return a model of random weights on random tokens; its states grow over some ten tokens."""
    torch.manual_seed(seed)
    network = Mamba(MambaConfig(50, 32, 2, 64))
    with torch.no_grad():
        for mixer in network.mixers():
            mixer.dt_proj.bias.uniform_(-4, 0)
            mixer.in_proj.weight.mul_(2)
    generator = torch.Generator().manual_seed(seed)

    def texts(count: int) -> list[torch.Tensor]:
        return list(torch.randint(50, (count, tokens), generator=generator).split(1))

    return Model(
        network, texts(number), "small-mamba", calibration=texts(3), bases={"rotated": rotate}
    )
