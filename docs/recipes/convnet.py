"""Gate number formats in a residual network of convolutions and batch norms.

    pytest suites --model docs/recipes/convnet.py:build --mode int8,mxfp8

Nothing but the model is configured: qgate finds its blocks, its head and the rows of its samples.
"""

import torch
from torch import Tensor, nn

import qgate


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        out = channels * stride
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of residual blocks, and a classifier."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(16), Residual(16))
        self.layer2 = nn.Sequential(Residual(16, 2), Residual(32))
        self.fc = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(images))).mean((2, 3)))


def build(samples: int = 4, seed: int = 0) -> qgate.Model:
    """Return the network and images; load your own checkpoint and images in their place."""
    torch.manual_seed(seed)
    module, images = ResNet(), torch.randn(samples, 4, 3, 16, 16)
    with torch.no_grad():  # gives the batch norms statistics, as training does
        for _ in range(20):
            module(torch.randn(16, 3, 16, 16))
    return qgate.Model(module, list(images), name="convnet")
