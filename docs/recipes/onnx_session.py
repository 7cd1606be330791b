"""Gate a network that ONNX Runtime quantizes and runs, by its outputs alone.

    pytest suites --model docs/recipes/onnx_session.py:build --mode onnx_int8

The session is wrapped in a module without submodules, so nothing inside it can be compared: its
outputs are held against accepted errors. Pass the path of your own ONNX file in place of the one
that is exported here.
"""

import tempfile
from pathlib import Path

import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn

import qgate


class Session(nn.Module):
    """A session of ONNX Runtime as a torch module."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0].name

    def forward(self, x: Tensor) -> Tensor:
        (output,) = self.session.run(None, {self.input: x.numpy()})
        return torch.from_numpy(output)


def onnx_int8(model: qgate.Model) -> nn.Module:
    """Export the network and quantize it: INT8 weights, inputs with dynamic scales."""
    with tempfile.TemporaryDirectory() as folder:
        plain, quantized = Path(folder, "plain.onnx"), Path(folder, "quantized.onnx")
        torch.onnx.export(model.module, (model.inputs[0],), plain, dynamo=False)
        quantize_dynamic(plain, quantized, weight_type=QuantType.QInt8)
        return Session(quantized)


def build(samples: int = 4, seed: int = 0) -> qgate.Model:
    """Return a network of linear layers; load yours in its place."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    module, inputs = nn.Sequential(*blocks, nn.Linear(64, 10)), torch.randn(samples, 2, 16, 64)
    return qgate.Model(module, list(inputs), name="onnx-session", modes={"onnx_int8": onnx_int8})
