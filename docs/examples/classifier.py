"""A model of your own: a module, samples, and a metric of its task."""

import torch
from torch import nn

import qgate


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))
        self.classifier = nn.Linear(32, 4)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.stem(features)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        scores = self.classifier(hidden)
        return {"classes": scores.argmax(-1), "scores": scores}


def accuracy(outputs, inputs):
    """Return the share of right answers in each sample."""
    labels = [sample["features"][:, :4].argmax(-1) for sample in inputs]
    pairs = zip(outputs, labels, strict=True)
    return [float((scores.argmax(-1) == label).float().mean()) for scores, label in pairs]


def build(samples: int = 4, calib_samples: int = 2, seed: int = 0) -> qgate.Model:
    torch.manual_seed(seed)
    data = [{"features": torch.randn(1, 16)} for _ in range(samples + calib_samples)]
    return qgate.Model(
        Classifier(), data[:samples], name="classifier", calibration=data[samples:], metric=accuracy
    )


model = build()
assert model.layers == ("blocks.0", "blocks.1", "blocks.2")
