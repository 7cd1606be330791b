"""The small trained models of this repository: their sizes and weight files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.loading import LateModule, explained_imports
from qgate.models.experts import slice_experts
from qgate.models.mamba.network import Mamba, MambaConfig
from qgate.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from qgate.models import llama as llama
    from qgate.models import moe as moe
    from qgate.models.llama import LlamaConfig
    from qgate.models.moe import MoeConfig
else:
    llama, moe = LateModule("qgate.models.llama"), LateModule("qgate.models.moe")


@dataclass(frozen=True)
class TinyModel:
    """A model whose weights are in the repository, and not in the package that is installed.

    `weights_of` is another one whose weights it has; `listed` gives its experts gate and up as
    layers of their own.
    """

    name: str
    about: str
    make_config: Callable[[], MambaConfig | LlamaConfig | MoeConfig]
    steps: int
    rate: float
    weights_of: str = ""
    listed: bool = False

    def build(self) -> nn.Module:
        """Build the network, not trained."""
        config = self.make_config()
        if isinstance(config, MambaConfig):
            return Mamba(config)
        return moe.Moe(config) if isinstance(config, moe.MoeConfig) else llama.Llama(config)

    @property
    def file(self) -> Path:
        title = (self.weights_of or self.name).replace("_", "-")
        return Path(str(resources.files("qgate.models"))) / "data" / f"{title}.safetensors"

    @property
    def title(self) -> str:
        return self.name.replace("_", "-")

    def load(self) -> nn.Module:
        """Load the network with its trained weights; fused experts as a module each."""
        with explained_imports():
            from safetensors.torch import load_file

        network = self.build()
        if not self.file.is_file():
            raise QgateError(
                f"the weights of {self.title} are files of qgate's repository, and not of the "
                "installed package: run this in a checkout, give a model of yours (--model "
                f"FILE.py:build), or train them with `python -m qgate.models.train "
                f"{self.file.stem}`."
            )
        network.load_state_dict(load_file(self.file), strict=False)
        slice_experts(network, listed=self.listed)
        return network.eval()


TINY: Registry[TinyModel] = Registry("tiny model")


# Other processes get these functions by their names.
def _mamba_config() -> MambaConfig:
    return MambaConfig(vocab_size=256, d_model=128, n_layer=5, d_inner=256)


def _llama_config() -> LlamaConfig:
    return llama.LlamaConfig(vocab_size=256, d_model=128, n_layer=5, heads=4, kv_heads=2, d_ff=256)


TINY.add(
    TinyModel(
        "tiny_mamba",
        "byte-level Mamba-1, 5 layers of width 128",
        _mamba_config,
        steps=900,
        rate=4e-3,
    )
)
TINY.add(
    TinyModel(
        "tiny_llama",
        "byte-level Llama, 5 layers of width 128, 4 heads sharing 2 keys and values",
        _llama_config,
        steps=2200,
        rate=3e-3,
    )
)


def _moe_config() -> MoeConfig:
    return moe.MoeConfig(
        vocab_size=256, d_model=128, n_layer=4, heads=4, kv_heads=2, d_ff=64, experts=8, top_k=2
    )


TINY.add(
    TinyModel(
        "tiny_moe",
        "byte-level mixture of experts, 4 layers of width 128, 2 of 8 experts, fused 3-D weights",
        _moe_config,
        steps=1000,
        rate=3e-3,
    )
)
TINY.add(
    TinyModel(
        "tiny_moe_list",
        "the weights of tiny-moe, each expert with layers of its own for gate, up and down",
        _moe_config,
        steps=1000,
        rate=3e-3,
        weights_of="tiny_moe",
        listed=True,
    )
)
