"""All that is shipped beside weights is the parent's, as the recipe says, or a finding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from qgate.checkpoints.comparison import compare
from tests.checkpoints import gguf_exports
from tests.checkpoints.exports import export, write
from tests.checkpoints.shipped_exports import (
    INDEX,
    TEMPLATE,
    Shipment,
    child_shipment,
    parent_shipment,
)
from tests.shares import share

Plant = Callable[[Shipment], object]
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parent_shipment().write(tmp_path_factory.mktemp("shipped") / "parent")


def findings_of(folder: Path, parent: Path, plant: Plant) -> list[tuple[str, str]]:
    child = copy.deepcopy(child_shipment())
    plant(child)
    record = compare(str(child.write(folder / "child")), str(parent))
    return [(finding.subject, finding.cause) for finding in record.findings]


def test_a_right_shipment_has_no_finding(parent: Path, tmp_path: Path) -> None:
    assert findings_of(tmp_path, parent, lambda _: None) == []


def test_rules_of_one_meaning_may_be_written_otherwise(parent: Path, tmp_path: Path) -> None:
    """Versions of libraries add steps that do nothing, and leave out others."""

    def plant(child: Shipment) -> None:
        tokenizer = child.files["tokenizer.json"]
        steps = [tokenizer["pre_tokenizer"]]
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        tokenizer["model"]["continuing_subword_prefix"] = ""
        tokenizer["decoder"]["trim_offsets"] = False

    assert findings_of(tmp_path, parent, plant) == []


def test_without_a_parent_the_child_is_held_to_itself(tmp_path: Path) -> None:
    child = child_shipment()
    assert compare(str(child.write(tmp_path / "right"))).findings == []
    child.tensors["lm_head.input_scale"] = torch.ones(1)
    child.files["README.md"] = "# tiny, group size 128, NVFP4\n"
    findings = compare(str(child.write(tmp_path / "wrong"))).findings
    subjects = ["README.md title", "lm_head.input_scale"]
    assert sorted(finding.subject for finding in findings) == subjects


def _file(name: str, *path: str | int, to: object) -> Plant:
    """Return a change of one value in a file; `...` removes it."""

    def plant(child: Shipment) -> None:
        document = child.config if name == "config.json" else child.files[name]
        for key in path[:-1]:
            document = document[key]
        if to is ...:
            del document[path[-1]]
        else:
            document[path[-1]] = to

    return plant


def _without(*names: str) -> Plant:
    return lambda child: child.files.update(dict.fromkeys(names))


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return lambda child: child.tensors.update({name: change(child.tensors[name])})


def _index(change: Callable[[dict[str, Any]], object]) -> Plant:
    def written(index: dict[str, Any]) -> dict[str, Any]:
        change(index)
        return index

    return lambda child: child.files.update({INDEX: written})


def _swap_tokens(child: Shipment) -> None:
    vocabulary = child.files["tokenizer.json"]["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def _upcast(child: Shipment) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        child.tensors[name] = child.tensors[name].float()


def _half(child: Shipment) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        child.tensors[name] = child.tensors[name].half()


def _lose_the_head(child: Shipment) -> None:
    del child.tensors["lm_head.weight"]


T, C, G, J = "tokenizer_config.json", "config.json", "generation_config.json", "tokenizer.json"
FAULTS: dict[str, tuple[Plant, str, tuple[str, ...]]] = {
    "no tokenizer": (_without(J), J, ("missing here", "copy it")),
    "no settings of the tokenizer": (_without(T), T, ("missing here",)),
    "tokens with swapped ids": (_swap_tokens, f"{J} model.vocab", ("2 of 31 tokens have other ids", "'a'", "4 here and 3 in")),
    "a token less": (_file(J, "model", "vocab", "cd", to=...), f"{J} model.vocab", ("1 of 31 tokens is missing here, first 'cd'",)),
    "a token more": (_file(J, "model", "vocab", "xy", to=40), f"{J} model.vocab", ("is not in the parent's, first 'xy'",)),
    "another merge": (_file(J, "model", "merges", 1, to="c e"), f"{J} model.merges[1]", ("'c e' here and 'c d' in the parent",)),
    "a merge less": (_file(J, "model", "merges", to=["a b"]), f"{J} model.merges", ("'1 merge' here and '2 merges'",)),
    "an added token that is not special": (_file(J, "added_tokens", 2, "special", to=False), f"{J} added_tokens '<|im_start|>'.special", ("False here and True",)),
    "no token at the beginning": (_file(J, "post_processor", to=None), f"{J} post_processor", ("nothing here",)),
    "another pre-tokenizer": (_file(J, "pre_tokenizer", "add_prefix_space", to=True), f"{J} pre_tokenizer.add_prefix_space", ("True here and False",)),
    "truncation of calibration": (_file(J, "truncation", to={"max_length": 512}), f"{J} truncation", ("'max_length': 512", "prompts are cut")),
    "a broken tokenizer": (lambda c: c.files.update({J: "{"}), J, ("it is no JSON", "write it again")),
    "another eos token": (_file(T, "eos_token", to="</s>"), f"{T} eos_token", ("'</s>' here and '<|im_end|>' in the parent",)),
    "no bos token": (_file(T, "bos_token", to=None), f"{T} bos_token", ("nothing here and '<s>'",)),
    "no token added at the beginning": (_file(T, "add_bos_token", to=False), f"{T} add_bos_token", ("False here and True",)),
    "a length of calibration": (_file(T, "model_max_length", to=512), f"{T} model_max_length", ("512 here and 8192",)),
    "padding on the other side": (_file(T, "padding_side", to="right"), f"{T} padding_side", ("'right' here and 'left'",)),
    "another class": (_file(T, "tokenizer_class", to="BertTokenizer"), f"{T} tokenizer_class", ("'BertTokenizer' here",)),
    "no chat template": (_file(T, "chat_template", to=...), "chat_template.jinja", ("the chat template is missing here",)),
    "another chat template": (_file(T, "chat_template", to=TEMPLATE.replace("|>assistant", "|>system")), "chat_template.jinja chat_template line 5", ("<|im_start|>system", "<|im_start|>assistant", "in the parent: copy it")),
    "no defaults of generation": (_without(G), G, ("missing here", "sample and stop in another way")),
    "another temperature": (_file(G, "temperature", to=1.0), f"{G} temperature", ("1.0 here and 0.6 in the parent",)),
    "a temperature lost": (_file(G, "temperature", to=...), f"{G} temperature", ("1.0 here and 0.6",)),
    "an end of turn lost": (_file(G, "eos_token_id", to=1), f"{G} eos_token_id", ("1 here and [1, 30]",)),
    "another id of the end": (_file(C, "eos_token_id", to=5), f"{C} eos_token_id", ("5 here and 1 in the parent",)),
    "a shorter context": (_file(C, "max_position_embeddings", to=2048), f"{C} max_position_embeddings", ("2048 here and 8192 in the parent", "copy the parent's value")),
    "a context that is lost": (_file(C, "max_position_embeddings", to=...), f"{C} max_position_embeddings", ("missing here and 8192",)),
    "another factor of rope": (_file(C, "rope_parameters", "factor", to=4.0), f"{C} rope_scaling.factor", ("4.0 here and 8.0",)),
    "rope scaling lost": (_file(C, "rope_parameters", to={"rope_theta": 5e5}), f"{C} rope_scaling.factor", ("missing here and 8.0",)),
    "another base of rope": (_file(C, "rope_parameters", "rope_theta", to=10000.0), f"{C} rope_theta", ("10000.0 here and 500000.0",)),
    "rope scaling of another model": (_file(C, "rope_parameters", "rope_type", to="yarn"), f"{C} rope_scaling.rope_type", ("'yarn' here and 'llama3'",)),
    "a head that is lost": (_lose_the_head, "lm_head.weight", ("in the parent alone",)),
    "an embedding in FP32": (_upcast, ".weight", ("F32 here and BF16 in the parent", "store BF16")),
    "an embedding in FP16": (_half, ".weight", ("F16 here and BF16 in the parent, and config.json declares BF16",)),
    "a correction that was rounded": (_tensor("model.layers.0.mlp.bias_correction", torch.Tensor.bfloat16), "bias_correction", ("BF16 here and F32 in the parent", "store it as F32")),
    "a scale of the head": (lambda c: c.tensors.update({"lm_head.input_scale": torch.ones(1)}), "lm_head.input_scale", ("BF16 and not quantized", "remove it")),
    "a file of another export": (lambda c: c.files.update({"pytorch_model.bin": b"x"}), "pytorch_model.bin", ("nothing refers to it", "remove it")),
    "a tensor that the index lacks": (_index(lambda i: i["weight_map"].pop("model.norm.weight")), f"{INDEX} model.norm.weight", ("1 of 36 stored tensors are not in the index",)),
    "a tensor in another shard": (_index(lambda i: i["weight_map"].update({"model.norm.weight": "model-00009-of-00009.safetensors"})), f"{INDEX} model.norm.weight", ("the tensor lies in",)),
    "a tensor that no file has": (_index(lambda i: i["weight_map"].update({"model.extra": "model-00001-of-00002.safetensors"})), f"{INDEX} model.extra", ("are in no file",)),
    "the index of the parent": (_index(lambda i: i["metadata"].update(total_size=9_000_000)), f"{INDEX} metadata.total_size", ("9.0 MB here, and the tensors have 0.1 MB",)),
    "code that is lost": (_without("modeling_tiny.py"), "modeling_tiny.py", ("config.json auto_map names it",)),
    "no preprocessor": (_without("preprocessor_config.json"), "preprocessor_config.json", ("missing here",)),
    "another format in a tag": (lambda c: c.files.update({"README.md": "---\ntags: [int8, llm]\n---\n# tiny FP8\n"}), "README.md tags", ("'int8' here",)),
    "another format in the head": (lambda c: c.files.update({"README.md": "---\nquantization: int4\n---\n# tiny\n"}), "README.md quantization", ("'int4' here",)),
    "other bits in the head": (lambda c: c.files.update({"README.md": "---\nquantization:\n  bits: 4\n---\n# tiny\n"}), "README.md bits", ("'4-bit' here",)),
    "another format in a sentence": (lambda c: c.files.update({"README.md": "# tiny FP8\n\nWeights are quantized to NVFP4. It is fast.\n"}), "README.md text", ("'NVFP4' here",)),
    "another format of this model": (lambda c: c.files.update({"README.md": "# tiny\n\nThis is an INT4 quantized version of tiny.\n"}), "README.md text", ("'INT4' here",)),
    "another format in the title": (lambda c: c.files.update({"README.md": "# tiny W4A16\n"}), "README.md title", ("'W4A16' here, and the weights are fp8_e4m3 per row", "correct the card")),
}  # fmt: skip


@share(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_beside_the_weights_is_named(name: str, parent: Path, tmp_path: Path) -> None:
    plant, subject, words = FAULTS[name]
    findings = findings_of(tmp_path, parent, plant)
    causes = [cause for where, cause in findings if where == subject or where.endswith(subject)]
    assert causes, findings
    assert any(all(word in cause for word in words) for cause in causes), findings
    assert len(findings) <= 3, findings


@pytest.mark.parametrize(
    "card",
    [
        "# tiny FP8\n\nUnlike the INT4 version, weights are FP8. There is also an NVFP4 export.\n",
        "# tiny\n\n| weights are | in |\n|---|---|\n| weights are INT4 | other |\n",
        "# tiny\n\n```text\nWeights are quantized to INT4.\n```\n\n> Weights are INT4.\n",
        "# tiny\n\nThe model was quantized from an INT4 one. Activations are quantized to INT8.\n",
        "# tiny\n\nThis model is not quantized to 4 bits. Are weights in INT4 faster?\n",
        "---\nquantized_by: int4-lab\nbase_model: maker/tiny-int4\n---\n# tiny FP8\n",
        "# tiny\n\nWeights are 8-bit (W8A8). See [weights are INT4](https://x.example/int4).\n",
        "# tiny-FP8-KV4-INT4\n",
    ],
)
def test_cards_that_claim_no_other_format_are_no_finding(
    card: str, parent: Path, tmp_path: Path
) -> None:
    assert (
        findings_of(tmp_path, parent, lambda child: child.files.update({"README.md": card})) == []
    )


@pytest.mark.parametrize("claimed", ["MXFP4", "NVFP4"])
def test_blocks_of_fp4_are_told_by_their_size(claimed: str, tmp_path: Path) -> None:
    child = export(tmp_path, "mxfp4")
    (child / "README.md").write_text(f"# tiny {claimed}\n", encoding="utf-8")
    subjects = [finding.subject for finding in compare(str(child)).findings]
    assert subjects == ["README.md title"] * (claimed == "NVFP4")


def _without_rope(shipment: Shipment) -> Shipment:
    for key in ("rope_scaling", "rope_parameters"):
        shipment.config.pop(key, None)
    return shipment


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["yarn", "default"])
def test_positions_are_scaled_as_by_the_parent(key: str, kind: str, tmp_path: Path) -> None:
    """A longer context by YaRN costs accuracy at every length."""
    parent = str(_without_rope(parent_shipment()).write(tmp_path / "parent"))
    child = _without_rope(child_shipment())
    child.config |= {"rope_theta": 500000.0, key: {"rope_type": kind, "factor": 4.0}}
    findings = compare(str(child.write(tmp_path / "child")), parent).findings
    assert [f.subject for f in findings] == ["config.json rope_scaling"] * (kind == "yarn")
    assert all("'yarn' here, and the parent scales no positions" in f.cause for f in findings)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_tie_that_is_lost_leaves_the_head_without_values(model_type: str, tmp_path: Path) -> None:
    """Gemma ties where a configuration says nothing, llama does not."""
    parent, child = parent_shipment(), child_shipment()
    for shipment in (parent, child):
        shipment.config["model_type"] = model_type
        del shipment.tensors["lm_head.weight"]
    parent.config["tie_word_embeddings"] = True
    child.config.pop("tie_word_embeddings")
    sides = str(child.write(tmp_path / "child")), str(parent.write(tmp_path / "parent"))
    subjects = [finding.subject for finding in compare(*sides).findings]
    assert subjects == ["config.json tie_word_embeddings"] * (model_type == "llama")


HOSTILE = ('{"weight_map": {"a": 3}, "metadata": {"total_size": 1e999}}', "[1]", '{"merges": 3}',
           '{"model": {"vocab": [3], "merges": {"a": 1}}, "added_tokens": [3], "vocab": 1}', "", "{",
           '{"chat_template": [{"name": 3}], "bos_token": [], "extra_special_tokens": {"a": {}}}',
           "[" * 100_000)  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_files_of_any_content_are_findings_and_no_crash(
    content: str, parent: Path, tmp_path: Path
) -> None:
    child = child_shipment()
    names = [name for name in (*child.files, INDEX) if name.endswith(".json")]
    child.files |= dict.fromkeys(names, content)
    child.config |= {"auto_map": 3, "dtype": {"a": []}}
    assert compare(str(child.write(tmp_path / "child")), str(parent)).findings


@pytest.mark.parametrize("heads", [gguf_exports.HEADS, 16])
def test_the_head_of_a_gguf_file_states_what_the_parents_configuration_does(
    heads: int, tmp_path: Path
) -> None:
    settings = {"num_attention_heads": heads, "num_key_value_heads": gguf_exports.KEY_HEADS}
    parent = write(tmp_path / "parent", gguf_exports.parent_tensors(), settings)
    child = gguf_exports.export(gguf.GGMLQuantizationType.Q8_0).write(tmp_path / "child.gguf")
    findings = compare(str(child), str(parent)).findings
    if heads == gguf_exports.HEADS:
        assert findings == []
        return
    (finding,) = findings
    assert finding.subject == "llama.attention.head_count"
    assert finding.cause == (
        f"it is {gguf_exports.HEADS} here and 16 in the parent's config.json "
        "(num_attention_heads): convert it again from the parent"
    )
