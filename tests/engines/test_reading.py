from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import qgate
from qgate.engines.compute import token_values
from qgate.engines.opening import open_run
from qgate.errors import QgateError
from qgate.models.tiny import TINY
from tests.engines import runs
from tests.shares import share

WRITERS: dict[str, Callable[[Path, runs.Scored], Path]] = {
    ".npz": runs.write_npz,
    ".safetensors": runs.write_safetensors,
    ".pt": runs.write_torch,
    ".ragged.safetensors": runs.write_ragged,
}


def _check_scores(spec: Path, run: runs.Scored) -> None:
    samples = open_run(str(spec)).samples
    assert len(samples) == len(run.ids)
    for index, sample in enumerate(samples):
        assert sample.ids.tolist() == run.ids[index].tolist()
        values = token_values(sample, sample)
        np.testing.assert_allclose(values.actual[1:], run.logprobs[index, 1:], atol=1e-12)


@pytest.mark.parametrize("ending", WRITERS)
def test_logits_of_each_kind_of_file_give_the_log_probabilities(
    tmp_path: Path, ending: str
) -> None:
    run = runs.scored()
    _check_scores(WRITERS[ending](tmp_path / f"run{ending}", run), run)


@pytest.mark.parametrize("kind", runs.LINES)
def test_lines_of_each_engine_give_the_log_probabilities(tmp_path: Path, kind: str) -> None:
    run = runs.scored()
    path = runs.write_lines(tmp_path / "run.jsonl", run, kind)
    _check_scores(path, run)
    samples = open_run(str(path)).samples
    assert [sample.name for sample in samples] == [f"r{i}" for i in range(runs.SAMPLES)]
    if kind != "plain":
        assert samples[3].best[1:].tolist() == run.best[3].tolist()


def test_log_probabilities_without_the_first_token_are_moved_by_one(tmp_path: Path) -> None:
    run = runs.scored()
    path = tmp_path / "run.safetensors"
    save_file({"tokens": run.ids, "logprobs": run.logprobs[:, 1:].contiguous()}, path)
    sample = open_run(str(path)).samples[2]
    assert np.isnan(sample.logprobs[0])
    assert sample.logprobs[1:].tolist() == run.logprobs[2, 1:].tolist()


@pytest.mark.parametrize("name", ["lengths", "attention_mask"])
def test_padding_behind_a_sample_is_left_out(tmp_path: Path, name: str) -> None:
    run = runs.scored()
    lengths = torch.tensor([40, 7, 40, 40, 12, 40])
    mask = (torch.arange(40) < lengths[:, None]).long()
    path = tmp_path / "run.safetensors"
    tensors = {"tokens": run.ids, "logits": run.logits}
    save_file(tensors | {name: lengths if name == "lengths" else mask}, path)
    assert [len(sample) for sample in open_run(str(path)).samples] == lengths.tolist()


def test_several_answers_to_a_prompt_are_samples_of_their_own(tmp_path: Path) -> None:
    line = {
        "request_id": "q",
        "prompt_token_ids": [5],
        "prompt_logprobs": [None],
        "outputs": [
            {"token_ids": [7], "logprobs": [{"7": {"logprob": -1.0, "rank": 1}}]},
            {"token_ids": [8], "logprobs": [{"8": {"logprob": -2.0, "rank": 2}}]},
        ],
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps([line]))
    samples = open_run(str(path)).samples
    assert [(sample.name, sample.ids.tolist()) for sample in samples] == [
        ("q/0", [5, 7]),
        ("q/1", [5, 8]),
    ]
    assert samples[0].best.tolist() == [-1, 7]
    assert samples[1].best.tolist() == [-1, -1]


BAD_LINES = {
    "no JSON": ("{", "line 1 is no JSON"),
    "no object": ("7", "line 1: 7 is no object"),
    "another layout": ('{"text": "x"}', "it has text; what can be read is {tokens"),
    "texts in place of ids": (
        '{"choices": [{"logprobs": {"tokens": [" the"], "token_logprobs": [-1.0]}}]}',
        "its tokens are texts such as ' the', not ids; ask the server for "
        "return_tokens_as_token_ids",
    ),
    "no tokens": ('{"logprobs": [-1.0]}', "token ids are needed"),
    "another length": ('{"tokens": [1, 2], "logprobs": [-1.0]}', "2 tokens and 1 log-prob"),
    "a probability": ('{"tokens": [1], "logprobs": [0.7]}', "of token 1 is 0.7, above 0"),
    "a text": ('{"tokens": [1], "logprobs": ["low"]}', "of token 1 is 'low'"),
    "a token below zero": ('{"tokens": [-4], "logprobs": [-1]}', "token -4 is no token id"),
    "a table without its token": (
        '{"prompt_token_ids": [3], "prompt_logprobs": [{"4": {"logprob": -1}}], "outputs": []}',
        "the log-probabilities of token 3 do not hold it",
    ),
    "no log-probabilities of SGLang": ('{"meta_info": {}}', "ask for return_logprob"),
    "no log-probabilities of vLLM": ('{"outputs": [{}]}', "ask for logprobs=0"),
    "no log-probabilities of a choice": ('{"choices": [{}]}', "ask for logprobs=1"),
    "a number as a list": ('{"tokens": 5, "logprobs": [1]}', "5 is no list"),
    "a key missing": (
        '{"choices": [{"logprobs": {"content": [{"token": "token_id:3"}]}}]}',
        "'logprob' is missing",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    line, words = BAD_LINES[name]
    path = tmp_path / "run.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(QgateError) as error:
        open_run(str(path))
    assert words.replace("line 1", "line 2") in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


IDS, LOGITS = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, 9)
BAD_TENSORS = {
    "no ids": ({"logits": LOGITS}, "has no token ids: it holds logits"),
    "no logits": ({"tokens": IDS}, "has no logits: it holds tokens"),
    "ids of floats": (
        {"tokens": torch.zeros(2, 5), "logits": LOGITS},
        "token ids are float32 of shape",
    ),
    "another length": ({"tokens": IDS[:, :3].clone(), "logits": LOGITS}, "logits are float32 of"),
    "another number": ({"tokens": IDS, "logits": LOGITS[0].clone()}, "one row per token"),
    "padding before": (
        {"tokens": IDS, "logits": LOGITS, "attention_mask": torch.tensor([[0, 1, 1, 1, 1]] * 2)},
        "padding before tokens",
    ),
    "lengths beyond": (
        {"tokens": IDS, "logits": LOGITS, "lengths": torch.tensor([5, 6])},
        "lengths are [5, 6], of 2 samples of 5 tokens",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str) -> None:
    tensors, words = BAD_TENSORS[name]
    path = tmp_path / "run.safetensors"
    save_file(tensors, path)
    with pytest.raises(QgateError, match="safetensors") as error:
        open_run(str(path))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.npz", "there is no file"),
        ("missing", "is not there"),
        ("notes.txt", "files that can be read end in .npz"),
        ("binary.jsonl", "is no text in UTF-8"),
    ],
)
def test_what_is_no_run_is_one_line(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QgateError) as error:
        open_run(str(tmp_path / name))
    assert words in str(error.value)
    assert name in str(error.value)


def _dump(folder: Path, sites: str, calls: int = 2) -> runs.Scored:
    """Collect a language model, and return what it computed."""
    network = TINY.get("tiny-llama").load()
    ids = torch.randint(256, (calls, 3, 24), generator=torch.Generator().manual_seed(0))
    collector = qgate.collect(network, folder, sites=sites, phases=("forward",), iterations=calls)
    logits = []
    with torch.no_grad(), collector:
        for batch in ids:
            logits.append(network(batch))
            collector.step()
    return runs.Scored(ids.flatten(0, 1), torch.cat(logits))


def test_a_dump_gives_its_tokens_and_logits(tmp_path: Path) -> None:
    run = _dump(tmp_path / "dump", "embedding|linear")
    _check_scores(tmp_path / "dump", run)
    named = open_run(str(tmp_path / "dump"), "lm_head")
    assert len(named.samples) == 6


@share(3)
@pytest.mark.parametrize(
    ("sites", "head", "words"),
    [
        ("linear", "", "has no token ids"),
        ("embedding", "", "has no output that looks like logits"),
        ("embedding|linear", "score", "has no output of 'score'"),
    ],
)
def test_a_dump_without_tokens_or_logits_says_what_to_collect(
    tmp_path: Path, sites: str, head: str, words: str
) -> None:
    _dump(tmp_path / "dump", sites, calls=1)
    with pytest.raises(QgateError) as error:
        open_run(str(tmp_path / "dump"), head)
    assert words in str(error.value)
