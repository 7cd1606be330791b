"""A model of your own with a kernel of your own: `--model my_model:build` in this folder.

`build` returns a `qgate.Model`: the module, the inputs it is run on, and the modes it brings. A
mode is a callable that takes the Model and returns the module quantized for real; here torchao's
int8 kernels, next to which qgate's simulated `int8` can be run on the same module.
"""

import copy

import torch
from torch import nn

import qgate
from qgate.modes import Kernel


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class MyModel(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def torchao_int8(model: qgate.Model) -> nn.Module:
    """Return the model with INT8 weights and inputs per token, computed by torchao's kernels."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantized = copy.deepcopy(model.module)  # the reference stays as it is
    quantize_(quantized.layers, Int8DynamicActivationInt8WeightConfig())
    return quantized


def build(samples: int = 4, seed: int = 0) -> qgate.Model:
    """Return the model; qgate passes the fields of `qgate.models.Sampling` that are named here."""
    torch.manual_seed(seed)
    module = MyModel()
    inputs = [torch.randn(2, 16, 64) for _ in range(samples)]
    return qgate.Model(
        module,
        inputs,
        name="my-model",
        head=("head",),
        modes={"torchao_int8": Kernel(torchao_int8, stands_for="int8")},
    )


def main() -> None:
    """Distance of the real kernel and of the simulated mode to the FP32 reference, per block."""
    from qgate import capture, modes

    model = build()
    for mode in modes.modes_of(model, "int8,torchao_int8"):
        quantized = modes.apply(mode, model)
        for site, error in capture.compare_runs(quantized.model, model).items():
            print(f"{mode.name:12} {site:15} {error.metric('sqnr_db'):5.1f} dB")


if __name__ == "__main__":
    main()
