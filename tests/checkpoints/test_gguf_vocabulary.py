"""The vocabulary in the head of a GGUF file, written by gguf's own code, beside the parent's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.shipped.files import ShippedFiles
from qgate.checkpoints.shipped.gguf_vocabulary import vocabulary_findings
from qgate.checkpoints.shipped.tokenizers import added_tokens
from tests.checkpoints.shipped_exports import TEMPLATE, parent_shipment, tokenizer_json

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parent_shipment().write(tmp_path_factory.mktemp("vocabulary") / "parent")


def vocabulary(parent: Path) -> Fields:
    """Return tokens by id, with the padding that llama.cpp's converter adds, and gguf's own rest."""
    text = (parent / "tokenizer.json").read_text(encoding="utf-8")
    by_id = {number: token for token, number in Tokenizer.from_str(text).get_vocab().items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(96)]
    special = gguf.SpecialVocab(parent, load_merges=True)
    return {
        "tokens": tokens,
        "merges": list(special.merges),
        "ids": dict(special.special_token_ids),
        "flags": dict(special.add_special_token),
        "template": special.chat_template,
        "model": "gpt2",
    }


def written(path: Path, fields: Fields) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if fields["model"]:
        writer.add_tokenizer_model(fields["model"])
        writer.add_token_list(fields["tokens"])
        writer.add_token_merges(fields["merges"])
    for name, number in fields["ids"].items():
        name = {"unk": "unknown", "pad": "padding"}.get(name, name)
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    for name, value in fields["flags"].items():
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", value)
    if fields["template"] is not None:
        writer.add_chat_template(fields["template"])
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def findings(path: Path, parent: Path) -> list[str]:
    shipped = ShippedFiles(open_checkpoint(str(parent)))
    listed = vocabulary_findings(open_checkpoint(str(path)), shipped)
    return [f"{finding.subject}: {finding.cause}" for finding in listed]


def test_what_gguf_writes_of_the_parent_has_no_finding(parent: Path, tmp_path: Path) -> None:
    fields = vocabulary(parent)
    assert fields["merges"]
    assert fields["template"]
    assert {"bos", "eos"} <= fields["ids"].keys()
    assert findings(written(tmp_path / "m.gguf", fields), parent) == []
    longer = {**fields, "template": None}
    assert len(findings(written(tmp_path / "n.gguf", longer), parent)) == 1


def swapped(tokens: list[str]) -> None:
    tokens[4], tokens[5] = tokens[5], tokens[4]


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda f: swapped(f["tokens"]), "tokenizer.ggml.tokens: 2 of 31 tokens are not the parent's, first id 4: it is 'c' here and 'b'"),
        (lambda f: f.update(tokens=f["tokens"][:10]), "first id 10: it is nothing here and 'h' in the parent's tokenizer.json"),
        (lambda f: f["tokens"].insert(3, "new"), "tokens are not the parent's, first id 3: it is 'new' here and 'a'"),
        (lambda f: f["merges"].reverse(), "the first that differs is number 0: 'c d' here and 'a b' there"),
        (lambda f: f["merges"].pop(), "1 merges here and 2 in the parent's tokenizer.json, the first that differs is number 1: nothing here"),
        (lambda f: f["ids"].update(eos=7), "tokenizer.ggml.eos_token_id: it is 7 here and 1 or 30 or 32 in the parent"),
        (lambda f: f["ids"].pop("bos"), "tokenizer.ggml.bos_token_id: it is nothing here and 0"),
        (lambda f: f["flags"].update(bos=False), "tokenizer.ggml.add_bos_token: it is False here and True in the parent's tokenizer_config.json"),
        (lambda f: f.update(template=None), "tokenizer.chat_template: it is nothing here and"),
        (lambda f: f.update(template=TEMPLATE.replace("im_start", "im_stat")), "tokenizer.chat_template: it is"),
        (lambda f: f.update(model=""), "the vocabulary is missing here"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(
    plant: Callable[[Fields], object], words: str, parent: Path, tmp_path: Path
) -> None:
    fields = vocabulary(parent)
    plant(fields)
    texts = findings(written(tmp_path / "m.gguf", fields), parent)
    assert len(texts) == 1
    assert words in texts[0]


def test_spaces_of_added_tokens_and_other_kinds_are_not_compared(
    parent: Path, tmp_path: Path
) -> None:
    fields = vocabulary(parent)
    added = next(iter(added_tokens(tokenizer_json())))
    fields["tokens"][fields["tokens"].index(added)] = f" {added}"
    assert findings(written(tmp_path / "m.gguf", fields), parent) == []
    swapped(fields["tokens"])
    fields["model"] = "bert"
    assert findings(written(tmp_path / "n.gguf", fields), parent) == []


def test_merges_as_pairs_are_those_as_texts(parent: Path, tmp_path: Path) -> None:
    settings = tokenizer_json()
    settings["model"]["merges"] = [
        merge.split(" ") if isinstance(merge, str) else merge for merge in settings["model"]["merges"]
    ]  # fmt: skip
    other = parent_shipment().write(tmp_path / "parent")
    (other / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    assert findings(written(tmp_path / "m.gguf", vocabulary(parent)), other) == []
