"""Gate a network of convolutions that PT2E (PyTorch 2 Export) quantizes, by its outputs alone.

    pytest suites --model docs/recipes/pt2e.py:build --mode pt2e

PT2E makes a graph that calls no modules, so nothing inside it can be compared: its outputs are held
against accepted errors. It is calibrated on other samples than those that are evaluated. For a
target other than x86, use the quantizer of that target: `ArmInductorQuantizer`, or your own.
"""

import torch
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
from torch import nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import qgate


def pt2e(model: qgate.Model) -> nn.Module:
    """Export the network, calibrate it on the calibration samples, and quantize it."""
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    exported = torch.export.export(model.module, (model.inputs[0],)).module()
    prepared = prepare_pt2e(exported, quantizer)
    for sample in model.calibration_samples():
        prepared(sample)
    return move_exported_model_to_eval(convert_pt2e(prepared))


def build(samples: int = 4, calib_samples: int = 4, seed: int = 0) -> qgate.Model:
    """Return a network and images; load your own checkpoint and images in their place."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    images = list(torch.randn(samples + calib_samples, 4, 3, 16, 16))
    return qgate.Model(
        module,
        images[:samples],
        name="pt2e",
        calibration=images[samples:],
        modes={"pt2e": pt2e},
    )
