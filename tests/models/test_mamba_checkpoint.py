"""Mamba-1 checkpoints: the same numbers as transformers' own model, and every bad folder refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qgate.errors import QgateError
from qgate.models import Sampling, load
from qgate.models.mamba.checkpoint import load_checkpoint
from qgate.models.mamba.network import Mamba, MambaConfig
from tests.models.checkpoints import (
    Folder,
    Hostile,
    as_bin,
    assert_same,
    changed,
    check_refusal,
    config,
    cut,
    in_turn,
    outputs,
    randomize,
    text,
    unlink,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "state_size": 5,
    "conv_kernel": 4,
    "expand": 2,
}
BLOCKS = [f"backbone.layers.{k}" for k in range(3)]
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"use_bias": True, "tie_word_embeddings": False},
    "no conv bias": {"use_conv_bias": False, "hidden_act": "swish"},
    "odd dt rank": {"time_step_rank": 7, "layer_norm_epsilon": 1e-3},
    "wide": {"expand": 3, "conv_kernel": 2, "state_size": 16},
}


def build(**fields: Any) -> Any:
    settings = transformers.MambaConfig(**(SIZES | fields))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.MambaForCausalLM(settings)
    randomize(network)
    network.config.use_cache = False
    return network.eval()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Hugging Face writes it, not tied, so that every tensor is there."""
    folder = tmp_path_factory.mktemp("plain")
    build(tie_word_embeddings=False).save_pretrained(folder)
    return folder


def state_spaces(folder: Path, network: Mamba, **fields: Any) -> dict[str, Tensor]:
    """A folder as state-spaces releases it: other names, half precision, a padded vocabulary."""
    settings = {
        "d_model": network.config.d_model,
        "n_layer": network.config.n_layer,
        "vocab_size": network.config.vocab_size - 3,
        "ssm_cfg": {"d_state": network.config.d_state},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings | fields))
    state = {
        name.replace("embeddings", "embedding"): tensor.half()
        for name, tensor in network.state_dict().items()
    }
    torch.save(state, folder / "pytorch_model.bin")
    return state


@pytest.mark.parametrize("name", VARIANTS)
def test_the_network_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    theirs = build(**VARIANTS[name])
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    assert not ours.training
    assert_same(ours, theirs, BLOCKS, SIZES["vocab_size"])
    tied = ours.lm_head.weight is ours.backbone.embeddings.weight
    assert tied == VARIANTS[name].get("tie_word_embeddings", True)


def pickled(network: Any, folder: Path, shards: int = 1, **settings: Any) -> None:
    """Write the files that save_pretrained wrote before safetensors."""
    network.config.save_pretrained(folder)
    state = list(network.state_dict().items())
    if shards == 1:
        torch.save(dict(state), folder / "pytorch_model.bin", **settings)
        return
    places = {}
    for k in range(shards):
        file = f"pytorch_model-{k + 1:05d}-of-{shards:05d}.bin"
        torch.save(dict(state[k::shards]), folder / file, **settings)
        places |= {name: file for name, _ in state[k::shards]}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "safetensors shards": lambda network, folder: network.save_pretrained(
        folder, max_shard_size="8KB"
    ),
    "bin": lambda network, folder: pickled(network, folder),
    "bin shards": lambda network, folder: pickled(network, folder, 3),
    "bin of old torch": lambda network, folder: pickled(
        network, folder, _use_new_zipfile_serialization=False
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_kind_of_file_gives_the_same_weights(writer: str, tied: bool, tmp_path: Path) -> None:
    theirs = build(tie_word_embeddings=tied)
    WRITERS[writer](theirs, tmp_path)
    if "shards" in writer:
        assert len(list(tmp_path.glob("*-of-*"))) > 2
    state = load_checkpoint(tmp_path).state_dict()
    assert state.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = build().to(dtype)
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    assert all(p.dtype == torch.float32 for p in ours.parameters())
    assert_same(ours, theirs.float(), BLOCKS, SIZES["vocab_size"])


def test_weights_do_not_hang_on_the_file(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "copy", config())
    network = load_checkpoint(folder)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.write(bytes(file.stat().st_size))
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_release_of_state_spaces(tied: bool, tmp_path: Path) -> None:
    network = Mamba(MambaConfig(48, 32, 2, 64, d_state=6, tied=tied))
    randomize(network)
    state = state_spaces(tmp_path, network, tie_embeddings=tied)
    assert "backbone.embedding.weight" in state
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == network.config
    for name, tensor in network.half().float().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_sizes_that_state_spaces_may_give(tmp_path: Path) -> None:
    expected = MambaConfig(40, 32, 2, 96, 4, 3, dt_rank=5, conv_bias=False, bias=True)
    network = Mamba(expected)
    inside = {
        "d_state": 4,
        "d_conv": 3,
        "expand": 3,
        "dt_rank": 5,
        "conv_bias": False,
        "bias": True,
    }
    state_spaces(tmp_path / "given", network, ssm_cfg=inside)
    assert load_checkpoint(tmp_path / "given").config == expected
    inside |= {"dt_rank": "auto", "layer": "Mamba1"}
    folder = changed(tmp_path / "given", tmp_path / "auto", config(ssm_cfg=inside))
    with pytest.raises(QgateError, match=r"shape \(13, 96\), but .* asks for \(10, 96\)"):
        load_checkpoint(folder)


def test_through_load_with_token_ids(plain: Path) -> None:
    sampling = Sampling(samples=2, seqlen=16, tokens=torch.arange(400) % SIZES["vocab_size"])
    model = load(f"mamba:{plain}", sampling=sampling)
    assert (model.layers, model.head) == (tuple(BLOCKS), ("lm_head",))
    assert model(model.inputs[0]).shape == (1, 16, SIZES["vocab_size"])
    assert {site.module for site in model.sites() if site.kind == "scan"} == {
        f"{block}.mixer.scan" for block in BLOCKS
    }
    with torch.no_grad():
        assert torch.equal(model(model.inputs[0]), outputs(model.module, [], model.inputs[0])[0])


# Bad folders: what is done to a good one, and words that the message has to contain. --------------


def weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Folder:
    def act(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file)

    return act


def shards(change: Folder) -> Folder:
    """The same weights in shards, and then something done."""

    def act(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        places = {}
        for k in range(3):
            file = f"model-{k + 1:05d}-of-00003.safetensors"
            save_file(dict(list(state.items())[k::3]), folder / file)
            places |= dict.fromkeys(list(state)[k::3], file)
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        change(folder)

    return act


A_LOG = "backbone.layers.1.mixer.A_log"
FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
MAMBA2 = {"d_model": 24, "n_layer": 3, "vocab_size": 40, "model_type": None, "architectures": None}
BAD: dict[str, tuple[Folder, list[str]]] = {
    "no config": (unlink("config.json"), ["config.json"]),
    "not JSON": (text("config.json", "{'a': 1}"), ["config.json", "not JSON", "Copy it again"]),
    "JSON too deep": (text("config.json", "[" * 100000), ["config.json", "not JSON"]),
    "a list": (text("config.json", "[1]"), ["config.json", "holds a list", "Copy it again"]),
    "empty object": (text("config.json", "{}"), ["neither model_type", "d_model", "hf:PATH"]),
    "mamba2": (config(model_type="mamba2"), ["'mamba2'", "Mamba-1 only", "hf:PATH"]),
    "falcon_mamba": (config(model_type="falcon_mamba"), ["'falcon_mamba'", "hf:PATH"]),
    "llama": (config(model_type="llama"), ["'llama'", "hf:PATH"]),
    "no model_type": (config(model_type=None), ["model_type None", "hf:PATH"]),
    "no head": (config(architectures=["MambaModel"]), ["MambaModel", "MambaForCausalLM"]),
    "quantized": (config(quantization_config={"bits": 4}), ["quantization_config", "original"]),
    "gelu": (config(hidden_act="gelu"), ["hidden_act 'gelu'", "silu", "hf:PATH"]),
    "no hidden_size": (config(hidden_size=None), ["hidden_size", "a whole number above zero"]),
    "no vocab_size": (config(vocab_size=None), ["vocab_size", "a whole number above zero"]),
    "zero layers": (config(num_hidden_layers=0), ["num_hidden_layers 0", "above zero"]),
    "negative size": (config(hidden_size=-24), ["hidden_size -24", "above zero"]),
    "fraction": (config(state_size=5.5), ["state_size 5.5", "whole number"]),
    "true": (config(conv_kernel=True), ["conv_kernel True", "whole number"]),
    "a word": (config(time_step_rank="large"), ["time_step_rank 'large'", "above zero or 'auto'", "Correct it"]),
    "a word for a flag": (config(use_bias="no"), ["use_bias 'no'", "true or false", "Correct it"]),
    "epsilon": (config(layer_norm_epsilon="1e-5"), ["layer_norm_epsilon '1e-5'", "between 0 and 1", "Correct it"]),
    "epsilon NaN": (config(layer_norm_epsilon=float("nan")), ["layer_norm_epsilon nan"]),
    "endless": (config(num_hidden_layers=10**12), ["1000000000000 layers", "Copy the config.json"]),
    "huge": (config(hidden_size=10**30, intermediate_size=None), ["larger than any memory"]),
    "LayerNorm": (config(**MAMBA2, rms_norm=False), ["rms_norm false", "RMSNorm"]),
    "Mamba2 layers": (config(**MAMBA2, ssm_cfg={"layer": "Mamba2"}), ["ssm_cfg.layer 'Mamba2'", "Mamba-1", "hf:PATH"]),
    "attention layers": (config(**MAMBA2, attn_layer_idx=[1]), ["attn_layer_idx [1]", "hf:PATH"]),
    "bad ssm_cfg": (config(**MAMBA2, ssm_cfg=[4]), ["ssm_cfg [4]", "object", "Correct it"]),
    "bad d_state": (config(**MAMBA2, ssm_cfg={"d_state": 0}), ["d_state 0", "above zero"]),
    "no weights": (unlink("model.safetensors"), ["no weights", "model.safetensors", "pytorch_model.bin"]),
    "empty file": (cut("model.safetensors", 0), ["model.safetensors", "damaged or cut short", "Copy it again"]),
    "cut file": (cut("model.safetensors"), ["model.safetensors", "damaged or cut short", "Copy it again"]),
    "LFS pointer": (text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), ["model.safetensors", "git lfs pull"]),
    "cut shard": (shards(cut(LAST)), [LAST, "damaged or cut short", "Copy it again"]),
    "missing shard": (shards(unlink(LAST)), [LAST, "not in the folder", "Copy it"]),
    "shard elsewhere": (shards(text("model.safetensors.index.json", '{"weight_map": {"a": "../a.safetensors"}}')), ["../a.safetensors", "not in the folder"]),
    "index without names": (shards(text("model.safetensors.index.json", "{}")), ["model.safetensors.index.json", "weight_map"]),
    "index is no JSON": (shards(text("model.safetensors.index.json", "")), ["model.safetensors.index.json", "not JSON"]),
    "twice": (shards(lambda folder: save_file(load_file(folder / FIRST) | load_file(folder / LAST), folder / LAST)), ["tensor 'backbone.", FIRST, LAST, "Remove"]),
    "hostile pickle": (as_bin({"lm_head.weight": Hostile()}), ["pytorch_model.bin", "refused", "model.safetensors"]),
    "a whole module": (as_bin(torch.nn.Linear(2, 2)), ["pytorch_model.bin", "refused"]),
    "no tensors": (as_bin({"model": {"a": torch.ones(2)}}), ["pytorch_model.bin", "state_dict()"]),
    "cut bin": (in_turn(as_bin({"a": torch.ones(2000)}), cut("pytorch_model.bin")), ["pytorch_model.bin", "Copy it again"]),
    "text for bin": (in_turn(as_bin({}), text("pytorch_model.bin", "hello")), ["pytorch_model.bin", "damaged", "Copy it again"]),
    "missing tensor": (weights(lambda w: {k: v for k, v in w.items() if k != A_LOG}), [f"lacks {A_LOG}", "Copy"]),
    "missing head": (weights(lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"}), ["lacks lm_head.weight", "tie_word_embeddings"]),
    "fewer layers": (config(num_hidden_layers=2), ["has backbone.layers.2.", "unknown to this model"]),
    "more layers": (config(num_hidden_layers=4), ["lacks backbone.layers.3.", "and 4 more"]),
    "unexpected tensor": (weights(lambda w: w | {"extra.weight": torch.ones(2)}), ["has extra.weight", "unknown"]),
    "biases in config only": (config(use_bias=True), ["lacks", "in_proj.bias"]),
    "other shape": (weights(lambda w: w | {A_LOG: torch.ones(48, 4)}), [A_LOG, "(48, 4)", "(48, 5)", "model.safetensors"]),
    "other states": (config(state_size=6), ["A_log", "(48, 5)", "(48, 6)", "Copy the config.json"]),
    "integers": (weights(lambda w: w | {A_LOG: torch.ones(48, 5).to(torch.int8)}), [A_LOG, "torch.int8", "before quantization"]),
    "tied, two heads": (config(tie_word_embeddings=True), ["lm_head.weight", "tie_word_embeddings", "to false"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused(
    case: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change, words = BAD[case]
    folder = changed(plain, tmp_path / "bad", change)
    check_refusal(load_checkpoint, folder, words)


def test_bad_shapes_are_found_before_weights_are_read(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgate.models.mamba import checkpoint_files

    folder = changed(plain, tmp_path / "bad", config(state_size=6))

    def read(shard: Any, name: str) -> Tensor:
        raise AssertionError(f"{name} of {shard.path} was read")

    monkeypatch.setattr(checkpoint_files.CheckpointShard, "float32", read)
    with pytest.raises(QgateError, match="A_log"):
        load_checkpoint(folder)
