"""Faults inside of recurrent layers are red and named; right layers of one's own are green."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.modes import Kernel
from qgate.results import Tally
from tests.gate.own_kernels import int8_rows
from tests.gate.test_own_kernel_faults import gates_of
from tests.shares import share

Change = Callable[[nn.RNNBase], None]


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.rnn = kind(16, 24, batch_first=True)  # type: ignore[call-arg]
        self.layers = nn.ModuleList([nn.Linear(24, 24)])
        self.head = nn.Linear(24, 7)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(ids))
        return self.head(torch.relu(self.layers[0](hidden)))  # type: ignore[no-any-return]


def first_lines(kind: type[nn.RNNBase], change: Change, half: str, folder: Path) -> list[str]:
    """Run the gates of a mode whose recurrent layer is changed, a layer and the outputs."""

    def build(reference: qgate.Model) -> nn.Module:
        own = copy.deepcopy(reference.module)
        own = own.bfloat16() if half == "bf16" else own
        if not half:
            for linear in (own.layers[0], own.head):  # type: ignore[index]
                linear.weight.data = int8_rows(linear.weight.data)  # type: ignore[union-attr, arg-type, operator]
        change(own.rnn)  # type: ignore[arg-type]
        return own

    torch.manual_seed(0)
    samples = [torch.randint(0, 50, (1, 40)) for _ in range(2)]
    stands_for = half or qgate.modes.Rule(":weight$", "int8", per="row")
    model = qgate.Model(Tagger(kind), samples, "tagger", modes={"mine": Kernel(build, stands_for)})
    gated = gates_of(model, folder)
    mode = gated.bench.mode("mine")
    outcomes = [gated.layer("layer_outputs", mode, layer) for layer in gated.bench.layers]
    outcomes.append(gated.outputs("outputs", mode))
    rows = (
        {**row, "node": f"{number}", "seconds": 0.0}
        for number, outcome in enumerate(outcomes)
        for row in outcome.record["rows"]
    )
    return [cause.text() for cause in Tally(rows).causes]


def unchanged(_rnn: nn.RNNBase) -> None:
    """Leave the layer as it is."""


def rows_larger(rnn: nn.RNNBase) -> None:
    with torch.no_grad():
        rnn.weight_hh_l0[3:5] *= 1.01  # type: ignore[operator]


def without_bias(rnn: nn.RNNBase) -> None:
    """Compute without a bias that is stored all the same."""
    right = rnn.forward

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        stored = rnn.bias_hh_l0.data
        rnn.bias_hh_l0.data = torch.zeros_like(stored)
        try:
            return right(x)  # type: ignore[no-any-return]
        finally:
            rnn.bias_hh_l0.data = stored

    rnn.forward = forward  # type: ignore[method-assign]


def begins_anew(rnn: nn.RNNBase) -> None:
    right = rnn.forward

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        parts = [right(part) for part in (x[:, :64], x[:, 64:]) if part.shape[1]]
        return torch.cat([part[0] for part in parts], 1), parts[-1][1]

    rnn.forward = forward  # type: ignore[method-assign]


def gates_in_another_order(rnn: nn.RNNBase) -> None:
    """Read the forget gate before the input gate, or the update gate before the reset gate."""
    right, count = rnn.forward, 4 if isinstance(rnn, nn.LSTM) else 3
    stored = {name: parameter.data for name, parameter in rnn.named_parameters()}
    order = [1, 0, *range(2, count)]

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        for name, value in stored.items():
            getattr(rnn, name).data = torch.cat([value.chunk(count)[k] for k in order])
        try:
            return right(x)  # type: ignore[no-any-return]
        finally:
            for name, value in stored.items():
                getattr(rnn, name).data = value

    rnn.forward = forward  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Change, str]] = {
    "rows": (rows_larger, r"2 of \d+ rows of its weight_hh_l0 \(3, 4\) are 1\.0\d+ times"),
    "bias": (without_bias, "its bias_hh_l0 is left out"),
    "anew": (begins_anew, "its state begins anew at token 64"),
    "gates": (
        gates_in_another_order,
        "its gates are read in the order (forget, input|update, reset)",
    ),
}


@share(8)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    ("fault", "half"),
    # Own code in 16 bits gets no long text, and may store its weights otherwise.
    [*((fault, "") for fault in FAULTS), ("bias", "bf16"), ("gates", "bf16")],
)
def test_a_fault_inside_of_a_recurrent_layer_is_named(
    fault: str, kind: type[nn.RNNBase], half: str, tmp_path: Path
) -> None:
    change, words = FAULTS[fault]
    first = first_lines(kind, change, half, tmp_path)[0]
    assert first.startswith("rnn:output "), first
    assert re.search(words, first), first


@share(4)
@pytest.mark.parametrize("half", ["", "bf16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_right_recurrent_layer_is_green(
    kind: type[nn.RNNBase], half: str, tmp_path: Path
) -> None:
    assert first_lines(kind, unchanged, half, tmp_path) == []
