"""Gates PT2E quantization of a network of convolutions, a graph, by its outputs alone.

    pytest suites --model docs/recipes/pt2e.py:build --mode pt2e

The graph calls no modules, so its outputs are held by the errors that were accepted. It is
calibrated on samples of its own. For another target take its quantizer: `ArmInductorQuantizer`, or
one of yours.
"""

import torch
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
from torch import nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import qgate


def pt2e(model: qgate.Model) -> nn.Module:
    """Export the network, observe its calibration samples, and quantize it."""
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    exported = torch.export.export(model.module, (model.inputs[0],)).module()
    prepared = prepare_pt2e(exported, quantizer)
    for sample in model.calibration_samples():
        prepared(sample)
    return move_exported_model_to_eval(convert_pt2e(prepared))


def build(samples: int = 4, calib_samples: int = 4, seed: int = 0) -> qgate.Model:
    """Return a network of convolutions; load your checkpoint and your images in its place."""
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
