"""A model of one's own that must have its mask, and has no cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.sessions import Outcome
from qgate.models.rows import with_companions
from qgate.modes.setups import ModelSetup
from qgate.relations.gate import RelationGates

WIDTH, WORDS, TOKENS = 32, 40, 24


class Network(nn.Module):
    """Causal attention over real tokens; `counts` adds learned positions, counted from the left."""

    masks, counts = True, False

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(512, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        count = input_ids.shape[1]
        x = self.embed(input_ids)
        if self.counts:
            x = x + self.places(torch.arange(count))
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        if self.masks:
            padding = (attention_mask == 0)[:, None, :]
            hidden = hidden | padding & ~torch.eye(count, dtype=torch.bool)
        scores = self.query(x) @ self.key(x).mT / WIDTH**0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        logits: Tensor = self.out(x + weights @ self.value(x))
        return logits


def model_of(*, counts: bool = False) -> qgate.Model:
    torch.manual_seed(0)
    network = Network()
    network.counts = counts
    mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, 15])[:, None]).long()
    samples = [
        {"input_ids": torch.randint(0, WORDS, (2, TOKENS)), "attention_mask": mask}
        for _ in range(2)
    ]
    return qgate.Model(network, samples, "masked", calibration=samples)


def relations(model: qgate.Model, folder: Path, *, masks: bool) -> Outcome:
    bench = Bench(ModelSetup(model.name), _model=model)
    mode = bench.mode("int8")
    network = bench.quantized(mode).model.module
    assert isinstance(network, Network)
    network.masks = masks
    return RelationGates(bench, folder, Policy()).mode("relations", mode)


def test_a_mask_that_is_not_read_is_red_where_no_sample_has_padding_in_front(
    tmp_path: Path,
) -> None:
    model = model_of()
    right = relations(model, tmp_path, masks=True)
    assert right.passed, right.text
    wrong = relations(model, tmp_path, masks=False)
    assert not wrong.passed
    assert "breaks 'padded left'" in wrong.text


def test_a_model_that_counts_padding_as_tokens_is_green(tmp_path: Path) -> None:
    outcome = relations(model_of(counts=True), tmp_path, masks=True)
    assert outcome.passed, outcome.text
    assert "the reference gives other values, too" in str(outcome.record)


def test_ids_alone_get_what_the_network_must_have() -> None:
    model = model_of()
    ids = model.inputs[0]["input_ids"]
    ones = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.testing.assert_close(model(ids), model(ones), rtol=0, atol=0)

    def forward(ids: Tensor, position: Tensor, *, token_type: Tensor, left: int = 0) -> None:
        raise NotImplementedError

    example = {"ids": ids, "position": ids, "token_type": ids, "left": 3}
    sample = with_companions(forward, ids[:1], example)
    assert list(sample) == ["ids", "position", "token_type"]
    assert sample["position"].tolist() == [[*range(TOKENS)]]
    assert not bool(sample["token_type"].any())
    assert list(with_companions(Network().forward, ids, (ids, ids.bool()))) == [*ones]


@pytest.mark.parametrize("example", ["other name", "other shape"])
def test_what_is_not_known_is_not_made_up(example: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    beside = ids if example == "other name" else ids[:1]
    name = "bias" if example == "other name" else "attention_mask"

    def forward(input_ids: Tensor, bias: Tensor, attention_mask: Tensor) -> None:
        raise NotImplementedError

    assert with_companions(forward, ids, {"input_ids": ids, name: beside}) is ids
    with pytest.raises(QgateError, match="missing 1 required positional argument"):
        qgate.Model(Network(), [{"input_ids": ids}], "bare")(ids)
