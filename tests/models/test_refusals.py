"""Samples that a model refuses: one line, wherever it happens, says which and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate.capture.running import run
from qgate.errors import QgateError
from qgate.gate.measuring.passes import outer_tensors
from qgate.models import Model
from qgate.modes import apply, modes_of

ROW = torch.arange(6).view(1, -1)


class Network(nn.Module):
    """Embeds ids, and mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(ids) * scale
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(*inputs: Any, name: str = "own") -> Model:
    return Model(Network(), inputs, name)


def refused(model: Model, number: int) -> str:
    with pytest.raises(QgateError) as caught:
        model(model.inputs[number])
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None, "the traceback of the model stays at hand"
    return str(caught.value)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (ROW + 4, ["(int64 1 x 6)", "IndexError: index out of range"]),
        ({"ids": ROW, "mask": ROW}, ["(ids int64 1 x 6, mask int64 1 x 6)", "TypeError", "'mask'"]),
        ((ROW, "two"), ["(int64 1 x 6, str)", "TypeError"]),
        ((), ["()", "TypeError", "ids"]),
        (None, ["(NoneType)", "TypeError"]),
        (torch.tensor(9), ["(int64 one number)", "IndexError"]),
    ],
)
def test_a_sample_that_is_refused_is_named(sample: Any, words: list[str]) -> None:
    message = refused(model_of(ROW, sample, ROW), 1)
    assert message.startswith("own cannot run sample 1 of 0 to 2 (")
    for word in words:
        assert word in message, message


def test_the_first_sample_too() -> None:
    with pytest.raises(QgateError, match="own cannot run sample 0 of 0 to 1"):
        model_of(ROW + 4, ROW).sites()


def test_samples_that_run_side_by_side() -> None:
    model = model_of(ROW, ROW + 1, ROW + 4)
    with pytest.raises(QgateError, match=r"own cannot run samples 0, 1, 2 of 0 to 2 \(int64 3 x 6"):
        outer_tensors(model, model.inputs)
    with pytest.raises(QgateError, match="own cannot run sample 2 of 0 to 2"):
        run(model, samples=model.inputs)


def test_in_a_mode() -> None:
    model = model_of(ROW, ROW + 4)
    quantized = apply(modes_of(model, "int8")[0], model).model
    assert "own cannot run sample 1 of 0 to 1 (int64 1 x 6): IndexError" in refused(quantized, 1)


def test_other_samples_have_no_number() -> None:
    with pytest.raises(
        QgateError, match=r"own cannot run a sample \(float32 2 x 6\): RuntimeError"
    ):
        model_of(ROW)(torch.zeros(2, 6))


def test_long_messages_and_odd_names_stay_one_line() -> None:
    message = refused(model_of(ROW, {"ids": ROW, "x" * 400: 1}, name="odd\x1b[31m\nname"), 1)
    assert message.isprintable()
    assert len(message) < 1000


def test_errors_of_qgate_pass_as_they_are() -> None:
    class Own(Network):
        def forward(self, *_ids: Any) -> Tensor:  # type: ignore[override]
            raise QgateError("read the manual")

    with pytest.raises(QgateError, match=r"^read the manual$"):
        Model(Own(), [ROW])(ROW)


# Devices ----------------------------------------------------------------------------------------

MIXED = """
Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"""


class Mixing(nn.Module):
    """Refuses its input in the words of torch; some of its weights may be elsewhere."""

    def __init__(self, elsewhere: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, device="meta" if elsewhere else "cpu")

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            raise RuntimeError(MIXED.strip())
        return x


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [
        (
            True,
            "cuda:0 and cpu; it has first.weight and 1 more on cpu, second.weight and 1 more on "
            "meta: move it to one device with .to(DEVICE), or let its own code move what flows "
            "between them.",
        ),
        (
            False,
            "cuda:0 and cpu; its weights are all on cpu: its code makes or keeps another tensor "
            "elsewhere, which register_buffer or device=x.device would move along.",
        ),
    ],
)
def test_a_mixture_of_devices_says_what_lies_where(elsewhere: bool, words: str) -> None:
    model = Model(Mixing(elsewhere), [torch.ones(1, 4)], "own")
    message = refused(model, 0)
    assert message.startswith("own cannot run sample 0 of 0 to 0 (float32 1 x 4): RuntimeError: ")
    assert message.endswith(words)
