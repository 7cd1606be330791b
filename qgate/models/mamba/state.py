"""States that a Mamba keeps while it decodes: the last inputs of a convolution, and a scan's state.

Both are numbers for every channel and do not grow with the text. A mixer reads them, computes its
new tokens, and writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qgate.errors import QgateError


@dataclass
class MixerState:
    """States of one mixer after `length` tokens; None before the first one.

    conv  what the convolution keeps of its last inputs, (batch, width - 1, channels)
    ssm   what the scan keeps of its state, (batch, channels, states)
    """

    conv: Tensor | None = None
    ssm: Tensor | None = None
    length: int = 0

    def reset(self) -> None:
        """Forget all tokens."""
        self.conv, self.ssm, self.length = None, None, 0


def check_cache(cache: Sequence[MixerState], layers: int, rows: int) -> None:
    """Refuse states of another network, of another batch, or of layers that saw other tokens."""
    lengths = {state.length for state in cache}
    if len(cache) != layers or len(lengths) != 1:
        raise QgateError(
            f"states of {len(cache)} layers after {sorted(lengths)} tokens do not fit a model of "
            f"{layers}: make them by network.new_cache(), and give each batch its own."
        )
    for state in cache:
        if state.ssm is not None and len(state.ssm) != rows:
            raise QgateError(
                f"states of {len(state.ssm)} sequences cannot take tokens of {rows}: give each "
                "batch states of its own, network.new_cache()."
            )
