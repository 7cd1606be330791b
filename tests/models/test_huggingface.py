"""Folders that transformers loads: the right numbers and sites, and every bad folder refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qgate.errors import QgateError
from qgate.hooks.tapping import tap_sites
from qgate.models import Model, Sampling, language, load
from qgate.models.huggingface import language_part, load_network, tokenizer
from tests.models.checkpoints import (
    Folder,
    FoldersByName,
    Hostile,
    as_bin,
    byte_level_tokenizer,
    changed,
    check_refusal,
    config,
    cut,
    in_turn,
    randomize,
    text,
    unlink,
)
from tests.shares import proof, share

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_network")

VOCABULARY = 320
TWO = Sampling(samples=2, seqlen=16, calib_samples=3, calib_seqlen=8)
ROW = torch.arange(16).view(1, -1)

LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
GEMMA = LLAMA | {"head_dim": 8, "sliding_window": 8}

# Per family: class, config, blocks and their number, head, one linear layer and its input width.
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, int], tuple[str, ...], tuple[str, int]]] = {
    "llama": ("LlamaForCausalLM", LLAMA, ("model.layers", 3), ("lm_head",), ("model.layers.1.mlp.down_proj", 48)),
    "qwen2": ("Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True}, ("model.layers", 3), ("lm_head",), ("model.layers.2.self_attn.q_proj", 32)),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 80}, ("transformer.h", 3), ("lm_head",), ("transformer.h.0.mlp.c_proj", 80)),
    "opt": ("OPTForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}, ("model.decoder.layers", 2), ("lm_head",), ("model.decoder.layers.1.fc2", 48)),
    "bert": ("BertModel", {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}, ("encoder.layer", 2), (), ("encoder.layer.1.output.dense", 48)),
    "bert for masked tokens": ("BertForMaskedLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}, ("bert.encoder.layer", 2), ("cls.predictions.decoder",), ("bert.encoder.layer.0.attention.self.key", 32)),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}, ("model.layers", 3), ("lm_head",), ("model.layers.0.self_attn.o_proj", 32)),
    "mamba": ("MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}, ("backbone.layers", 2), ("lm_head",), ("backbone.layers.1.mixer.dt_proj", 2)),
    "llava": ("LlavaForConditionalGeneration", {"text_config": {"model_type": "llama", **LLAMA}, "vision_config": {"model_type": "clip_vision_model", **VISION}, "image_token_index": VOCABULARY - 1}, ("model.language_model.layers", 3), ("lm_head",), ("model.language_model.layers.2.mlp.up_proj", 32)),
    "gemma3": ("Gemma3ForConditionalGeneration", {"text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": VOCABULARY - 1}, ("model.language_model.layers", 3), ("lm_head",), ("model.language_model.layers.0.mlp.down_proj", 48)),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {"text_config": LLAMA | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "vision_config": {"depth": 5, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}}, ("model.language_model.layers", 3), ("lm_head",), ("model.language_model.layers.1.self_attn.v_proj", 32)),
}  # fmt: skip
IMAGE_TEXT = ("llava", "gemma3", "qwen2_vl")


def build(family: str) -> Any:
    kind = getattr(transformers, FAMILIES[family][0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = kind._from_config(
            kind.config_class(**FAMILIES[family][1]), attn_implementation="eager"
        )
    randomize(network)
    return network.eval()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a small byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("words")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(VOCABULARY - 8),
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=64,
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(words: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("family") / "model"
        return changed(words, folder, build(family).save_pretrained)

    return FoldersByName(make)


@share(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_runs_and_its_parts_are_found(
    family: str, folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    _, _, (stem, count), head, (linear, width) = FAMILIES[family]
    theirs = build(family)
    folder = folders[family]
    theirs(torch.zeros(1, 4, dtype=torch.long))  # transformers says once what it computes itself
    capfd.readouterr()
    model = load(f"hf:{folder}", sampling=TWO)
    assert model.layers == tuple(f"{stem}.{k}" for k in range(count))
    assert model.head == head
    assert (len(model.inputs), len(model.calibration_samples())) == (2, 3)
    assert [tuple(sample.shape) for sample in model.inputs] == [(1, 16), (1, 16)]
    assert not model.module.training
    assert all(p.dtype == torch.float32 for p in model.module.parameters())

    with torch.no_grad():
        result = model(model.inputs[0])
        expected = theirs(model.inputs[0])
        repeated = model(model.inputs[0])
        whole = model.module(model.inputs[0])
    assert torch.equal(result, repeated)
    reference = expected["logits" if "logits" in expected else "last_hidden_state"]
    assert (result - reference).norm() <= 1e-5 * reference.norm()
    assert not any("past" in key or "cache" in key for key in whole if whole[key] is not None)
    assert capfd.readouterr() == ("", "")

    sites = {site.name: site for site in (*model.sites(), *model.idle_sites())}
    assert sites[f"{linear}:input"].kind == "linear"
    assert sites[f"{linear}:weight"].width == width
    assert sites[f"{linear}:weight"].transposed == (family == "gpt2")
    assert f"{stem}.0:output" in sites
    assert unused(model) <= UNUSED.get(family, set())


# What transformers gives to functions and does not call, so that no hook sees its tensors.
UNUSED = {
    "gpt2": {"attn_dropout"},
    "bert": {"dropout"},
    "bert for masked tokens": {"dropout"},
    "mamba": {"act", "conv1d", "dt_proj"},
}


def unused(model: Model) -> set[str]:
    """Leaf names of sites where nothing flows."""
    passed: set[str] = set()
    with (
        torch.no_grad(),
        tap_sites(model.module, model.sites(), lambda site, _: passed.add(site.name)),
    ):
        model(model.inputs[1])
    assert passed == {site.name for site in model.sites()}
    return {site.module.rpartition(".")[2] for site in model.idle_sites()}


@pytest.mark.parametrize("family", IMAGE_TEXT)
def test_only_the_language_part_of_an_image_text_model_counts(
    family: str, folders: dict[str, Path]
) -> None:
    model = load(f"hf:{folders[family]}", sampling=TWO)
    modules = {site.module for site in model.sites()}
    assert all(name.startswith(("model.language_model.", "lm_head")) for name in modules)
    assert "lm_head" in modules
    linear = [name for name, m in model.module.named_modules() if isinstance(m, nn.Linear)]
    assert any("vision" in name or "visual" in name for name in linear)


def test_models_of_text_alone_have_no_part(folders: dict[str, Path]) -> None:
    assert language_part(load_network(folders["llama"])) == ""
    assert language_part(nn.Linear(2, 2)) == ""


def test_half_precision_and_shards_and_bin(folders: dict[str, Path], tmp_path: Path) -> None:
    network = build("llama").bfloat16()
    network.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    pickled = changed(folders["llama"], tmp_path / "bin", as_bin(network.state_dict()))
    for folder in (tmp_path / "shards", pickled):
        loaded = load_network(folder)
        for name, tensor in network.float().state_dict().items():
            assert loaded.state_dict()[name].dtype == torch.float32
            assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_class_of_the_config_counts_and_its_model_type_where_it_has_none(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for k, names in enumerate((None, ["LLaMAForCausalLM"])):
        folder = changed(folders["llama"], tmp_path / f"{k}", config(architectures=names))
        assert type(load_network(folder)).__name__ == "LlamaForCausalLM"
    folder = changed(folders["llava"], tmp_path / "llava", config(architectures=None))
    assert type(load_network(folder)).__name__ == "LlavaForConditionalGeneration"


def test_a_folder_may_have_any_name(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed(folders["llama"], tmp_path / "meta llama: 8B [é]", config())
    assert load("hf:meta llama: 8B [é]", sampling=TWO).layers[0] == "model.layers.0"


@proof
def test_loading_writes_nothing_in_a_fresh_process(folders: dict[str, Path]) -> None:
    code = (
        "import sys; from qgate.models import Sampling, load; "
        "load(sys.argv[1], sampling=Sampling(samples=2, seqlen=16))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"hf:{folders['llama']}"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("family", ["gpt2", "bert", "opt"])
def test_samples_longer_than_the_table_of_positions(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    def shorten(folder: Path) -> None:
        kind = getattr(transformers, FAMILIES[family][0])
        fields = {"max_position_embeddings": 24}
        small = kind(kind.config_class(**FAMILIES[family][1], **fields))
        small.save_pretrained(folder)

    folder = changed(folders[family], tmp_path / "short", shorten)
    fits = load(f"hf:{folder}", sampling=Sampling(samples=1, seqlen=24))
    assert fits(fits.inputs[0]).shape[1] == 24
    with pytest.raises(
        QgateError, match=r"has 24 positions, fewer than the 512 .* calib_seqlen of 24"
    ):
        fits.calibration_samples()
    with pytest.raises(
        QgateError,
        match=r"short has 24 positions, fewer than the 25 .*seqlen and calib_seqlen of 24",
    ):
        load(f"hf:{folder}", sampling=Sampling(samples=1, seqlen=25))


def test_rotary_positions_have_no_such_limit(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["llama"], tmp_path / "short", config(max_position_embeddings=8))
    assert load(f"hf:{folder}", sampling=TWO).inputs[0].shape == (1, 16)


def test_ids_beyond_the_vocabulary(folders: dict[str, Path]) -> None:
    for ids in (torch.arange(VOCABULARY + 1), torch.arange(-1, 200)):
        sampling = Sampling(samples=2, seqlen=16, tokens=ids)
        for family in ("llama", "llava"):
            with pytest.raises(
                QgateError, match=rf"from 0 to 319, .* from {ids[0]} to {ids[-1]}\."
            ):
                load(f"hf:{folders[family]}", sampling=sampling)


# Tokenizers --------------------------------------------------------------------------------------


def test_a_tokenizer_gives_the_ids_of_the_text_and_no_others(
    words: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    encode = tokenizer(words)
    content = language.text("evaluation", 2**16)
    ids = encode(content)
    assert (ids.dtype, ids.dim()) == (torch.int64, 1)
    assert len(ids) > 10000
    theirs = transformers.AutoTokenizer.from_pretrained(words)
    assert theirs.decode(ids.tolist()) == content
    assert len(encode("")) == 0
    assert not set(ids.tolist()) & set(theirs.all_special_ids)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mamba", "qwen2", "mixtral"])
def test_a_folder_without_tokenizer_names_both_ways_out(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Some classes make an empty vocabulary where there is no file; no model runs on that."""

    def strip(folder: Path) -> None:
        for file in folder.glob("tokenizer*"):
            file.unlink()

    folder = changed(folders[family], tmp_path / "bare", strip)
    for name in (f"hf:{folder}", f"mamba:{folder}"):
        with pytest.raises(QgateError) as caught:
            load(name, sampling=TWO)
        for word in (str(folder), "tokenizer.json", "--tokens FILE.npy"):
            assert word in str(caught.value)
    tokens = Sampling(samples=2, seqlen=16, tokens=torch.arange(128) % VOCABULARY)
    assert load(f"hf:{folder}", sampling=tokens).inputs[0].shape == (1, 16)


def test_a_damaged_tokenizer(words: Path, tmp_path: Path) -> None:
    folder = changed(words, tmp_path / "bad", cut("tokenizer.json"))
    with pytest.raises(QgateError, match=r"(?s)bad.*tokenizer.*--tokens FILE\.npy"):
        tokenizer(folder)


def test_without_transformers(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        QgateError, match=r"hf:PATH needs transformers .*pip install 'pytest-qgate\[hf\]'"
    ):
        load_network(folders["llama"])
    with pytest.raises(
        QgateError, match=r"a tokenizer needs .*'pytest-qgate\[hf\]', or .*--tokens"
    ):
        load(f"mamba:{folders['mamba']}", sampling=TWO)
    tokens = Sampling(samples=2, seqlen=16, tokens=torch.arange(128) % VOCABULARY)
    assert load(f"mamba:{folders['mamba']}", sampling=tokens).layers[0] == "backbone.layers.0"


# Bad folders: the family, what is done to it, and words that the message has to contain. ----------


def sharded(change: Folder) -> Folder:
    def act(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        build("llama").save_pretrained(folder, max_shard_size="40KB")
        change(folder)

    return act


def weights(**fields: Any) -> Folder:
    """Weights put in, or taken out with None; two underscores stand for a dot."""

    def act(folder: Path) -> None:
        file = folder / "model.safetensors"
        named = {name.replace("__", "."): value for name, value in fields.items()}
        merged = load_file(file) | named
        save_file({k: v for k, v in merged.items() if v is not None}, file, {"format": "pt"})

    return act


def last(change: Any) -> Folder:
    return lambda folder: change(sorted(p.name for p in folder.glob("model-*"))[-1])(folder)


OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
OWN_CODE = "import pathlib; pathlib.Path('was-run').touch()"
UP = "model__layers__1__mlp__up_proj__weight"
BAD: dict[str, tuple[str, Folder, list[str]]] = {
    "no weights": ("llama", unlink("model.safetensors"), ["no weights", "model.safetensors", "Copy them"]),
    "empty file": ("llama", cut("model.safetensors", 0), ["model.safetensors", "damaged or cut short", "Copy it again"]),
    "cut file": ("llama", cut("model.safetensors"), ["model.safetensors", "damaged or cut short", "Copy it again"]),
    "cut shard": ("llama", sharded(last(cut)), ["-of-0000", "damaged or cut short", "Copy it again"]),
    "missing shard": ("llama", sharded(last(unlink)), ["-of-0000", "not in the folder", "Copy it"]),
    "hostile pickle": ("llama", as_bin({"lm_head.weight": Hostile()}), [".bin", "refused", "model.safetensors"]),
    "not JSON": ("llama", text("config.json", "{nope"), ["config.json", "JSON"]),
    "no model_type": ("llama", text("config.json", "{}"), ["no model_type", "mamba:PATH", "package.module:build"]),
    "a list": ("llama", text("config.json", "[1]"), ["config.json"]),
    "unknown model_type": ("llama", config(model_type="foobar", architectures=None), ["model_type 'foobar'", "newer transformers", "package.module:build"]),
    "state-spaces": ("llama", text("config.json", '{"d_model": 8, "n_layer": 2, "vocab_size": 9}'), ["no model_type", "mamba:PATH"]),
    "remote code": ("llama", in_turn(text("own.py", OWN_CODE), config(model_type="own", auto_map=OWN)), ["auto_map", "refused", "package.module:build"]),
    "remote class": ("llama", in_turn(text("own.py", OWN_CODE), config(architectures=["OwnModel"], auto_map=OWN)), ["auto_map", "refused", "package.module:build"]),
    "other shapes": ("llama", config(intermediate_size=64), ["model.layers.0.mlp.down_proj.weight", "(32, 48)", "(32, 64)", "9 tensors", "Copy the config.json"]),
    "missing tensor": ("llama", weights(**{UP: None}), [UP.replace("__", "."), "at random", "Copy"]),
    "missing head": ("llama", weights(lm_head__weight=None), ["lm_head.weight", "at random"]),
    "more layers": ("llama", config(num_hidden_layers=4), ["model.layers.3.", "and 3 more", "at random"]),
    "fewer layers": ("llama", config(num_hidden_layers=2), ["describes 2 model.layers", "model.layers.2.", "Copy the config.json"]),
    "size is a word": ("llama", config(hidden_size="large"), ["hidden_size", "config.json"]),
    "negative size": ("llama", config(hidden_size=-32), ["-32", "config.json"]),
    "quantized": ("llama", config(quantization_config={"quant_method": "fp8"}), ["quantization_config", "original weights"]),
    "adapter": ("llama", text("adapter_config.json", "{}"), ["adapter_config.json", "Merge"]),
    "encoder and decoder": ("llama", text("config.json", '{"model_type": "t5", "is_encoder_decoder": true}'), ["t5", "package.module:build"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused(
    case: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    family, change, words = BAD[case]
    folder = changed(folders[family], tmp_path / "bad", change)
    capfd.readouterr()
    check_refusal(load_network, folder, words)
    assert capfd.readouterr() == ("", "")
