"""Who predicts next tokens: logits of every token that do not depend on the tokens after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.capture.next_tokens import masked_ids, predicts_next_tokens
from qgate.capture.running import loss_of, next_token_loss


class Tokens(nn.Module):
    """Logits of 16 entries; each token sees all others, those before it, or itself."""

    def __init__(self, reach: str, vocabulary: int = 16) -> None:
        super().__init__()
        self.reach = reach
        self.embed, self.out = nn.Embedding(16, 8), nn.Linear(8, vocabulary)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        x = self.embed(input_ids)
        if self.reach == "all":
            x = x + x.mean(-2, keepdim=True)
        elif self.reach == "before":
            x = x.cumsum(-2)
        return self.out(x)


IDS = torch.arange(24).reshape(2, 12) % 16


def model(samples: list[Any], reach: str = "before", vocabulary: int = 16) -> qgate.Model:
    torch.manual_seed(0)
    return qgate.Model(Tokens(reach, vocabulary), samples, "tokens")


@pytest.mark.parametrize(
    ("samples", "reach", "vocabulary", "expected"),
    [
        ([IDS], "before", 16, True),
        ([IDS], "itself", 16, True),
        ([{"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}], "before", 16, True),
        ([IDS.repeat(1, 20)], "before", 16, True),
        ([IDS], "all", 16, False),
        ([IDS[0]], "before", 16, False),
        ([{"input_ids": IDS}], "all", 16, False),
        ([IDS], "before", 8, False),
        ([IDS[:, :1]], "before", 16, False),
        ([IDS, (IDS.float(),)], "before", 16, False),
    ],
)
def test_a_model_that_reads_ahead_predicts_nothing(
    samples: list[Any], reach: str, vocabulary: int, expected: bool
) -> None:
    assert predicts_next_tokens(model(samples, reach, vocabulary)) is expected


def test_one_number_for_each_token_is_no_prediction() -> None:
    of = qgate.Model(nn.Sequential(nn.Embedding(16, 1), nn.Flatten(-2)), [IDS], "scores")
    assert not predicts_next_tokens(of)


def test_padding_is_marked_by_the_mask_of_its_sample() -> None:
    mask = torch.ones_like(IDS)
    mask[1, 8:] = 0
    marked = masked_ids(IDS, {"input_ids": IDS, "attention_mask": mask})
    assert torch.equal(marked[0], IDS[0])
    assert marked[1].tolist() == [*IDS[1, :8].tolist(), -1, -1, -1, -1]
    assert masked_ids(IDS, IDS) is IDS
    assert masked_ids(IDS, {"attention_mask": mask[:1]}) is IDS


def test_the_loss_is_that_of_token_ids_in_any_sample() -> None:
    of = model([IDS])
    expected = next_token_loss(of(IDS), IDS)
    assert torch.equal(next_token_loss(of(IDS), (IDS,)), expected)
    assert torch.equal(next_token_loss(of(IDS), {"input_ids": IDS}), expected)


def test_a_norm_at_the_end_does_not_keep_the_loss_constant() -> None:
    rows = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    for dims in (-1, (0, 1), (1, 2)):
        unit = rows / rows.norm(dim=dims, keepdim=True)
        loss = loss_of({"logits": unit, "hidden": unit}, None)
        (gradient,) = torch.autograd.grad(loss, rows)
        assert gradient.norm() > 0.1 * loss / rows.detach().norm(), dims


@pytest.mark.parametrize("shape", [(), (0,), (4,), (0, 8), (2, 3), (2, 3, 4, 5)])
def test_outputs_of_any_shape_have_a_loss(shape: tuple[int, ...]) -> None:
    loss = loss_of({"logits": torch.ones(2, 2), "more": torch.ones(shape)}, None)
    assert 0.5 < loss < 3.5
