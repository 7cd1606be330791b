"""Compare a rollout engine with a trainer whose kernel is wrong at one position."""

import numpy as np
import torch

from qgate.engines.comparison import compare_engines
from qgate.engines.texts import headline

draw = torch.Generator().manual_seed(0)
tokens = torch.randint(1000, (4, 64), generator=draw)
rollout = torch.randn(4, 64, 1000, generator=draw)
trainer = rollout + 1e-3 * torch.randn(rollout.shape, generator=draw)
trainer[2, 30] *= 1.1
np.savez("rollout.npz", tokens=tokens, logits=rollout)
np.savez("trainer.npz", tokens=tokens, logits=trainer)

record = compare_engines("trainer.npz", "rollout.npz")
assert headline(record).startswith("trainer.npz and rollout.npz differ by KL")
first = record.figures.carriers[0]
assert (first.sample, first.position) == ("2", 31)
assert first.share > 0.9
